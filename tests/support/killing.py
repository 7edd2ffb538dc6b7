# SPDX-License-Identifier: Apache-2.0
"""Kill a command at every event of the file system, and see what its folder is worth afterwards.

A script of its own, because it forks: ``killing.py CASE BACKBONE IMAGES PLACE STEP`` prints one JSON object, the number
of kills and what went wrong. The parent never trains, since torch does not train in a child of a process that has.
``kill_all`` calls it.
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

# Python tells of these before they happen; of writing and syncing it does not, so those are replaced below.
_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate", "os.link", "os.symlink")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def arm(folder: Path, fatal: int, count: Callable[[int], None]) -> None:
    """From now on die just before the event of this number that touches the folder; half of a write is one more."""
    seen, here = 0, str(folder)

    def event() -> None:
        nonlocal seen
        if seen == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1
        count(seen)

    def inside(place: object) -> bool:
        if isinstance(place, int):
            place = Path(f"/proc/self/fd/{place}").resolve()
        return isinstance(place, str | bytes | Path) and str(Path(os.fsdecode(place)).absolute()).startswith(here)

    def hear(name: str, values: tuple[Any, ...]) -> None:
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
            if seen == fatal:
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
    sys.addaudithook(hear)


def in_child(what: Callable[[], object]) -> int:
    """Run something in a forked process; returns how it ended."""
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
    """Run ``onea`` as from a shell, without its output."""
    from onea.cli import main

    sys.argv = ["onea", *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"onea ended with {stop.code}") from stop


class Killing:
    """One command, killed at each of its events in turn, each time on a fresh copy of the same folder.

    A kind of folder says which command it is (``run``), what is there before (``prepare``), what can be told of the
    folder (``found``), and what must hold after a kill (``check``).
    """

    modules: tuple[str, ...]  # imported once, so that no child need do it
    name: str  # of the folder in which events count

    def __init__(self, case: str, backbone: str, images: Path, place: Path) -> None:
        self.case, self.backbone, self.images, self.place = case, backbone, images, place
        self.folder, self.template = place / "work" / self.name, place / "template" / self.name

    @property
    def from_nothing(self) -> bool:
        return self.case.startswith("first")

    def prepare(self) -> None:
        """Fill the folder."""
        raise NotImplementedError

    def run(self) -> None:
        """The command that is killed."""
        raise NotImplementedError

    def found(self) -> object:
        """What is in the folder."""
        raise NotImplementedError

    def check(self, before: object, after: object, switched: bool) -> bool:
        """See that the folder is as it may be after a kill, and the next command works; whether it is as after."""
        raise NotImplementedError

    def reset(self) -> None:
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        self.folder.parent.mkdir(parents=True)
        if not self.from_nothing:
            shutil.copytree(self.template, self.folder)

    def all(self, step: int) -> dict[str, Any]:
        """Kill at every event, or at every so many-th."""
        for module in ("timm", "rich.live", *self.modules):
            importlib.import_module(module)
        self.folder.parent.mkdir(parents=True)
        assert in_child(self.prepare) == 0
        if self.folder.exists():
            shutil.copytree(self.folder, self.template)
        self.reset()
        before = self.found()
        counter = self.place / "events"

        def whole() -> None:
            handle = os.open(counter, os.O_CREAT | os.O_WRONLY, 0o600)
            arm(self.folder, -1, lambda seen: (os.lseek(handle, 0, 0), os.writev(handle, [str(seen).encode()])))  # type: ignore[func-returns-value]
            self.run()

        assert in_child(whole) == 0
        after, events = self.found(), int(counter.read_text() or 0)
        switched, kills, problems = False, 0, []
        for fatal in range(0, events, step):
            self.reset()

            def killed(fatal: int = fatal) -> None:
                arm(self.folder, fatal, lambda seen: None)
                self.run()

            ended = in_child(killed)
            try:
                assert ended == -signal.SIGKILL, f"it ended with {ended}"
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
        command("teach", str(self.folder), str(day), *fresh, "--threads", "1", "--precision", "fp32")

    def run(self) -> None:
        """The command that is killed."""
        import onea

        if self.case == "first teach":
            self.teach("class00", "class01", "class02")
        elif self.case == "later teach":
            self.teach("class04", "class05")
        elif self.case == "rename":
            command("rename", str(self.folder), "class01", "one")
        elif self.case == "forget":
            command("forget", str(self.folder), "class01")
        elif self.case == "forget everywhere":
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
        """A folder with two versions, the second of them of one class more."""
        if self.case != "first teach":
            self.teach("class00", "class01", "class02")
            self.teach("class03")

    def found(self) -> tuple[Any, ...] | None:
        """All that a model says, or None where there is none yet."""
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
        """What is there is as before or as after, and the next command works; returns whether it is as after."""
        from onea.model.storage import folder as folders

        found = self.found()
        assert found in ((after,) if switched else (before, after)), "neither as before nor as after"
        if found is None:
            assert in_child(lambda: self.teach("class00", "class01", "class02")) == 0, "it cannot be taught again"
        folders.change(self.folder, lambda state, version, date: state.rename("class02", "two", version, date))
        expected = after if found is None and self.case == "first teach" else found
        now = self.found()
        assert now is not None
        if expected is not None:
            assert now[2] == expected[2], "the next command changed the answers"  # type: ignore[index]
        versions = [f"{version:06d}" for version in folders.read_manifest(self.folder).versions.kept]
        assert sorted(entry.name for entry in (self.folder / "states").iterdir()) == versions, "versions were left over"
        names = {entry.name for entry in self.folder.iterdir()}
        assert names == {"model.json", "states", "README.md", "history.png", "lock"}, f"left over: {sorted(names)}"
        if self.case == "forget everywhere" and found == after:
            files = (file for file in self.folder.rglob("*") if file.is_file())
            holding = [file.name for file in files if b"class01" in file.read_bytes()]
            assert not holding, f"the class is still in {holding}"
        return found == after


class RunKilling(Killing):
    """``onea run`` of three tasks: from the beginning, after the first of them, and when all is done."""

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

    def found(self) -> dict[str, Any] | None:
        from onea.research.runs.runner import load_checkpoint, read_run
        from support.records import comparable_fields

        record = read_run(self.folder)
        if record is None:
            return None
        load_checkpoint(self.folder, record)
        return comparable_fields(record)

    def check(self, before: Any, after: Any, switched: bool) -> bool:
        found = self.found()
        assert not (switched and found != after), "a finished run is not finished any more"
        if found is not None:
            for name in ("correct", "tasks"):
                assert found[name] == after[name][: len(found[name])], f"other {name}"
            assert len(found["tasks"]) >= (len(before["tasks"]) if before else 0), "a task was lost"
        assert in_child(self.run) == 0, "it cannot be run again"
        assert self.found() == after, "another record"
        names = {entry.name for entry in self.folder.iterdir()}
        assert names == {"record.json", "lock", after["checkpoint"]["file"]}, f"left over: {sorted(names)}"
        return bool(found == after)


class PackKilling(RunKilling):
    """The cache of packed images: filled for the first time, again after images were touched, and after it was copied.

    What is there just after a kill does not matter, as long as the next run is right and leaves nothing behind.
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

    def found(self) -> dict[str, bytes | None]:
        """The names of all files; notes hold times, which differ, but pixels must not."""
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
        found = self.found()
        assert in_child(self.run) == 0, "it cannot be run again"
        figures = self.figures()
        self.expected = self.expected or figures
        assert figures == self.expected, "another record"
        now = self.found()
        assert now.keys() == after.keys(), f"left over or lost: {sorted(now.keys() ^ after.keys())}"
        assert now == after, "other pixels"
        return bool(found == after)


