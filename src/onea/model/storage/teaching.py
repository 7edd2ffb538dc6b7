# SPDX-License-Identifier: Apache-2.0
"""Teach the model in a folder: lock the folder, learn, and save the new version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onea.errors import OneaError
from onea.model.estimator import OneA, load_for
from onea.model.learning.images import CLASS_FOLDERS, check_folder
from onea.model.parameters import check_preset
from onea.model.storage.folder import save
from onea.model.storage.layout import check_can_hold, holds_model, locked
from onea.runtime import Progress

_FIXED_AT_FIRST = ("image_size", "preset", "epochs", "seed")


def teach_folder(
    path: Path,
    folder: Path,
    name: str | None,
    params: Mapping[str, Any],
    machine: Mapping[str, Any],
    on_bad: str,
    progress: Progress | None = None,
    *,
    background: bool = False,
) -> OneA:
    """Teach the model at ``path`` (created if absent) the classes in a folder, and save it while holding its lock.

    With ``background``, all images below the folder are images of none of the classes.

    Raises:
        OneaError: the model, the photos or the arguments are invalid; the model folder is unchanged.
    """
    check_folder(folder, "images of none of the classes" if background else CLASS_FOLDERS)
    _check_outside(path, folder)
    with locked(path):
        check_can_hold(path)
        model = _load_or_create(path, params, machine)
        learn = model.learn_background if background else model.learn
        learn(folder, name=name or folder.resolve().name, progress=progress, on_bad=on_bad)  # type: ignore[arg-type]
        save(model, path, have_lock=True)
    return model


def _check_outside(path: Path, folder: Path) -> None:
    """Refuse a model inside the folder of photos, where its picture would be read as a photo."""
    model, photos = path.resolve(), folder.resolve()
    if photos in model.parents and not any(part.startswith(".") for part in model.relative_to(photos).parts):
        raise OneaError(
            f"{path} is inside {folder}, where every folder is read as photos; choose a place outside it for the model."
        )


def _load_or_create(path: Path, params: Mapping[str, Any], machine: Mapping[str, Any]) -> OneA:
    if not holds_model(path):
        return OneA(**params, **machine)
    model = load_for(path, backbone=params.get("backbone"), **machine)
    check_preset(params.get("preset", model.preset))
    stored = model.get_params()
    for name in _FIXED_AT_FIRST:
        if params.get(name, stored[name]) != stored[name]:
            setting = f"without {name}" if stored[name] is None else f"with {name} {stored[name]}"
            raise OneaError(f"{path} was created {setting}; leave out {name}=, or teach a new model.")
    return model.set_params(**{name: value for name, value in params.items() if name == "unknown"})
