# SPDX-License-Identifier: Apache-2.0
"""Export of a model to an ONNX or torch.export file, with the adapter, the classifier and the preprocessing."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from onea import __version__
from onea.data.dataset import Pixels
from onea.data.transforms import axis_weights
from onea.errors import OneaError
from onea.files import check_writable, read_json, write_error
from onea.locks import file_lock
from onea.model.answers import MAJORITY, Snapshot
from onea.model.calibration import probabilities
from onea.model.evaluation.metrics import Quality
from onea.model.learning.images import CLASS_FOLDERS, DecodedImages, check_folder, read_labelled
from onea.model.names import UNKNOWN, check_spelling
from onea.model.storage.layout import with_name
from onea.vit.onnx import (
    OPSET,
    Session,
    check_installed,
    export_onnx,
    prepend_resize,
    quantise_int8,
    save_onnx,
    smooth_activations,
)

TOLERANCE = 1e-3
Format = Literal["onnx", "torch"]
Precision = Literal["fp32", "int8"]
Predict = Callable[[Pixels], tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
_OUTPUTS = ("probabilities", "none_of_these")
_CHECK_BATCHES = (1, 3, 16)  # sizes of the batches on which the file is compared with the model
_BATCH = 32  # photos
_CALIBRATION_PHOTOS = 128  # at most, for the ranges of the activations


class Graph(nn.Module):
    """Computes the probabilities of each class and of none of them from square images with pixels in 0..1."""

    def __init__(self, model: Snapshot):
        super().__init__()
        engine, state = model.engine, model.state
        # Copies on the CPU, as the exporters require.
        self.vit, self.adapters = copy.deepcopy(engine.vit).cpu(), copy.deepcopy(model.adapters).cpu()
        side, size = engine.side, engine.preprocess.size
        whole = torch.tensor([0]), torch.tensor([side])
        self.register_buffer("resize", axis_weights(*whole, side, size, engine.preprocess.filter)[0])
        self.register_buffer("mean", torch.tensor(engine.preprocess.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(engine.preprocess.std)[:, None, None])
        self.scorer = copy.deepcopy(model.scorer.exportable())
        self.familiarity = copy.deepcopy(model.familiarity)
        threshold = max(model.threshold, -1e30)  # ONNX has no infinity
        self.calibration = state.temperature, threshold, model.slope

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The probability of each class, ``[N, classes]``, and of none of them, ``[N]``."""
        resize: Tensor = self.get_buffer("resize")
        pixels = (resize @ (images @ resize.T)).clamp(0, 1)
        inputs = (pixels - self.get_buffer("mean")) / self.get_buffer("std")
        features = self.vit(inputs, self.adapters)
        scores = self.scorer.forward(features)
        return probabilities(scores, self.familiarity.forward(features, scores), *self.calibration)


@dataclass(frozen=True)
class Export:
    """An exported file.

    Attributes:
        path: path of the file.
        description: path of the JSON file next to it.
        input: a description of its input.
        difference: the largest difference between its probabilities and those of the model.
        quality: the comparison on labelled photos, for ``int8``.
    """

    path: Path
    description: Path
    input: str
    difference: float
    quality: Quality | None = None


def export(
    model: Snapshot,
    to: Format,
    path: Path,
    *,
    preprocess: bool | None = None,
    precision: Precision = "fp32",
    check: Path | None = None,
    force: bool = False,
) -> Export:
    """Write a model for ONNX Runtime (``onnx``) or ``torch.export.load`` (``torch``), and a JSON description.

    The file is kept only if its probabilities agree with those of the model within ``TOLERANCE``; with ``int8``, if it
    passes ``Quality.check`` on labelled photos.

    Args:
        model: the version to export.
        to: the format.
        path: path of the file.
        preprocess: whether the input is photos of any size instead of square images; the default for ONNX.
        precision: ``int8`` computes the network's matrix products in eight bits (``onnx`` only).
        check: folder of class folders with the photos for the check of ``int8``; untaught classes are ignored.
        force: replace a file that is not an earlier export, or is one of another kind or precision.

    Raises:
        OneaError: a library is missing, the file cannot be written, or its predictions differ.
    """
    photos = to == "onnx" if preprocess is None else preprocess
    _check_arguments(to, photos, precision, check)
    model.check_has_classes()
    facts = _describe(model, to, photos, precision)
    check_path(path, to, facts, force)
    if to == "onnx":
        check_installed()  # before minutes of reading photos
    labelled = _read_check_photos(model, check) if check else None
    with partial_folder(path) as folder:
        file, description = folder / f"model{path.suffix}", folder / "model.json"
        _write_file(model, to, photos, labelled, facts, file)
        predict = _load_exported(file, to, photos)
        if labelled:
            difference, quality = _compare(model, predict, labelled)
            quality.check()
            facts["check"] = asdict(quality)
        else:
            difference, quality = _max_difference(model, predict, photos), None
            if not difference <= TOLERANCE:
                raise OneaError(f"The exported file differs from the model by {difference:.2g}; it was not kept.")
        facts["difference_from_pytorch"] = difference
        description.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        _move(description, description_path(path))  # first, so that no file is ever without a description
        _move(file, path)
    return Export(path, description_path(path), facts["input"], difference, quality)


