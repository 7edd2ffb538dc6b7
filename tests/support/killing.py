# SPDX-License-Identifier: Apache-2.0
"""Kill a command at every file-system event, and check its folder afterwards.

This is a separate script because it forks: ``killing.py CASE BACKBONE IMAGES PLACE STEP`` prints a JSON object with the
number of kills and the problems. The parent never trains, because torch cannot train in a child of a process that has
trained. ``kill_all`` calls it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Python raises audit events before these, but not before writing and syncing, which are wrapped below.
_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate", "os.link", "os.symlink")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def arm(folder: Path, fatal: int, count: Callable[[int], None]) -> None:
    """Kill this process just before event ``fatal`` in the folder; half of a write counts as an event."""
    events, root = 0, str(folder)

    def event() -> None:
        nonlocal events
        if events == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        events += 1
        count(events)

    def inside(place: object) -> bool:
        if isinstance(place, int):
            place = Path(f"/proc/self/fd/{place}").resolve()
        return isinstance(place, str | bytes | Path) and str(Path(os.fsdecode(place)).absolute()).startswith(root)

    def audit(name: str, values: tuple[Any, ...]) -> None:
        if name == "open":
            place, _, flags = values
            if isinstance(flags, int) and flags & _WRITING and inside(place):
                event()
        elif (name in _EVENTS and any(map(inside, values[:2]))) or (name == "fcntl.flock" and inside(values[0])):
            event()

    write, fsync, fdopen = os.write, os.fsync, os.fdopen

    def halved_write(handle: int, content: Any) -> int:
        if inside(handle):
            event()
            half = memoryview(content)[: len(content) // 2]
            if events == fatal:
                write(handle, half)
            event()
        return write(handle, content)

    def counted_fsync(handle: int) -> None:
        if inside(handle):
            event()
        fsync(handle)

    class Unbuffered(io.FileIO):
        def write(self, content: Any) -> int:
            return halved_write(self.fileno(), content)

    def counted_fdopen(handle: int, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if mode == "wb" and inside(handle):
            return io.BufferedWriter(Unbuffered(handle, "wb"))
        return fdopen(handle, mode, *rest, **named)

    os.write, os.fsync, os.fdopen = halved_write, counted_fsync, counted_fdopen
    sys.addaudithook(audit)


def in_child(what: Callable[[], object]) -> int:
    """Run a function in a forked process; returns the exit code or the negative signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            what()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(*words: str) -> None:
    """Run ``onea`` as in a shell, without its output."""
    from onea.cli import main

    sys.argv = ["onea", *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"onea ended with {stop.code}") from stop


class Killing:
    """A command that is killed at each of its events in turn, each time in a fresh copy of the same folder.

    Subclasses define the command (``run``), the folder before it (``prepare``), a description of the folder
    (``contents``), and the conditions after a kill (``check``).
    """

    modules: tuple[str, ...]  # imported once in the parent, to save time in the children
    name: str  # of the folder whose events count

    def __init__(self, case: str, backbone: str, images: Path, place: Path) -> None:
        self.case, self.backbone, self.images, self.place = case, backbone, images, place
        self.folder, self.template = place / "work" / self.name, place / "template" / self.name

    @property
    def from_nothing(self) -> bool:
        return self.case.startswith("first")

    def prepare(self) -> None:
        """Create the folder as it is before the command."""
        raise NotImplementedError

    def run(self) -> None:
        """Run the command that is killed."""
        raise NotImplementedError

    def contents(self) -> object:
        """A description of the folder, for comparisons."""
        raise NotImplementedError

    def check(self, before: object, after: object, switched: bool) -> bool:
        """Check the folder after a kill, and that the next command works; returns whether the command took effect.

        Args:
            before: the contents before the command.
            after: the contents after a complete command.
            switched: whether the command had taken effect in an earlier kill.
        """
        raise NotImplementedError

    def reset(self) -> None:
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        self.folder.parent.mkdir(parents=True)
        if not self.from_nothing:
            shutil.copytree(self.template, self.folder)

    def all(self, step: int) -> dict[str, Any]:
        """Kill at every event, or at every ``step``-th one."""
        for module in ("timm", "rich.live", *self.modules):
            importlib.import_module(module)
        self.folder.parent.mkdir(parents=True)
        assert in_child(self.prepare) == 0
        if self.folder.exists():
            shutil.copytree(self.folder, self.template)
        self.reset()
        before = self.contents()
        counter = self.place / "events"

        def count_events() -> None:
            handle = os.open(counter, os.O_CREAT | os.O_WRONLY, 0o600)
            arm(self.folder, -1, lambda events: (os.lseek(handle, 0, 0), os.writev(handle, [str(events).encode()])))  # type: ignore[func-returns-value]
            self.run()

        assert in_child(count_events) == 0
        after, events = self.contents(), int(counter.read_text() or 0)
        switched, kills, problems = False, 0, []
        for fatal in range(0, events, step):
            self.reset()

            def killed(fatal: int = fatal) -> None:
                arm(self.folder, fatal, lambda events: None)
                self.run()

            code = in_child(killed)
            try:
                assert code == -signal.SIGKILL, f"it ended with {code}"
                kills += 1
                switched = self.check(before, after, switched)
            except Exception as error:
                problems.append(f"{self.case}, event {fatal}: {type(error).__name__}: {error}")
        return {
            "case": self.case,
            "events": events,
            "kills": kills,
            "changed": before != after,
            "switched": switched,
            "problems": problems,
        }