KINDS: dict[str, type[Killing]] = {"run": RunKilling, "pack": PackKilling}  # by the last word of a case; else a model


def kill_all(case: str, backbone: str, images: Path, place: Path, step: int) -> dict[str, Any]:
    """Kill the command of a case at every so many-th event; returns the numbers of both and what went wrong."""
    words = [case, backbone, str(images), str(place), str(step)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def kill_at_every_event(
    case: str, backbone: str, images: Path, place: Path, tried: Callable[..., None], fewest: int = 20
) -> dict[str, Any]:
    """Kill the command of a case at every event, of which there must be some, and find nothing wrong."""
    found = kill_all(case, backbone, images, place, 1)
    unusable = sum("cannot be" in problem or "AssertionError" not in problem for problem in found["problems"])
    outcomes = {"kills": found["kills"], "wrong contents": len(found["problems"]) - unusable}
    tried("kills at file-system calls", case, outcomes | {"unusable folders": unusable})
    assert not found["problems"], "\n".join(found["problems"])
    assert found["kills"] == found["events"] > fewest
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for the other modules of support
    case, backbone, images, place, step = sys.argv[1:]
    kind = KINDS.get(case.split()[-1], ModelKilling)
    print(json.dumps(kind(case, backbone, Path(images), Path(place)).all(int(step))))