def _check_arguments(to: Format, photos: bool, precision: Precision, check: Path | None) -> None:
    if photos and to == "torch":
        raise OneaError("Only an ONNX file takes photos of any size; export --to onnx, or leave --preprocess out.")
    if precision == "int8" and to == "torch":
        raise OneaError("Only an ONNX file can be int8; export --to onnx, or leave --precision out.")
    if precision == "int8" and check is None:
        raise OneaError(
            "int8 can cost accuracy: give --check and a folder with one folder of photos for each class, to measure "
            "the loss."
        )
    if precision != "int8" and check is not None:
        raise OneaError("--check is for --precision int8; an fp32 file always predicts the same as the model.")


def _read_check_photos(model: Snapshot, folder: Path) -> DecodedImages:
    """The photos of the model's classes."""
    check_folder(folder, CLASS_FOLDERS)
    batch = read_labelled(folder, None, model.side, purpose="evaluate")
    assert batch.labels is not None
    check_spelling(batch.labels, model.classes)
    known = [row for row, label in enumerate(batch.labels) if label in model.classes]
    if not known:
        raise OneaError(f"None of the classes in {folder} are in the model; check the names.")
    labels, names = (tuple(part[row] for row in known) for part in (batch.labels, batch.names))
    return replace(batch, pixels=batch.pixels[known], labels=labels, names=names)


