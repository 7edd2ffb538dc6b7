# SPDX-License-Identifier: Apache-2.0
"""Teach or refresh the model in a folder: lock the folder, learn, and save the new version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onea.errors import OneaError
from onea.model.estimator import OneA, load_for
from onea.model.learning.images import CLASS_FOLDERS, check_folder, find_images
from onea.model.learning.refresh import RefreshReport
from onea.model.parameters import check_preset
from onea.model.storage.folder import save
from onea.model.storage.layout import check_can_hold, holds_model, locked
from onea.model.storage.sources import read_sources, remember_source
from onea.runtime import Progress

_FIXED_AT_FIRST = ("image_size", "preset", "epochs", "seed")
_CHANGEABLE = ("unknown", "memory", "memory_mb")


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
    later: bool = False,
    remember: bool = False,
) -> OneA:
    """Teach the model at ``path`` (created if absent) the classes in a folder, and save it while holding its lock.

    With ``background``, all images below the folder are images of none of the classes. With ``later``, an adapter is
    trained later. With ``remember``, the folder is remembered for ``refresh_folder``.

    Raises:
        OneaError: the model, the photos or the arguments are invalid; the model folder is unchanged.
    """
    check_folder(folder, "images of none of the classes" if background else CLASS_FOLDERS)
    _check_outside(path, folder)
    with locked(path):
        check_can_hold(path)
        model = _load_or_create(path, params, machine)
        options: dict[str, Any] = {"name": name or folder.resolve().name, "progress": progress, "on_bad": on_bad}
        if background:
            model.learn_background(folder, **options)
        else:
            model.learn(folder, later=later, **options)
        save(model, path, have_lock=True)
        if remember:
            remember_source(path, folder)
    return model


def refresh_folder(
    path: Path,
    folders: Sequence[Path],
    machine: Mapping[str, Any],
    on_bad: str,
    progress: Progress | None = None,
) -> tuple[OneA, RefreshReport, list[Path]]:
    """Train the model at ``path`` once more on photos below folders, remembered folders and stored copies.

    Returns the model, a report, and remembered folders that no longer exist. The model is saved if it improved.

    Raises:
        OneaError: the model or a folder is invalid, or no photos to train on were found.
    """
    for folder in folders:
        check_folder(folder, "photos that were taught")
    with locked(path):
        model = load_for(path, **machine)
        remembered = [] if folders else read_sources(path)
        missing = [folder for folder in remembered if not folder.is_dir()]
        found = [*folders, *(folder for folder in remembered if folder not in missing)]
        photos = list(dict.fromkeys(photo for folder in found for photo in find_images(folder)))
        report = model.refresh(photos or None, progress=progress, on_bad=on_bad)  # type: ignore[arg-type]
        if report.kept:
            save(model, path, have_lock=True)
    return model, report, missing


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
    return model.set_params(**{name: value for name, value in params.items() if name in _CHANGEABLE})
