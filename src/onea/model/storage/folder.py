# SPDX-License-Identifier: Apache-2.0
"""The model folder ``NAME.onea/``: every version in a folder of its own, and one small file that says which is valid.

``layout`` has the names of its files and ``validation`` their contents. The present version is read and verified when a
folder is opened, an earlier one when it is restored: the work does not grow with the number of versions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as save_tensors

from onea import __version__
from onea.classifiers.statistics import ClassStatistics
from onea.errors import OneaError
from onea.files import (
    DamagedFile,
    check_regular,
    open_regular,
    read_regular,
    sync_folder,
    write_atomically,
    write_error,
)
from onea.model.learning.fingerprints import NO_PRINTS
from onea.model.parameters import MACHINE, plain
from onea.model.state import NO_HELD, NO_ROWS, State, statistics_for
from onea.model.storage import layout, validation
from onea.model.storage.card import card_files, history_row
from onea.model.storage.layout import FORMAT, check_can_hold, holds_model, locked, state_folder
from onea.model.versions import Versions
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.text import utc_timestamp

if TYPE_CHECKING:
    from onea.model.estimator import OneA

_ADAPTER = "adapter."
_HALVED = ("factors", "background", "held")  # kept in bfloat16, which holds them exactly
_OPTIONAL = {  # not written where there are none; the background is as wide as the network
    "fingerprints": NO_PRINTS,
    "fingerprint_rows": NO_ROWS,
    "held": NO_HELD,
    "held_rows": NO_ROWS,
    "held_prints": NO_PRINTS,
}
_TENSORS = ("margins", "margin_rows", "hidden", "hidden_rows", "background", *_OPTIONAL)
_VALUES = (
    *("version", "id", "backbone", "preprocess", "options", "readout"),
    *("classes", "merged", "temperature", "calibrated_on", "updates", "numbers"),
)
_REMEDY = "choose another folder"
_WAY_BACK = (
    "restore it from a copy or, if it is the newest version, go back with `onea undo`; an earlier one may be removed"
)


@dataclass(frozen=True)
class Manifest:
    """What ``model.json`` says.

    Attributes:
        versions: those that are kept.
        params: of the estimator.
    """

    versions: Versions
    params: dict[str, Any]


@dataclass(frozen=True)
class StoredVersions:
    """The earlier versions in a model folder, each read when it is asked for.

    Attributes:
        path: the model folder.
    """

    path: Path

    def __contains__(self, version: int) -> bool:
        """Whether a version is there, damaged or not."""
        return os.path.lexists(state_folder(self.path, version))

    def read(self, version: int, present: State) -> State:
        """One that the present version grew from.

        Raises:
            OneaError: it is damaged, or of another model.
        """
        state = read_state(self.path, version)
        with _told(self.path, state_folder(self.path, version)):
            if state.updates != present.updates[: len(state.updates)]:
                raise DamagedFile(f"version {present.version} did not grow from it")
        return state


@dataclass(frozen=True)
class Undone:
    """A version that was gone back from.

    Attributes:
        version: its number.
        what: the update that was undone, in words.
    """

    version: int
    what: str


def save(model: OneA, path: Path, *, have_lock: bool = False) -> Path:
    """Bring a model folder up to date, or make it; a crash at any moment leaves the last complete version valid."""
    if not have_lock:
        with locked(path):
            return save(model, path, have_lock=True)
    check_can_hold(path)
    there: tuple[int, ...] = ()
    if holds_model(path):
        there = read_manifest(path).versions.kept
        if not model.grew_from(there[-1], read_id(path, there[-1])):
            raise OneaError(
                f"{path} holds something this model did not grow from (version {there[-1]}); load it again, or choose "
                "another folder."
            )
    versions = model.versions
    new = [model.state(version) for version in versions.kept if version not in there]
    write(path, model.snapshot().state, Manifest(versions, model_params(model)), new)
    return path


def model_params(model: OneA) -> dict[str, Any]:
    """The parameters that belong to a model wherever it runs; of its backbone the name alone, without a path."""
    params = {name: plain(value) for name, value in model.get_params().items() if name not in MACHINE}
    return params | {"backbone": model.snapshot().state.backbone["name"]}


def change(path: Path, how: Callable[[State, int, str], State], keep: int | None = None) -> State:
    """Make a change that needs no network, such as another name for a class, to the model in a folder.

    Args:
        path: the model folder.
        how: the next state, from the present one, the number of the next version and the time.
        keep: earlier versions to keep; None is as many as the model keeps.
    """
    read_manifest(path)
    with locked(path):
        check_can_hold(path)
        manifest = read_manifest(path)
        present = read_state(path, manifest.versions.present)
        if present.erased:  # by a process that was killed, perhaps
            _tidy(path, present, manifest.versions, card_files(present, layout.named(path).name))
        state = how(present, manifest.versions.next, utc_timestamp())
        versions = manifest.versions.committed(manifest.params["keep"] if keep is None else keep)
        write(path, state, Manifest(versions, manifest.params), [state])
        return state


def undo(path: Path) -> tuple[Undone, State]:
    """Go back to before the last update, even from a damaged version; returns what was undone and what is valid now."""
    read_manifest(path)
    with locked(path):
        check_can_hold(path)
        manifest = read_manifest(path)
        last = manifest.versions.present
        if len(manifest.versions.kept) == 1:
            raise OneaError(f"{path} keeps no version before {last}; there is nothing to go back to.")
        earlier = manifest.versions.undone()
        try:
            present = read_state(path, last)
        except OneaError:
            state, what = read_state(path, earlier.present), "which could not be read"
        else:
            state, what = StoredVersions(path).read(earlier.present, present), history_row(present.updates[-1])[2]
        write(path, state, dataclasses.replace(manifest, versions=earlier))
        return Undone(last, what), state


def read_manifest(path: Path) -> Manifest:
    """What a model folder says about itself."""
    if not holds_model(path):
        found = "holds no model" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise OneaError(f"{path} {found}; give a folder that `onea teach` or save() made.")
    place = path / layout.MANIFEST
    content = read_regular(place, validation.MOST_JSON)
    with _told(path, place, "restore the folder from a copy"):
        kept, counter, params = validation.manifest_values(content)
        # Whoever removes an earlier version, to save space or because it is damaged, goes on without it.
        earlier = (version for version in kept[:-1] if os.path.lexists(state_folder(path, version)))
        return Manifest(Versions((*earlier, *kept[-1:]), counter), params)


def read_present(path: Path) -> tuple[Manifest, State]:
    """What a model folder says about itself, and its present version.

    Another process may remove that version meanwhile; then the folder is read again.
    """
    manifest = read_manifest(path)
    while True:
        try:
            return manifest, read_state(path, manifest.versions.present)
        except OneaError:
            before, manifest = manifest, read_manifest(path)
            if manifest == before:
                raise


def verify(path: Path) -> tuple[int, ...]:
    """Read every version that a model folder keeps; returns their numbers.

    Raises:
        OneaError: one is damaged; of several, the newest.
    """
    manifest, present = read_present(path)
    for version in reversed(manifest.versions.kept[:-1]):
        StoredVersions(path).read(version, present)
    return manifest.versions.kept


def read_id(path: Path, version: int) -> str:
    """What tells one version of a model from another of the same number; reads no tensors."""
    return str(_described(path, version)["id"])


def read_state(path: Path, version: int) -> State:
    """One version of the model in a folder."""
    values, folder = _described(path, version), state_folder(path, version)
    _check_there(path, folder / layout.TENSORS)
    file, size = open_regular(folder / layout.TENSORS)
    with file, _told(path, folder):
        return _state(values, validation.read_tensors(file, size, values))


def _described(path: Path, version: int) -> dict[str, Any]:
    """What ``state.json`` of a version says."""
    folder = state_folder(path, version)
    for place in (folder.parent, folder):
        check_regular(place, folder=True)
    _check_there(path, folder / layout.STATE)
    content = read_regular(folder / layout.STATE, validation.MOST_JSON)
    with _told(path, folder):
        return validation.state_values(content, version)


def _check_there(path: Path, file: Path) -> None:
    """Refuse a version without one of its files as any other damage, from which there may be a way back."""
    with _told(path, file.parent):
        if check_regular(file) is None:
            raise DamagedFile(f"{file.name} is missing")


@contextmanager
def _told(
    path: Path,
    place: Path,
    remedy: str = _WAY_BACK,
) -> Iterator[None]:
    """What is wrong with a place in a model folder as one sentence."""
    try:
        yield
    except validation.OtherFormat as reason:
        raise OneaError(f"{path} {reason}.") from reason
    except DamagedFile as reason:
        raise OneaError(f"{place} is damaged ({reason}); {remedy}.") from reason
    except OSError as error:
        raise OneaError(f"{place} cannot be read ({error.strerror}); restore the folder from a copy.") from error


def write(path: Path, present: State, manifest: Manifest, new: Sequence[State] = ()) -> None:
    """Write the versions that are not there yet, then switch to them, then tidy up. Needs the lock.

    Args:
        path: the model folder.
        present: the version that answers from now on.
        manifest: what is valid from now on.
        new: the versions that are not there yet.
    """
    numbers = {"versions": manifest.versions.kept, "counter": manifest.versions.counter}
    described = validation.seal({"format": FORMAT, "onea": __version__, **numbers, "params": manifest.params})
    _check(lambda: validation.manifest_values(described))
    shown = card_files(present, layout.named(path).name)
    try:
        layout.begin(path)
        for state in new:
            _write_state(path, state)
        write_atomically(path / layout.MANIFEST, described, _REMEDY)
        sync_folder(path)  # before anything goes that the old one needs
    except (OneaError, OSError) as error:
        with suppress(OneaError):
            layout.tidy(path, read_manifest(path).versions.kept if holds_model(path) else ())
        if isinstance(error, OneaError):
            raise
        raise write_error(path, len(described), error, _REMEDY) from error
    _tidy(path, present, manifest.versions, shown)


def _tidy(path: Path, present: State, versions: Versions, shown: Mapping[str, bytes]) -> None:
    """Remove other versions and write the model card.

    Raises:
        OneaError: something cannot be removed or written, and it may hold a class that was forgotten everywhere.
    """
    # After any other update it does not matter now: the next one does the same.
    with nullcontext() if present.erased else suppress(OneaError):
        layout.tidy(path, versions.kept)
        for name, content in shown.items():
            write_atomically(path / name, content)
        if left := layout.leftovers(path, versions.kept):
            raise OneaError(f"The model forgot the class, but {left[0]} may hold it; remove that file.")


def _state(values: Mapping[str, Any], tensors: Tensors) -> State:
    """A state from what its two files hold."""
    absent = {"background": tensors["prototypes"][:0], **_OPTIONAL}
    tensors = absent | {name: value.float() if name in _HALVED else value for name, value in tensors.items()}
    return State(
        **{name: values[name] for name in _VALUES}
        | {name: tuple(values[name]) for name in ("classes", "updates")}
        | {name: tensors[name] for name in _TENSORS},
        statistics=_statistics(values, tensors),
        adapter=select_prefix(_ADAPTER, tensors),
    )


def _statistics(values: Mapping[str, Any], tensors: Tensors) -> ClassStatistics:
    empty = statistics_for(values["readout"], tensors["prototypes"].shape[1])
    return empty.from_state_dict(tensors | {"freedom": torch.tensor(values["freedom"])})


def _write_state(path: Path, state: State) -> None:
    tensors = {name: getattr(state, name) for name in _TENSORS} | add_prefix(_ADAPTER, state.adapter)
    tensors |= state.statistics.state_dict()
    for name in ("freedom", *(name for name in ("background", *_OPTIONAL) if not len(tensors[name]))):
        del tensors[name]
    tensors = {name: value.bfloat16() if name in _HALVED else value for name, value in tensors.items()}
    content = save_tensors({name: value.contiguous() for name, value in tensors.items()})
    values = {name: getattr(state, name) for name in _VALUES}
    values |= {"format": FORMAT, "freedom": state.statistics.freedom}
    described = validation.seal(values | {"sha256": hashlib.sha256(content).hexdigest()})

    def check() -> None:
        found = validation.state_values(described, state.version)
        validation.check_shapes(io.BytesIO(content), len(content), found)
        validation.check_numbers(tensors)

    _check(check)
    target = state_folder(path, state.version)
    partial = target.parent / f".partial-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        write_atomically(partial / layout.TENSORS, content, _REMEDY)
        write_atomically(partial / layout.STATE, described, _REMEDY)
        layout.remove_version(target)  # left by a crash between here and the switch, or damaged
        partial.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise write_error(path, len(content) + len(described), error, _REMEDY) from error
    finally:
        layout.remove_version(partial)


def _check(check: Callable[[], object]) -> None:
    """Never write what could not be read again."""
    try:
        check()
    except DamagedFile as reason:
        raise OneaError(f"The model cannot be saved ({reason}); undo its last update.") from reason
