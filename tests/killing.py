"""Kill a command at every event of the file system, and see what the model folder is worth afterwards.

A script of its own, because it forks: ``killing.py CASE BACKBONE IMAGES PLACE STEP`` prints one JSON object, the number
of kills and what went wrong. The parent never trains, since torch does not train in a child of a process that has.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
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

    write, fsync = os.write, os.fsync

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

    os.write, os.fsync = halved_write, counted_fsync
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
    """One command, killed at each of its events in turn, each time on a fresh copy of the same folder."""

    def __init__(self, case: str, backbone: str, images: Path, place: Path) -> None:
        self.case, self.backbone, self.images, self.place = case, backbone, images, place
        self.folder, self.template = place / "work/shop.onea", place / "template/shop.onea"
        self.problems: list[str] = []

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
        elif self.case == "undo":
            command("undo", str(self.folder))
        elif self.case == "save":
            onea.load(self.folder, threads=1).forget("class00").save(self.folder)
        elif self.case == "first save":
            onea.load(self.template, threads=1).save(self.folder)
        else:
            raise AssertionError(self.case)

    @property
    def from_nothing(self) -> bool:
        return self.case.startswith("first")

    def prepare(self) -> None:
        """A folder with two versions, the second of them of one class more."""
        self.teach("class00", "class01", "class02")
        self.teach("class03")
        shutil.copytree(self.folder, self.template)

    def reset(self) -> None:
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        self.folder.parent.mkdir()
        if not self.from_nothing:
            shutil.copytree(self.template, self.folder)

    def answers(self) -> tuple[Any, ...] | None:
        """All that a model says, or None where there is none yet."""
        import onea
        from onea.errors import OneaError

        try:
            model = onea.load(self.folder, threads=1).snapshot()
        except OneaError as error:
            if self.from_nothing and ("holds no model" in str(error) or "does not exist" in str(error)):
                return None
            raise
        return model.version, model.classes, model.predict_proba(self.images / "test").tobytes()

    def check(self, before: object, after: object, switched: bool) -> bool:
        """What is there is as before or as after, and the next command works; returns whether it is as after."""
        from onea.model import folder as folders

        found = self.answers()
        assert found in ((after,) if switched else (before, after)), "neither as before nor as after"
        if found is None:
            assert in_child(lambda: self.teach("class00", "class01", "class02")) == 0, "it cannot be taught again"
        folders.change(self.folder, lambda state, version, date: state.renamed("class02", "two", version, date))
        expected = after if found is None and self.case == "first teach" else found
        now = self.answers()
        assert now is not None
        if expected is not None:
            assert now[2] == expected[2], "the next command changed the answers"  # type: ignore[index]
        versions = [f"{version:06d}" for version in folders.read_manifest(self.folder).versions]
        assert sorted(entry.name for entry in (self.folder / "states").iterdir()) == versions, "versions were left over"
        names = {entry.name for entry in self.folder.iterdir()}
        assert names == {"model.json", "states", "README.md", "history.png", "lock"}, f"left over: {sorted(names)}"
        return found == after

    def all(self, step: int) -> dict[str, Any]:
        """Kill at every event, or at every so many-th."""
        self.folder.parent.mkdir(parents=True)
        if self.case != "first teach":
            assert in_child(self.prepare) == 0
        self.reset()
        before = self.answers()
        counter = self.place / "events"

        def whole() -> None:
            handle = os.open(counter, os.O_CREAT | os.O_WRONLY, 0o600)
            arm(self.folder, -1, lambda seen: (os.lseek(handle, 0, 0), os.writev(handle, [str(seen).encode()])))  # type: ignore[func-returns-value]
            self.run()

        assert in_child(whole) == 0
        after, events = self.answers(), int(counter.read_text())
        assert before != after
        switched, kills = False, 0
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
                self.problems.append(f"{self.case}, event {fatal}: {type(error).__name__}: {error}")
        return {"case": self.case, "events": events, "kills": kills, "switched": switched, "problems": self.problems}


if __name__ == "__main__":
    importlib.import_module("onea.model.workshop")  # once, so that every child has it
    case, backbone, images, place, step = sys.argv[1:]
    print(json.dumps(Killing(case, backbone, Path(images), Path(place)).all(int(step))))
