"""The model folder ``NAME.onea/``: every version in a folder of its own, and one small file that says which is valid.

model.json                    format, valid versions (the last one is the present), parameters
states/000007/state.json      classes, updates, backbone, options, calibration
states/000007/state.safetensors
README.md, history.png        the model card
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from onea.errors import OneaError
from onea.files import read_json, unwritable, write_atomically, write_json
from onea.methods.state import part_of, prefixed
from onea.model.card import CARD, PICTURE, card, history_picture
from onea.model.formats import FORMAT, modern
from onea.model.learning import now
from onea.model.lock import locked
from onea.model.readout import Evidence
from onea.model.state import State
from onea.version import __version__

if TYPE_CHECKING:
    from onea.model.estimator import OneA

_MANIFEST, _STATES, _ADAPTER = "model.json", "states", "adapter."
_EVIDENCE, _TENSORS = ("prototypes", "counts", "scatter"), ("familiar", "margins", "margin_rows")
_VALUES = (
    *("version", "id", "backbone", "preprocess", "options", "readout"),
    *("classes", "merged", "temperature", "calibrated_on", "updates", "numbers"),
)
_MACHINE = ("device", "precision", "threads")  # belong to where a model runs, not to the model
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


def holds_model(path: Path) -> bool:
    """Whether a folder holds a model, of whatever format."""
    return (path / _MANIFEST).is_file()


def save(model: OneA, path: Path, *, have_lock: bool = False) -> Path:
    """Bring a model folder up to date, or make it; a crash at any moment leaves the last complete version valid."""
    if not have_lock:
        with locked(path):
            return save(model, path, have_lock=True)
    states = model.states()
    if holds_model(path):
        present = read_manifest(path).versions[-1]
        if read_state(path, present).id not in model.ancestry:
            raise OneaError(
                f"{path} holds something this model did not grow from (version {present}); load it again, or choose "
                "another folder."
            )
    elif path.exists() and {entry.name for entry in path.iterdir()} - {"lock", _STATES}:
        raise OneaError(f"{path} is not empty and holds no model; choose another folder.")
    write(path, states, Manifest(tuple(state.version for state in states), model.counter, model_params(model)))
    return path


def model_params(model: OneA) -> dict[str, Any]:
    """The parameters that belong to a model wherever it runs."""
    return {name: value for name, value in model.get_params().items() if name not in _MACHINE}


def change(path: Path, how: Callable[[State, int, str], State]) -> State:
    """Make a change that needs no network, such as another name for a class, to the model in a folder."""
    read_manifest(path)
    with locked(path):
        manifest = read_manifest(path)
        states = [read_state(path, version) for version in manifest.versions]
        counter = manifest.counter + 1
        states = [*states, how(states[-1], counter, now())][-1 - manifest.params["keep"] :]
        write(path, states, Manifest(tuple(s.version for s in states), counter, manifest.params))
        return states[-1]


def undo(path: Path) -> tuple[State, State]:
    """Go back to before the last update; returns what was undone and what is valid now."""
    read_manifest(path)
    with locked(path):
        manifest = read_manifest(path)
        if len(manifest.versions) < 2:
            raise OneaError(f"{path} keeps no version before {manifest.versions[-1]}; there is nothing to go back to.")
        undone = read_state(path, manifest.versions[-1])
        states = [read_state(path, version) for version in manifest.versions[:-1]]
        write(path, states, dataclasses.replace(manifest, versions=manifest.versions[:-1]))
        return undone, states[-1]


def read_manifest(path: Path) -> Manifest:
    """What a model folder says about itself."""
    if not holds_model(path):
        found = "holds no model" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise OneaError(f"{path} {found}; give a folder that `onea teach` or save() made.")
    content = read_json(path / _MANIFEST)
    written = content.get("format") if isinstance(content, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise OneaError(
            f"{path} has format {written}, and this onea ({__version__}) reads up to {FORMAT}; update onea."
        )
    try:
        return Manifest(tuple(map(int, content["versions"])), int(content["counter"]), dict(content["params"]))
    except (KeyError, TypeError, ValueError):
        raise OneaError(f"{path / _MANIFEST} is damaged; restore the folder from a copy.") from None


def read_id(path: Path, version: int) -> str:
    """What tells one version of a model from another of the same number; reads no tensors."""
    file = _state_folder(path, version) / "state.json"
    written = read_json(file)
    if not isinstance(written, dict) or not isinstance(written.get("id"), str):
        raise OneaError(f"{file} is damaged; go back with `onea undo` or restore a copy.")
    return str(written["id"])


def read_state(path: Path, version: int) -> State:
    """One version of the model in a folder."""
    folder = _state_folder(path, version)
    written = read_json(folder / "state.json")
    try:
        content = (folder / "state.safetensors").read_bytes()
    except OSError as error:
        raise OneaError(f"{folder} cannot be read ({error.strerror}); restore the folder from a copy.") from error
    try:
        if hashlib.sha256(content).hexdigest() != written["sha256"]:
            raise ValueError("the tensors changed")
        written = modern(written)
        tensors = load_tensors(content)
        values: dict[str, Any] = {name: written[name] for name in _VALUES}
        values |= {name: tuple(written[name]) for name in ("classes", "updates")}
        values |= {name: tensors[name] for name in _TENSORS}
        evidence = Evidence(**{name: tensors[name] for name in _EVIDENCE}, freedom=int(written["freedom"]))
        return State(**values, evidence=evidence, adapter=part_of(_ADAPTER, tensors))
    except (KeyError, TypeError, ValueError) as error:
        raise OneaError(f"{folder} is damaged ({error}); go back with `onea undo` or restore a copy.") from error


def write(path: Path, states: Sequence[State], manifest: Manifest) -> None:
    """Write the versions that are not there yet, then switch to them, then tidy up. Needs the lock."""
    for state in states:
        if not _is_there(path, state):
            _write_state(path, state)
    content = {"format": FORMAT, "onea": __version__, **dataclasses.asdict(manifest)}
    write_json(path / _MANIFEST, content, _REMEDY)
    kept = {_state_folder(path, version) for version in manifest.versions}
    for leftover in (path / _STATES).iterdir():
        if leftover not in kept:
            shutil.rmtree(leftover, ignore_errors=True)
    with suppress(OneaError, OSError):  # the card says again what the version says; the next update writes it anew
        for name in (PICTURE, CARD):
            write_atomically(path / name, (_state_folder(path, manifest.versions[-1]) / name).read_bytes())


def _is_there(path: Path, state: State) -> bool:
    with suppress(OneaError):
        return read_state(path, state.version).id == state.id
    return False


def _write_state(path: Path, state: State) -> None:
    tensors = {name: getattr(state, name) for name in _TENSORS} | prefixed(_ADAPTER, state.adapter)
    tensors |= {name: getattr(state.evidence, name) for name in _EVIDENCE}
    content = save_tensors({name: value.contiguous() for name, value in tensors.items()})
    written = {name: getattr(state, name) for name in _VALUES}
    written |= {"format": FORMAT, "freedom": state.evidence.freedom, "sha256": hashlib.sha256(content).hexdigest()}
    files = {
        "state.safetensors": content,
        "state.json": (json.dumps(written, indent=1, allow_nan=False) + "\n").encode(),
        CARD: card(state, path.name).encode(),
        PICTURE: history_picture(state),
    }
    target = _state_folder(path, state.version)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        partial.chmod(0o755)
        for name, data in files.items():
            write_atomically(partial / name, data, _REMEDY)
        shutil.rmtree(target, ignore_errors=True)  # left by a crash between here and the switch
        partial.rename(target)
        _sync(target.parent)
    except OSError as error:
        raise unwritable(path, sum(map(len, files.values())), error, _REMEDY) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _state_folder(path: Path, version: int) -> Path:
    return path / _STATES / f"{version:06d}"


def _sync(folder: Path) -> None:
    """A rename is on disk only when its folder is; Windows opens no folders and sees to it by itself."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
