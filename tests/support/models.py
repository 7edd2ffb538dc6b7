# SPDX-License-Identifier: Apache-2.0
"""A tiny model, the files of class folders, waiting for a condition, and ONNX Runtime if it is installed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from onea.data.dataset import natural_key
from onea.errors import OneaError
from onea.model.estimator import OneA
from onea.model.storage import validation
from onea.vit.onnx import check_installed, onnx_runtime

T = TypeVar("T")


def tiny_model(vit: str, **params: Any) -> OneA:
    """A model that learns in a fraction of a second."""
    small: dict[str, Any] = {"backbone": vit, "epochs": 2, "rank": 4, "learning_rate": 0.05, "batch_size": 8}
    return OneA(**small | {"precision": "fp32", "threads": 1, "device": "cpu"} | params)


ALL_BLOCKS = {"adapter_blocks": 0, "patch_drop_rate": 0.0, "views": 3, "cached_views": 4, "enough_images": 0}


def all_blocks_model(vit: str, **params: Any) -> OneA:
    """A tiny model with adapters in all blocks, trained on all patches of new crops, and with three views."""
    given = {"views": params.pop("views")} if "views" in params else {}
    return tiny_model(vit, options=ALL_BLOCKS | given | params.pop("options", {}), **params)


def class_folders(root: Path) -> dict[str, list[Path]]:
    """The files of each class folder."""
    return {
        folder.name: sorted(folder.iterdir(), key=lambda file: natural_key(file.name))
        for folder in sorted(root.iterdir())
    }


def wait_for(condition: Callable[[], T], seconds: float = 120.0) -> T:
    """Wait until a condition holds and return its value; the time limit is generous and only detects a hang."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return value


def resealed(content: dict[str, Any]) -> bytes:
    """A JSON file of a model folder with these values and a valid checksum."""
    return validation.dump(content)


def onnx_runtime_or_skip() -> Any:
    """ONNX Runtime; the test is skipped if a library for ONNX files is missing."""
    try:
        check_installed()
    except OneaError as missing:
        pytest.skip(str(missing))
    return onnx_runtime()
