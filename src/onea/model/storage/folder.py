# SPDX-License-Identifier: Apache-2.0
"""The model folder ``NAME.onea/``: a folder for each version, and ``model.json`` with the valid versions.

The names of the files are in ``layout``, checks of their contents in ``validation``. The current version is read when
a folder is opened, an earlier one when it is restored, so the time does not depend on the number of versions.
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
from onea.classifiers.statistics import ClassStatistics, used_rows
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
from onea.model.exemplars import SUFFIX, ExemplarFile, Exemplars, exemplar_files
from onea.model.learning.fingerprints import NO_FINGERPRINTS
from onea.model.parameters import MACHINE, to_python
from onea.model.state import NO_FEATURES, NO_ROWS, State, empty_statistics
from onea.model.storage import layout, validation
from onea.model.storage.card import card_files, history_row
from onea.model.storage.layout import FORMAT, check_can_hold, holds_model, locked, state_folder
from onea.model.versions import Versions
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.text import utc_timestamp

if TYPE_CHECKING:
    from onea.model.estimator import OneA

_ADAPTER = "adapter."
_BFLOAT16 = ("factors", "background", "held_out_features")  # tensors whose values are exact in bfloat16
_OPTIONAL = {  # not written if empty, and then restored with these defaults, like the background, whose width varies
    "fingerprints": NO_FINGERPRINTS,
    "fingerprint_rows": NO_ROWS,
    "held_out_features": NO_FEATURES,
    "held_out_rows": NO_ROWS,
    "held_out_fingerprints": NO_FINGERPRINTS,
}
_TENSORS = (
    *("held_out_signals", "held_out_signal_rows", "left_out_signals", "left_out_signal_rows", "background"),
    *_OPTIONAL,
)
_VALUES = (
    *("version", "id", "backbone", "preprocess", "options", "readout", "classes", "adapter_images"),
    *("temperature", "calibration_images", "updates", "integer_labels"),
)
_REMEDY = "choose another folder"
_RESTORE = "restore it from a backup or, if it is the newest version, run `onea undo`; an earlier one may be removed"


@dataclass(frozen=True)
class Manifest:
    """The content of ``model.json``.

    Attributes:
        versions: the stored versions.
        params: parameters of the estimator.
    """

    versions: Versions
    params: dict[str, Any]


@dataclass(frozen=True)
class StoredVersions:
    """The earlier versions in a model folder, which are read on demand.

    Attributes:
        path: the model folder.
    """

    path: Path

    def __contains__(self, version: int) -> bool:
        """Whether a version exists, even if damaged."""
        return os.path.lexists(state_folder(self.path, version))

    def read(self, version: int, current: State) -> State:
        """A version that the current one is based on.

        Raises:
            OneaError: it is damaged, or of another model.
        """
        state = read_state(self.path, version)
        with _damage_as_error(self.path, state_folder(self.path, version)):
            if state.updates != current.updates[: len(state.updates)]:
                raise DamagedFile(f"version {current.version} is not based on it")
        return state


@dataclass(frozen=True)
class Undone:
    """A version that was undone.

    Attributes:
        version: number of the version.
        update: a description of its last update.
    """

    version: int
    update: str


def save(model: OneA, path: Path, *, have_lock: bool = False) -> Path:
    """Write or update a model folder; after a crash at any time, the last complete version is valid."""
    if not have_lock:
        with locked(path):
            return save(model, path, have_lock=True)
    check_can_hold(path)
    stored: tuple[int, ...] = ()
    if holds_model(path):
        stored = read_manifest(path).versions.kept
        if not model.is_based_on(stored[-1], read_id(path, stored[-1])):
            raise OneaError(
                f"{path} is at version {stored[-1]}, which this model does not descend from; load it again, or "
                "choose another folder."
            )
    versions = model.versions
    new = [model.state(version) for version in versions.kept if version not in stored]
    write(path, model.snapshot().state, Manifest(versions, model_params(model)), new)
    return path


def model_params(model: OneA) -> dict[str, Any]:
    """The parameters that are stored with a model: not those of the machine, and the backbone without its path."""
    params = {name: to_python(value) for name, value in model.get_params().items() if name not in MACHINE}
    return params | {"backbone": model.snapshot().state.backbone["name"]}


def change(path: Path, next_state: Callable[[State, int, str], State], keep: int | None = None) -> State:
    """Change the model in a folder without loading its network.

    Args:
        path: the model folder.
        next_state: computes the next state from the current one, the number of the next version and the time.
        keep: number of earlier versions to keep; by default the model's own.
    """
    read_manifest(path)
    with locked(path):
        check_can_hold(path)
        manifest = read_manifest(path)
        current = read_state(path, manifest.versions.current)
        if current.is_erasure:  # its process may have been killed before everything was removed
            _clean_up(path, current, manifest.versions, card_files(current, layout.with_name(path).name))
        state = next_state(current, manifest.versions.next, utc_timestamp())
        versions = manifest.versions.committed(manifest.params["keep"] if keep is None else keep)
        write(path, state, Manifest(versions, manifest.params), [state])
        return state


def undo(path: Path) -> tuple[Undone, State]:
    """Go back to the version before the last update, even if the last one is damaged."""
    read_manifest(path)
    with locked(path):
        check_can_hold(path)
        manifest = read_manifest(path)
        last = manifest.versions.current
        if len(manifest.versions.kept) == 1:
            raise OneaError(f"{path} has no version before {last}; there is nothing to undo.")
        earlier = manifest.versions.undone()
        try:
            current = read_state(path, last)
        except OneaError:
            state, update = read_state(path, earlier.current), "which could not be read"
        else:
            state, update = StoredVersions(path).read(earlier.current, current), history_row(current.updates[-1])[2]
        write(path, state, dataclasses.replace(manifest, versions=earlier))
        return Undone(last, update), state


def read_manifest(path: Path) -> Manifest:
    """The content of ``model.json``."""
    if not holds_model(path):
        problem = "contains no model" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise OneaError(f"{path} {problem}; give a folder that `onea teach` or save() created.")
    file = path / layout.MANIFEST
    content = read_regular(file, validation.MAX_JSON_BYTES)
    with _damage_as_error(path, file, "restore the folder from a copy"):
        kept, counter, params = validation.parse_manifest(content)
        # Users may have removed earlier versions, to save space or because they are damaged.
        earlier = (version for version in kept[:-1] if os.path.lexists(state_folder(path, version)))
        return Manifest(Versions((*earlier, *kept[-1:]), counter), params)


def read_current(path: Path) -> tuple[Manifest, State]:
    """The content of ``model.json`` and the current version.

    If another process removes that version meanwhile, the folder is read again.
    """
    manifest = read_manifest(path)
    while True:
        try:
            return manifest, read_state(path, manifest.versions.current)
        except OneaError:
            before, manifest = manifest, read_manifest(path)
            if manifest == before:
                raise


def verify(path: Path) -> tuple[int, ...]:
    """Read every version in a model folder, and the stored copies of photos; return the numbers of the versions.

    Raises:
        OneaError: a version is damaged; the error is about the newest such one.
    """
    manifest, current = read_current(path)
    states = [current]
    for version in reversed(manifest.versions.kept[:-1]):
        states.append(StoredVersions(path).read(version, current))
    for file in {file for state in states for file in exemplar_files(state.exemplars)}:
        file.read()
    return manifest.versions.kept


def read_id(path: Path, version: int) -> str:
    """The id of a version, which distinguishes it from versions of other models with the same number."""
    return str(_read_values(path, version)["id"])


def read_state(path: Path, version: int) -> State:
    """One version of the model in a folder."""
    values, folder = _read_values(path, version), state_folder(path, version)
    _check_exists(path, folder / layout.TENSORS)
    file, size = open_regular(folder / layout.TENSORS)
    with file, _damage_as_error(path, folder):
        return _build_state(values, validation.read_tensors(file, size, values), path.absolute() / layout.COPIES)


def _read_values(path: Path, version: int) -> dict[str, Any]:
    """The content of ``state.json`` of a version."""
    folder = state_folder(path, version)
    for parent in (folder.parent, folder):
        check_regular(parent, folder=True)
    _check_exists(path, folder / layout.STATE)
    content = read_regular(folder / layout.STATE, validation.MAX_JSON_BYTES)
    with _damage_as_error(path, folder):
        return validation.parse_state(content, version)


def _check_exists(path: Path, file: Path) -> None:
    """Report a missing file of a version like any other damage, from which undo may recover."""
    with _damage_as_error(path, file.parent):
        if check_regular(file) is None:
            raise DamagedFile(f"{file.name} is missing")


@contextmanager
def _damage_as_error(path: Path, damaged: Path, remedy: str = _RESTORE) -> Iterator[None]:
    """Turn exceptions about a damaged file or folder into an ``OneaError`` with a remedy."""
    try:
        yield
    except validation.UnsupportedFormat as reason:
        raise OneaError(f"{path} {reason}.") from reason
    except DamagedFile as reason:
        raise OneaError(f"{damaged} is damaged ({reason}); {remedy}.") from reason
    except OSError as error:
        raise OneaError(f"{damaged} cannot be read ({error.strerror}); restore the folder from a copy.") from error


def write(path: Path, current: State, manifest: Manifest, new: Sequence[State] = ()) -> None:
    """Write new versions, then ``model.json``, then remove versions that are no longer valid. The lock must be held.

    Args:
        path: the model folder.
        current: the new current version.
        manifest: the new versions and parameters.
        new: versions that are not stored yet.
    """
    numbers = {"versions": manifest.versions.kept, "counter": manifest.versions.counter}
    content = validation.dump({"format": FORMAT, "onea": __version__, **numbers, "params": manifest.params})
    _check_readable(lambda: validation.parse_manifest(content))
    card = card_files(current, layout.with_name(path).name)
    try:
        layout.begin_first_save(path)
        for state in new:
            _write_state(path, state)
        write_atomically(path / layout.MANIFEST, content, _REMEDY)
        sync_folder(path)  # before files of the old manifest are removed
    except (OneaError, OSError) as error:
        with suppress(OneaError):
            layout.remove_other_versions(path, read_manifest(path).versions.kept if holds_model(path) else ())
        if isinstance(error, OneaError):
            raise
        raise write_error(path, len(content), error, _REMEDY) from error
    _clean_up(path, current, manifest.versions, card)


def _clean_up(path: Path, current: State, versions: Versions, card: Mapping[str, bytes]) -> None:
    """Remove other versions and write the model card.

    Raises:
        OneaError: a file that may contain a class forgotten everywhere cannot be removed or written.
    """
    # After any other update a failure is harmless, because the next update tries again.
    with nullcontext() if current.is_erasure else suppress(OneaError):
        layout.remove_other_versions(path, versions.kept)
        needed = _referenced_copies(path, versions.kept) if layout.copies_files(path) else set()
        if needed is not None:
            layout.remove_other_copies(path, needed)
        for name, content in card.items():
            write_atomically(path / name, content)
        unneeded = [file for file in layout.copies_files(path) if file.name not in (needed or ())]
        if left := [*layout.remaining_files(path, versions.kept), *unneeded]:
            raise OneaError(f"The class was removed from the model, but {left[0]} may contain it; remove that file.")


def _build_state(values: Mapping[str, Any], tensors: Tensors, copies: Path) -> State:
    """A state from the content of its two files; ``copies`` is the folder with copies of photos."""
    defaults = {"background": tensors["prototypes"][:0], **_OPTIONAL}
    tensors = defaults | {
        name: value.float() if name in ("background", "held_out_features") else value for name, value in tensors.items()
    }
    return State(
        **{name: values[name] for name in _VALUES}
        | {name: tuple(values[name]) for name in ("classes", "updates")}
        | {name: tensors[name] for name in _TENSORS},
        exemplars={
            name: tuple(ExemplarFile(**entry, source=copies) for entry in entries)
            for name, entries in values["exemplars"].items()
        },
        statistics=_build_statistics(values, tensors),
        adapter=select_prefix(_ADAPTER, tensors),
    )


def _build_statistics(values: Mapping[str, Any], tensors: Tensors) -> ClassStatistics:
    empty = empty_statistics(values["readout"], tensors["prototypes"].shape[1])
    if empty.factors is not None:  # only the directions that some class has are stored
        stored = tensors["factors"]
        factors = stored.new_zeros(len(stored), *empty.factors.shape[1:])
        factors[:, : stored.shape[1]] = stored
        tensors = tensors | {"factors": factors}
    return empty.from_state_dict(tensors | {"freedom": torch.tensor(values["freedom"])})


def _write_state(path: Path, state: State) -> None:
    tensors = {name: getattr(state, name) for name in _TENSORS} | add_prefix(_ADAPTER, state.adapter)
    tensors |= state.statistics.state_dict()
    for name in ("freedom", *(name for name in ("background", *_OPTIONAL) if not len(tensors[name]))):
        del tensors[name]
    tensors = {name: value.bfloat16() if name in _BFLOAT16 else value for name, value in tensors.items()}
    if "factors" in tensors:
        tensors["factors"] = tensors["factors"][:, : used_rows(tensors["factors"])]
    content = save_tensors({name: value.contiguous() for name, value in tensors.items()})
    values = {name: getattr(state, name) for name in _VALUES}
    values |= {"format": FORMAT, "freedom": state.statistics.degrees_of_freedom}
    values["exemplars"] = {name: [file.to_json() for file in files] for name, files in state.exemplars.items()}
    description = validation.dump(values | {"sha256": hashlib.sha256(content).hexdigest()})

    def validate() -> None:
        checked = validation.parse_state(description, state.version)
        validation.check_shapes(io.BytesIO(content), len(content), checked)
        validation.check_numbers(tensors)

    _check_readable(validate)
    _write_copies(path / layout.COPIES, state.exemplars)
    target = state_folder(path, state.version)
    partial = target.parent / f".partial-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        write_atomically(partial / layout.TENSORS, content, _REMEDY)
        write_atomically(partial / layout.STATE, description, _REMEDY)
        layout.remove_version(target)  # damaged, or from a crash before model.json was written
        partial.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise write_error(path, len(content) + len(description), error, _REMEDY) from error
    finally:
        layout.remove_version(partial)


def _write_copies(folder: Path, exemplars: Exemplars) -> None:
    """Write the files of copies that do not exist yet; their names depend on their contents."""
    missing = [file for file in exemplar_files(exemplars) if check_regular(folder / file.name) is None]
    for file in missing:
        if (content := file.read()) is not None:
            write_atomically(folder / file.name, content, _REMEDY)
    if missing and folder.exists():
        sync_folder(folder)


def _referenced_copies(path: Path, versions: Sequence[int]) -> set[str] | None:
    """The names of the files of copies that these versions need; None if a version cannot be read."""
    names: set[str] = set()
    for version in versions:
        try:
            entries = _read_values(path, version)["exemplars"].values()
        except OneaError:
            return None
        names |= {f"{entry['sha256']}{SUFFIX}" for files in entries for entry in files}
    return names


def _check_readable(read: Callable[[], object]) -> None:
    """Refuse to write a model that could not be read again, as ``read`` raises an error."""
    try:
        read()
    except DamagedFile as reason:
        raise OneaError(f"The model cannot be saved ({reason}); undo its last update.") from reason