def _write_file(
    model: Snapshot, to: Format, photos: bool, labelled: DecodedImages | None, facts: dict[str, Any], path: Path
) -> None:
    graph = Graph(model).eval().requires_grad_(False)
    squares = torch.rand(2, 3, model.side, model.side, generator=torch.Generator().manual_seed(0))
    if to == "torch":
        program = torch.export.export(graph, (squares,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # holds paths of this machine
        with warnings.catch_warnings():
            # Harmless for weights on the CPU.
            warnings.filterwarnings("ignore", "No complete tensor found in the group")
            torch.export.save(program, path, extra_files={"onea.json": json.dumps(facts)})
        return
    if labelled:
        sample = torch.from_numpy(labelled.pixels[:: -(-len(labelled) // _CALIBRATION_PHOTOS)]).float() / 255
        smooth_activations(graph.vit, lambda: [graph(part) for part in sample.split(_BATCH)])
    written = export_onnx(graph, squares, _OUTPUTS)
    if labelled:
        written = quantise_int8(written, path.parent)
    if photos:
        prepend_resize(written, model.side)
    save_onnx(written, path, {key: json.dumps(value) for key, value in facts.items()})


def _describe(model: Snapshot, to: Format, photos: bool, precision: Precision) -> dict[str, Any]:
    side = model.side
    squares = f"float32 [N, 3, {side}, {side}], RGB, pixels in 0..1 (short side resized, centre cut out)"
    return {
        "onea": __version__,
        "classes": list(model.classes),
        "version": model.version,
        "backbone": {
            key: model.engine.backbone[key] for key in ("name", "sha256", "licence") if key in model.engine.backbone
        },
        "input": "images: " + ("uint8 [N, H, W, 3], RGB, photos of any size, upright" if photos else squares),
        "side": side,
        "output": "probabilities: float32 [N, classes]; none_of_these: float32 [N], unknown if more than one half",
        "precision": precision,
        "opset": OPSET if to == "onnx" else None,
    }


def _load_exported(path: Path, to: Format, photos: bool) -> Predict:
    """A function from images ``[N, height, width, 3]`` to the probabilities of an exported file.

    Without ``photos``, the images must be square.
    """
    run = Session(path) if to == "onnx" else _load_torch(path)

    def predict(images: Pixels) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        probabilities, none = run(images if photos else images.transpose(0, 3, 1, 2).astype(np.float32) / 255)
        return probabilities, none

    return predict


def _max_difference(model: Snapshot, predict: Predict, photos: bool) -> float:
    """The largest difference between the probabilities of a file and those of the model, on random images."""
    random, side = np.random.default_rng(0), model.side
    shapes = [(count, side, side) for count in _CHECK_BATCHES]
    if photos:  # smaller and larger, upright and wide
        shapes += [(2, side // 2, side - 1), (2, 5 * side // 2, 2 * side + 1), (2, side + 1, 7 * side // 2)]
    batches = (random.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes)
    return max(float(np.abs(predict(images)[0] - model.predict_proba(images)).max()) for images in batches)


def _compare(model: Snapshot, predict: Predict, photos: DecodedImages) -> tuple[float, Quality]:
    """The largest difference between probabilities on labelled photos, and the quality of the predictions."""
    assert photos.labels is not None
    names = np.array(model.classes)
    parts = [
        predict(photos.pixels[start : start + _BATCH].transpose(0, 2, 3, 1)) for start in range(0, len(photos), _BATCH)
    ]
    probabilities, none = (np.concatenate(part) for part in zip(*parts, strict=True))
    scores = model.compute_scores(photos)
    difference = float(np.abs(probabilities - model.probabilities(scores).classes.numpy()).max())
    by_model = [answer.label for answer in model.answers_from(photos, scores, k=1)]
    by_file = np.where(none > MAJORITY, UNKNOWN, names[probabilities.argmax(1)])
    return difference, Quality.compare(photos.labels, by_model, by_file.tolist())


def _load_torch(path: Path) -> Callable[[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    loaded = torch.export.load(path).module()
    return lambda images: [output.detach().numpy() for output in loaded(torch.from_numpy(images))]


ENDINGS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
_KIND_FACTS = ("precision", "input")  # facts in which two exports of one format differ
_REMEDY = "choose another place with -o"
_FORCE = f"{_REMEDY}, or replace it with --force"


def default_path(model: Path, to: str, precision: str) -> Path:
    """The default file of an export, beside the model folder.

    >>> str(default_path(Path("shop.onea"), "onnx", "int8")), str(default_path(Path("shop.onea"), "torch", "fp32"))
    ('shop-int8.onnx', 'shop.pt2')
    """
    folder = with_name(model)
    suffix = "" if precision == "fp32" else f"-{precision}"
    return folder.with_name(folder.name.removesuffix(".onea") + suffix + ENDINGS[to])


def description_path(path: Path) -> Path:
    """The JSON file beside an exported file that describes it."""
    return path.with_name(f"{path.name}.json")


def check_path(path: Path, to: str, facts: Mapping[str, Any], force: bool) -> None:
    """Refuse a path that cannot be written, or an existing file that is not an export of this kind and precision.

    Args:
        path: path of the file.
        to: format of the file.
        facts: description of the export.
        force: replace any file.
    """
    ending, description = ENDINGS[to], description_path(path)
    if path.is_dir():
        raise OneaError(f"{path} is a folder; name a file in it, such as {path / 'model'}{ending}.")
    if not force and path.exists() and path.suffix != ending:
        raise OneaError(f"{path} already exists and is not a {ending} file; {_FORCE}.")
    if not force and (path.exists() or description.exists()):
        earlier = _read_description(description)
        if earlier is None:
            existing = path if path.exists() else description
            raise OneaError(f"{existing} already exists and is not from an earlier export; {_FORCE}.")
        for name in _KIND_FACTS:
            if earlier[name] != facts[name]:
                raise OneaError(f"{path} already exists, and its {name} is {earlier[name]}; {_FORCE}.")
    check_writable(path.parent)


def _read_description(description: Path) -> dict[str, Any] | None:
    """The description of an earlier export; None if the file is not one."""
    with suppress(OneaError):
        facts = read_json(description)
        if isinstance(facts, dict) and all(isinstance(facts.get(name), str) for name in _KIND_FACTS):
            return facts
    return None


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path``, with a lock for this path; folders of killed exports are removed.

    Raises:
        OneaError: another process exports to this file, or the disk is full.
    """
    lock = path.with_name(f".{path.name}.lock")
    with file_lock(lock, remedy=_REMEDY):
        partial = re.compile(rf"\.{re.escape(path.name)}\.\w+\.partial")
        try:
            for leftover in path.parent.iterdir():
                if partial.fullmatch(leftover.name):
                    shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(".partial", f".{path.name}.", path.parent) as folder:
                yield Path(folder)
        except OSError as error:
            raise write_error(path.parent, 0, error, _REMEDY) from error
        finally:
            with suppress(OSError):  # Windows cannot remove open files
                lock.unlink()


def _move(file: Path, target: Path) -> None:
    """Replace the target atomically by a complete file."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
    file.replace(target)