class ModelKilling(Killing):
    """Commands that change a model folder."""

    modules = ("onea.model.storage.teaching", "onea.model.storage.folder", "onea.cli.display")
    name = "shop.onea"

    def teach(self, *names: str) -> None:
        day = self.place / "-".join(names)
        for name in names:
            target = day / name
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                target.symlink_to(self.images / "train" / name)
        fresh = [] if (self.folder / "model.json").exists() else ["--backbone", self.backbone, "--epochs", "2"]
        memory = ["--memory", "3"] if self.with_copies else []
        command("teach", str(self.folder), str(day), *fresh, *memory, "--threads", "1", "--precision", "fp32")

    @property
    def with_copies(self) -> bool:
        """Whether the model stores copies of photos."""
        return self.case in ("teach with copies", "refresh", "forget copies everywhere")

    def run(self) -> None:
        """Run the command that is killed."""
        import onea

        if self.case == "first teach":
            self.teach("class00", "class01", "class02")
        elif self.case in ("later teach", "teach with copies"):
            self.teach("class04", "class05")
        elif self.case == "refresh":
            command("refresh", str(self.folder), "--threads", "1", "--precision", "fp32")
        elif self.case == "rename":
            command("rename", str(self.folder), "class01", "one")
        elif self.case == "forget":
            command("forget", str(self.folder), "class01")
        elif self.case in ("forget everywhere", "forget copies everywhere"):
            command("forget", str(self.folder), "class01", "--everywhere")
        elif self.case == "undo":
            command("undo", str(self.folder))
        elif self.case == "save":
            onea.load(self.folder, threads=1).forget("class00").save(self.folder)
        elif self.case == "first save":
            onea.load(self.template, threads=1).save(self.folder)
        else:
            raise AssertionError(self.case)

    def prepare(self) -> None:
        """Create a model with two versions, the second with one more class."""
        if self.case != "first teach":
            self.teach("class00", "class01", "class02")
            self.teach("class03")

    def contents(self) -> tuple[Any, ...] | None:
        """Version, classes and probabilities of the model; None if there is none yet."""
        import onea
        from onea.errors import OneaError

        try:
            model = onea.load(self.folder, threads=1).snapshot()
        except OneaError as error:
            if self.from_nothing and ("contains no model" in str(error) or "does not exist" in str(error)):
                return None
            raise
        return model.version, model.classes, model.predict_proba(self.images / "test").tobytes()

    def check(self, before: object, after: object, switched: bool) -> bool:
        """The model is as before or after the command, and the next command works."""
        from onea.model.storage import folder as folders

        contents = self.contents()
        assert contents in ((after,) if switched else (before, after)), "neither as before nor as after"
        if contents is None:
            assert in_child(lambda: self.teach("class00", "class01", "class02")) == 0, "it cannot be taught again"
        folders.change(self.folder, lambda state, version, date: state.rename("class02", "two", version, date))
        expected = after if contents is None and self.case == "first teach" else contents
        renamed = self.contents()
        assert renamed is not None
        if expected is not None:
            assert renamed[2] == expected[2], "the next command changed the answers"  # type: ignore[index]
        versions = [f"{version:06d}" for version in folders.read_manifest(self.folder).versions.kept]
        assert sorted(entry.name for entry in (self.folder / "states").iterdir()) == versions, "versions were left over"
        names = {entry.name for entry in self.folder.iterdir()}
        expected_names = {"model.json", "states", "README.md", "history.png", "lock"}
        assert names == expected_names | ({"copies"} if self.with_copies else set()), f"left over: {sorted(names)}"
        if self.with_copies:
            folders.verify(self.folder)
            states = [folders.read_state(self.folder, int(version)) for version in versions]
            needed = {file.name for state in states for files in state.exemplars.values() for file in files}
            left = {entry.name for entry in (self.folder / "copies").iterdir()}
            assert left == needed, f"copies left over or lost: {sorted(left ^ needed)}"
        if self.case.endswith("everywhere") and contents == after:
            files = (file for file in self.folder.rglob("*") if file.is_file())
            holding = [file.name for file in files if b"class01" in file.read_bytes()]
            assert not holding, f"the class is still in {holding}"
        return contents == after


