# SPDX-License-Identifier: Apache-2.0
"""The model folder ``NAME.onea/``: every version in a folder of its own, and one small file that says which is valid.

``onea.model.layout`` says where things lie in it, and ``onea.model.validation`` what they may say.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save as save_tensors

from onea.errors import OneaError
from onea.files import check_plain, open_plain, read_plain, sync_folder, unwritable, write_atomically
from onea.methods.state import part_of, prefixed
from onea.model import layout, validation
from onea.model.card import card, history_picture, history_row
from onea.model.formats import FORMAT
from onea.model.layout import check_can_hold, holds_model, state_folder
from onea.model.learning import now
from onea.model.lock import locked
from onea.model.params import MACHINE
from onea.model.readout import Evidence
from onea.model.state import State
from onea.sealed import Damage
from onea.tensors import Tensors
from onea.version import __version__

if TYPE_CHECKING:
    from onea.model.estimator import OneA

_ADAPTER = "adapter."
_EVIDENCE, _TENSORS = ("prototypes", "counts", "scatter"), ("familiar", "margins", "margin_rows")
_VALUES = (
    *("version", "id", "backbone", "preprocess", "options", "readout"),
    *("classes", "merged", "temperature", "calibrated_on", "updates", "numbers"),
)
_REMEDY = "choose another folder"


@dataclass(frozen=True)
class Manifest:
    """What ``model.json`` says.

    Attributes:
        versions: those that are kept, oldest first; the last one is the present.
        counter: the highest version ever given.
        params: of the estimator.
    """

    versions: tuple[int, ...]
    counter: int
    params: dict[str, Any]


@dataclass(frozen=True)
class Undone:
    """A version that was gone back from.

    Attributes:
        version: its number.
        what: had been done.
    """

    version: int
    what: str


def load(path: str | Path, **params: Any) -> OneA:
    """The model in a folder, ready to answer and to learn more.

    Args:
        path: a folder that ``save`` or ``onea teach`` made.
        params: of ``OneA``, to be other than saved, such as ``device="cuda"``.

    Raises:
        OneaError: there is no model, it is damaged, of a newer format, or its backbone is not here.
    """
    from onea.model.estimator import OneA

    folder = Path(path)
    manifest = read_manifest(folder)
    states = [read_state(folder, version) for version in manifest.versions]
    model = OneA(**(manifest.params | {"backbone": states[-1].backbone["source"]} | params))
    model._restore(states, manifest.counter)
    return model


def load_for(path: Path, **params: Any) -> OneA:
    """The model in a folder, with those parameters that are not None."""
    return load(path, **{name: value for name, value in params.items() if value is not None})


def save(model: OneA, path: Path, *, have_lock: bool = False) -> Path:
    """Bring a model folder up to date, or make it; a crash at any moment leaves the last complete version valid."""
    if not have_lock:
        with locked(path):
            return save(model, path, have_lock=True)
    check_can_hold(path)
    states = model.states()
    if holds_model(path):
        present = read_manifest(path).versions[-1]
        if read_state(path, present).id not in model.ancestry:
            raise OneaError(
                f"{path} holds something this model did not grow from (version {present}); load it again, or choose "
                "another folder."
            )
    write(path, states, Manifest(tuple(state.version for state in states), model.counter, model_params(model)))
    return path


def model_params(model: OneA) -> dict[str, Any]:
    """The parameters that belong to a model wherever it runs."""
    return {name: value for name, value in model.get_params().items() if name not in MACHINE}


def change(path: Path, how: Callable[[State, int, str], State]) -> State:
    """Make a change that needs no network, such as another name for a class, to the model in a folder."""
    read_manifest(path)
    with locked(path):
        check_can_hold(path)
        manifest = read_manifest(path)
        states = [read_state(path, version) for version in manifest.versions]  # so that damage is told early
        counter = manifest.counter + 1
        state = how(states[-1], counter, now())
        versions = (*manifest.versions, counter)[-1 - manifest.params["keep"] :]
        write(path, [state], Manifest(versions, counter, manifest.params))
        return state


def undo(path: Path) -> tuple[Undone, State]:
    """Go back to before the last update, even from a damaged version; returns what was undone and what is valid now."""
    read_manifest(path)
    with locked(path):
        check_can_hold(path)
        manifest = read_manifest(path)
        *earlier, last = manifest.versions
        if not earlier:
            raise OneaError(f"{path} keeps no version before {last}; there is nothing to go back to.")
        state = read_state(path, earlier[-1])
        what = "which could not be read"
        with suppress(OneaError):
            what = history_row(read_state(path, last).updates[-1])[2]
        write(path, [state], dataclasses.replace(manifest, versions=tuple(earlier)))
        return Undone(last, what), state


def read_manifest(path: Path) -> Manifest:
    """What a model folder says about itself."""
    if not holds_model(path):
        found = "holds no model" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise OneaError(f"{path} {found}; give a folder that `onea teach` or save() made.")
    place = path / layout.MANIFEST
    content = read_plain(place, validation.MOST_JSON)
    with _told(path, place, "restore the folder from a copy"):
        return Manifest(*validation.manifest_values(content))


def read_id(path: Path, version: int) -> str:
    """What tells one version of a model from another of the same number; reads no tensors."""
    return str(_described(path, version)["id"])


def read_state(path: Path, version: int) -> State:
    """One version of the model in a folder."""
    values, folder = _described(path, version), state_folder(path, version)
    file, size = open_plain(folder / layout.TENSORS)
    with file, _told(path, folder):
        return _state(values, validation.read_tensors(file, size, values))


def _described(path: Path, version: int) -> dict[str, Any]:
    """What ``state.json`` of a version says."""
    folder = state_folder(path, version)
    for place in (folder.parent, folder):
        check_plain(place, folder=True)
    content = read_plain(folder / layout.STATE, validation.MOST_JSON)
    with _told(path, folder):
        return validation.state_values(content, version)


@contextmanager
def _told(
    path: Path,
    place: Path,
    remedy: str = "restore it from a copy or, if it is the newest version, go back with `onea undo`",
) -> Iterator[None]:
    """What is wrong with a place in a model folder as one sentence."""
    try:
        yield
    except validation.TooNew as reason:
        raise OneaError(f"{path} {reason}; update onea.") from reason
    except Damage as reason:
        raise OneaError(f"{place} is damaged ({reason}); {remedy}.") from reason
    except OSError as error:
        raise OneaError(f"{place} cannot be read ({error.strerror}); restore the folder from a copy.") from error


def write(path: Path, states: Sequence[State], manifest: Manifest) -> None:
    """Write the versions that are not there yet, then switch to them, then tidy up. Needs the lock.

    Args:
        path: the model folder.
        states: the present one, and before it those that may have to be written.
        manifest: what is valid from now on.
    """
    described = validation.seal({"format": FORMAT, "onea": __version__, **dataclasses.asdict(manifest)})
    _check(lambda: validation.manifest_values(described))
    shown = {layout.PICTURE: history_picture(states[-1]), layout.CARD: card(states[-1], path.name).encode()}
    try:
        layout.begin(path)
        for state in states:
            if not _is_there(path, state):
                _write_state(path, state)
        write_atomically(path / layout.MANIFEST, described, _REMEDY)
        sync_folder(path)  # before anything goes that the old one needs
    except (OneaError, OSError) as error:
        with suppress(OneaError):
            layout.tidy(path, read_manifest(path).versions if holds_model(path) else ())
        if isinstance(error, OneaError):
            raise
        raise unwritable(path, len(described), error, _REMEDY) from error
    with suppress(OneaError):  # it is done; the next update tidies up and writes the card anew
        layout.tidy(path, manifest.versions)
        for name, content in shown.items():
            write_atomically(path / name, content)


def _is_there(path: Path, state: State) -> bool:
    with suppress(OneaError):
        return read_state(path, state.version).id == state.id
    return False


def _state(values: Mapping[str, Any], tensors: Tensors) -> State:
    """A state from what its two files hold."""
    return State(
        **{name: values[name] for name in _VALUES}
        | {name: tuple(values[name]) for name in ("classes", "updates")}
        | {name: tensors[name] for name in _TENSORS},
        evidence=Evidence(**{name: tensors[name] for name in _EVIDENCE}, freedom=values["freedom"]),
        adapter=part_of(_ADAPTER, tensors),
    )


def _write_state(path: Path, state: State) -> None:
    tensors = {name: getattr(state, name) for name in _TENSORS} | prefixed(_ADAPTER, state.adapter)
    tensors |= {name: getattr(state.evidence, name) for name in _EVIDENCE}
    content = save_tensors({name: value.contiguous() for name, value in tensors.items()})
    values = {name: getattr(state, name) for name in _VALUES}
    values |= {"format": FORMAT, "freedom": state.evidence.freedom}
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
        raise unwritable(path, len(content) + len(described), error, _REMEDY) from error
    finally:
        layout.remove_version(partial)


def _check(check: Callable[[], object]) -> None:
    """Never write what could not be read again."""
    try:
        check()
    except Damage as reason:
        raise OneaError(f"The model cannot be saved ({reason}); undo its last update.") from reason
