# SPDX-License-Identifier: Apache-2.0
"""A model as one file that needs no onea: the adapter, the prototypes and the preprocessing are inside the graph."""

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
from onea.model.storage.layout import named
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
Answers = Callable[[Pixels], tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
_OUTPUTS = ("probabilities", "none_of_these")
_CHECKED = (1, 3, 16)  # images that the file must answer as the model does, in batches of these sizes
_BATCH, _SEEN = 32, 128  # photos at a time, and those that show how activations spread


class Graph(nn.Module):
    """From squares of pixels in 0..1 to probabilities of each class and of none of them, which add up to 1."""

    def __init__(self, model: Snapshot):
        super().__init__()
        engine, state = model.engine, model.state
        # Copies, because the exporters want everything on the CPU.
        self.vit, self.adapters = copy.deepcopy(engine.vit).cpu(), copy.deepcopy(model.adapters).cpu()
        side, size = engine.side, engine.preprocess.size
        whole = torch.tensor([0]), torch.tensor([side])
        self.register_buffer("resize", axis_weights(*whole, side, size, engine.preprocess.filter)[0])
        self.register_buffer("mean", torch.tensor(engine.preprocess.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(engine.preprocess.std)[:, None, None])
        self.scorer = copy.deepcopy(model.scorer)
        self.familiarity = copy.deepcopy(model.familiarity)
        threshold = max(model.threshold, -1e30)  # a graph has no infinity
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
    """What was written.

    Attributes:
        path: of the file.
        description: of the JSON file beside it.
        input: what it takes, in words.
        difference: between its probabilities and the model's, at most.
        quality: how it answers labelled photos, where it is in eight bits.
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
    """Write a model for ONNX Runtime (``onnx``) or ``torch.export.load`` (``torch``), with a description beside it.

    The file is kept only if it answers as the model does, to ``TOLERANCE``; in eight bits, if it answers labelled
    photos nearly as well (``onea.model.evaluation.metrics``).

    Args:
        model: which one.
        to: the format.
        path: of the file.
        preprocess: whether the file takes photos of any size, and not squares of pixels; by default ONNX files do.
        precision: ``int8`` computes the network's products in eight bits (``onnx`` only).
        check: folder of class folders with the photos that decide about ``int8``; of classes that were never taught,
            they decide nothing.
        force: replace a file that is no earlier export, or one of another kind or precision.

    Raises:
        OneaError: a library is missing, the place cannot be written, or the answers differ.
    """
    photos = to == "onnx" if preprocess is None else preprocess
    _check_wishes(to, photos, precision, check)
    model.check_has_classes()
    facts = _describe(model, to, photos, precision)
    check_place(path, to, facts, force)
    if to == "onnx":
        check_installed()  # before minutes of reading photos
    labelled = _read_check(model, check) if check else None
    with making(path) as folder:
        made, description = folder / f"model{path.suffix}", folder / "model.json"
        _write(model, to, photos, labelled, facts, made)
        answers = _answers(made, to, photos)
        if labelled:
            difference, quality = _compared(model, answers, labelled)
            quality.check()
            facts["check"] = asdict(quality)
        else:
            difference, quality = _difference(model, answers, photos), None
            if not difference <= TOLERANCE:
                raise OneaError(f"The exported file differs from the model by {difference:.2g}; it was not kept.")
        facts["difference_from_pytorch"] = difference
        description.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        put(description, description_of(path))  # first, or a kill between both would leave a file of an unknown kind
        put(made, path)
    return Export(path, description_of(path), facts["input"], difference, quality)


def _check_wishes(to: Format, photos: bool, precision: Precision, check: Path | None) -> None:
    if photos and to == "torch":
        raise OneaError("Only an ONNX file takes photos of any size; export --to onnx, or leave --preprocess out.")
    if precision == "int8" and to == "torch":
        raise OneaError("Only an ONNX file can be in eight bits; export --to onnx, or leave --precision out.")
    if precision == "int8" and check is None:
        raise OneaError(
            "Eight bits can cost accuracy: give --check and a folder with one folder of photos for each class, which "
            "decide whether the file is written."
        )
    if precision != "int8" and check is not None:
        raise OneaError("--check is for --precision int8; without it the file answers as the model does anyway.")


def _read_check(model: Snapshot, folder: Path) -> DecodedImages:
    """The photos of classes that the model knows; no answer to others is right, and none of them can be lost."""
    check_folder(folder, CLASS_FOLDERS)
    found = read_labelled(folder, None, model.side, purpose="evaluate")
    assert found.labels is not None
    check_spelling(found.labels, model.classes)
    known = [row for row, label in enumerate(found.labels) if label in model.classes]
    if not known:
        raise OneaError(f"The model knows none of the classes in {folder}; check the names.")
    labels, names = (tuple(part[row] for row in known) for part in (found.labels, found.names))
    return replace(found, pixels=found.pixels[known], labels=labels, names=names)


def _write(
    model: Snapshot, to: Format, photos: bool, labelled: DecodedImages | None, facts: dict[str, Any], path: Path
) -> None:
    graph = Graph(model).eval().requires_grad_(False)
    squares = torch.rand(2, 3, model.side, model.side, generator=torch.Generator().manual_seed(0))
    if to == "torch":
        program = torch.export.export(graph, (squares,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # holds paths of this machine
        with warnings.catch_warnings():
            # Weights that share memory are on the CPU here, where torch says that nothing can go wrong.
            warnings.filterwarnings("ignore", "No complete tensor found in the group")
            torch.export.save(program, path, extra_files={"onea.json": json.dumps(facts)})
        return
    if labelled:
        some = torch.from_numpy(labelled.pixels[:: -(-len(labelled) // _SEEN)]).float() / 255
        smooth_activations(graph.vit, lambda: [graph(part) for part in some.split(_BATCH)])
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


def _answers(path: Path, to: Format, photos: bool) -> Answers:
    """What a file answers for photos ``[N, height, width, 3]``, which must be squares already if it takes no others."""
    run = Session(path) if to == "onnx" else _read_torch(path)

    def answers(images: Pixels) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        probabilities, none = run(images if photos else images.transpose(0, 3, 1, 2).astype(np.float32) / 255)
        return probabilities, none

    return answers


def _difference(model: Snapshot, answers: Answers, photos: bool) -> float:
    """Between the probabilities of a file and those of the model, at most."""
    random, side = np.random.default_rng(0), model.side
    shapes = [(count, side, side) for count in _CHECKED]
    if photos:  # enlarged, shrunk, upright and wide
        shapes += [(2, side // 2, side - 1), (2, 5 * side // 2, 2 * side + 1), (2, side + 1, 7 * side // 2)]
    batches = (random.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes)
    return max(float(np.abs(answers(images)[0] - model.predict_proba(images)).max()) for images in batches)


def _compared(model: Snapshot, answers: Answers, photos: DecodedImages) -> tuple[float, Quality]:
    """The largest difference between probabilities, and how a file answers labelled photos beside the model."""
    assert photos.labels is not None
    names = np.array(model.classes)
    parts = [
        answers(photos.pixels[start : start + _BATCH].transpose(0, 2, 3, 1)) for start in range(0, len(photos), _BATCH)
    ]
    probabilities, none = (np.concatenate(part) for part in zip(*parts, strict=True))
    found = model.compute_scores(photos)
    difference = float(np.abs(probabilities - model.probabilities(found).classes.numpy()).max())
    asked = [answer.label for answer in model.answers_from(photos, found, k=1)]
    given = np.where(none > MAJORITY, UNKNOWN, names[probabilities.argmax(1)])
    return difference, Quality.compare(photos.labels, asked, given.tolist())


def _read_torch(path: Path) -> Callable[[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    loaded = torch.export.load(path).module()
    return lambda images: [output.detach().numpy() for output in loaded(torch.from_numpy(images))]


ENDINGS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
_KIND = ("precision", "input")  # facts in which two exports of one format differ
_REMEDY = "choose another place with -o"
_FORCE = f"{_REMEDY}, or replace it with --force"


def default_place(model: Path, to: str, precision: str) -> Path:
    """The file beside a model folder that an export goes to.

    >>> str(default_place(Path("shop.onea"), "onnx", "int8")), str(default_place(Path("shop.onea"), "torch", "fp32"))
    ('shop-int8.onnx', 'shop.pt2')
    """
    folder = named(model)
    suffix = "" if precision == "fp32" else f"-{precision}"
    return folder.with_name(folder.name.removesuffix(".onea") + suffix + ENDINGS[to])


def description_of(path: Path) -> Path:
    """The JSON file beside an exported file that describes it."""
    return path.with_name(f"{path.name}.json")


def check_place(path: Path, to: str, facts: Mapping[str, Any], force: bool) -> None:
    """Refuse a place that cannot be written, or has anything but an earlier export of this kind and precision.

    Args:
        path: of the file.
        to: its format.
        facts: what its description will tell.
        force: replace whatever file is there.
    """
    ending, description = ENDINGS[to], description_of(path)
    if path.is_dir():
        raise OneaError(f"{path} is a folder; name a file in it, such as {path / 'model'}{ending}.")
    if not force and path.exists() and path.suffix != ending:
        raise OneaError(f"{path} is there already and is no {ending} file; {_FORCE}.")
    if not force and (path.exists() or description.exists()):
        earlier = _read_description(description)
        if earlier is None:
            there = path if path.exists() else description
            raise OneaError(f"{there} is there already and is no file of an earlier export; {_FORCE}.")
        for name in _KIND:
            if earlier[name] != facts[name]:
                raise OneaError(f"{path} is there already, and its {name} is {earlier[name]}; {_FORCE}.")
    check_writable(path.parent)


def _read_description(description: Path) -> dict[str, Any] | None:
    """What the description of an earlier export tells; None if it is none."""
    with suppress(OneaError):
        found = read_json(description)
        if isinstance(found, dict) and all(isinstance(found.get(name), str) for name in _KIND):
            return found
    return None


@contextmanager
def making(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` for files that are to be complete before they go there; it is removed afterwards.

    One export of a file at a time has it. So whatever other folder of this kind is there is of an export that was
    killed, and is removed.

    Raises:
        OneaError: another process exports to this file, or there is no room.
    """
    lock = path.with_name(f".{path.name}.lock")
    with file_lock(lock, remedy=_REMEDY):
        ours = re.compile(rf"\.{re.escape(path.name)}\.\w+\.partial")
        try:
            for left in path.parent.iterdir():
                if ours.fullmatch(left.name):
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(".partial", f".{path.name}.", path.parent) as folder:
                yield Path(folder)
        except OSError as error:
            raise write_error(path.parent, 0, error, _REMEDY) from error
        finally:
            with suppress(OSError):  # Windows does not remove what is open
                lock.unlink()


def put(file: Path, place: Path) -> None:
    """Put a complete file into its place, where the file that it replaces is whole until then."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
    file.replace(place)