class RunKilling(Killing):
    """``onea run`` with three tasks: from the beginning, after the first task, and after the last one."""

    modules = (
        "onea.research.runs.runner",
        "onea.research.cli.run",
        "onea.research.cli.display",
        "onea.research.methods.one_a",
    )
    name = "run"

    def run(self) -> None:
        options = {"rank": 4, "learning-rate": 0.05, "batch-size": 8, "epochs": 2, "min-epochs": 1, "max-epochs": 3}
        self.command("one-a", self.folder, options)

    def command(self, method: str, out: Path, options: Mapping[str, object]) -> None:
        values = {"data": f"folder:{self.images}", "backbone": self.backbone, "sizes": "3,1,2", "device": "cpu"}
        values |= {"precision": "fp32", "threads": "1", "out": str(out)}
        command("run", method, *(f"--{name}={value}" for name, value in {**values, **options}.items()))

    def prepare(self) -> None:
        if self.case == "resumed run":
            assert in_child(self.first_task) == -signal.SIGKILL
        elif self.case == "finished run":
            self.run()

    def first_task(self) -> None:
        from onea.research.runs import runner

        learn = runner._learn_and_evaluate

        def deadly(index: int, *rest: Any) -> None:
            if index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            learn(index, *rest)

        runner._learn_and_evaluate = deadly
        self.run()

    def contents(self) -> dict[str, Any] | None:
        from onea.research.runs.runner import load_checkpoint, read_run
        from support.records import comparable_fields

        record = read_run(self.folder)
        if record is None:
            return None
        load_checkpoint(self.folder, record)
        return comparable_fields(record)

    def check(self, before: Any, after: Any, switched: bool) -> bool:
        contents = self.contents()
        assert not (switched and contents != after), "a finished run is not finished any more"
        if contents is not None:
            for name in ("correct", "tasks"):
                assert contents[name] == after[name][: len(contents[name])], f"other {name}"
            assert len(contents["tasks"]) >= (len(before["tasks"]) if before else 0), "a task was lost"
        assert in_child(self.run) == 0, "it cannot be run again"
        assert self.contents() == after, "another record"
        names = {entry.name for entry in self.folder.iterdir()}
        assert names == {"record.json", "lock", after["checkpoint"]["file"]}, f"left over: {sorted(names)}"
        return bool(contents == after)


class PackKilling(RunKilling):
    """The cache of packed images: filled for the first time, again after images were touched, and after it was copied.

    The contents just after a kill do not matter if the next run is correct and leaves no other files.
    """

    name = "cache"

    def __init__(self, case: str, backbone: str, images: Path, place: Path) -> None:
        super().__init__(case, backbone, place / "images", place)
        self.given = images
        os.environ["ONEA_CACHE"] = str(self.folder)

    def run(self) -> None:
        shutil.rmtree(self.place / "out", ignore_errors=True)
        self.command("simplecil", self.place / "out", {})

    def prepare(self) -> None:
        shutil.copytree(self.given, self.images)
        if not self.from_nothing:
            self.run()
        if self.case == "later pack":
            for side in ("train", "test"):
                os.utime(self.images / side / "class00/0.png")

    def contents(self) -> dict[str, bytes | None]:
        """All files by name, with the pixels; the contents of notes are left out, because their times differ."""
        files = sorted(self.folder.rglob("*"))
        return {file.name: file.read_bytes() if file.suffix == ".bin" else None for file in files}

    def figures(self) -> dict[str, Any]:
        from onea.research.runs.runner import read_run
        from support.records import comparable_fields

        record = read_run(self.place / "out")
        assert record is not None
        return comparable_fields(record)

    def all(self, step: int) -> dict[str, Any]:
        self.expected: dict[str, Any] | None = None
        return super().all(step)

    def check(self, before: Any, after: Any, switched: bool) -> bool:
        contents = self.contents()
        assert in_child(self.run) == 0, "it cannot be run again"
        figures = self.figures()
        self.expected = self.expected or figures
        assert figures == self.expected, "another record"
        refilled = self.contents()
        assert refilled.keys() == after.keys(), f"left over or lost: {sorted(refilled.keys() ^ after.keys())}"
        assert refilled == after, "other pixels"
        return bool(contents == after)


KINDS: dict[str, type[Killing]] = {
    "run": RunKilling,
    "pack": PackKilling,
}  # by the last word of a case; other cases are models


def kill_all(case: str, backbone: str, images: Path, place: Path, step: int) -> dict[str, Any]:
    """Kill the command of a case at every ``step``-th event; returns the numbers of events and kills, and problems."""
    words = [case, backbone, str(images), str(place), str(step)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report


def kill_at_every_event(
    case: str, backbone: str, images: Path, place: Path, tried: Callable[..., None], min_events: int = 20
) -> dict[str, Any]:
    """Kill the command of a case at every event, and check that there are enough events and no problems."""
    report = kill_all(case, backbone, images, place, 1)
    unusable = sum("cannot be" in problem or "AssertionError" not in problem for problem in report["problems"])
    outcomes = {"kills": report["kills"], "wrong contents": len(report["problems"]) - unusable}
    tried("kills at file-system calls", case, outcomes | {"unusable folders": unusable})
    assert not report["problems"], "\n".join(report["problems"])
    assert report["kills"] == report["events"] > min_events
    return report


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for the other modules of support
    case, backbone, images, place, step = sys.argv[1:]
    kind = KINDS.get(case.split()[-1], ModelKilling)
    print(json.dumps(kind(case, backbone, Path(images), Path(place)).all(int(step))))
