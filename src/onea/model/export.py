# SPDX-License-Identifier: Apache-2.0
"""A model as one file that needs no onea: the adapter, the prototypes and the normalisation are inside the graph."""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onea.data.resample import axis_weights
from onea.errors import OneaError, to_install
from onea.files import check_writable, unwritable, write_atomically
from onea.model.answers import Snapshot
from onea.version import __version__

OPSET = 18
TOLERANCE = 1e-3
Format = Literal["onnx", "torch"]
_CHECKED = 16  # images that the file must answer as PyTorch does, in batches of different sizes
_REMEDY = "choose another place with -o"


class Graph(nn.Module):
    """From squares of pixels in 0..1 to probabilities, and whether an image is like anything that was taught."""

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
        self.temperature, self.threshold = state.temperature, max(model.threshold, -1e30)  # a graph has no infinity

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities ``[N, classes]`` and, for each image, whether it is familiar."""
        resize: Tensor = self.get_buffer("resize")
        pixels = (resize @ (images @ resize.T)).clamp(0, 1)
        inputs = (pixels - self.get_buffer("mean")) / self.get_buffer("std")
        features = self.vit(inputs, self.adapters)
        scores = self.scorer.forward(features)
        familiar = self.familiarity.forward(features, scores) >= self.threshold
        return torch.softmax(scores / self.temperature, dim=1), familiar


@dataclass(frozen=True)
class Export:
    """What was written, and how far its answers are from PyTorch's at most."""

    path: Path
    description: Path
    difference: float


def export(model: Snapshot, to: Format, path: Path) -> Export:
    """Write a model for ONNX Runtime (``onnx``) or ``torch.export.load`` (``torch``), with a description beside it.

    The file is kept only if it answers as PyTorch does, to ``TOLERANCE``.

    Raises:
        OneaError: a library is missing, the place cannot be written, or the answers differ.
    """
    model.check_taught()
    check_writable(path.parent)
    graph = Graph(model).eval().requires_grad_(False)
    side = model.side
    images = torch.rand(_CHECKED, 3, side, side, generator=torch.Generator().manual_seed(0))
    facts: dict[str, Any] = {
        "onea": __version__,
        "classes": list(model.classes),
        "version": model.version,
        "backbone": {key: model.engine.backbone[key] for key in ("name", "sha256")},
        "input": f"images: float32 [N, 3, {side}, {side}], RGB, pixels in 0..1 (short side resized, centre cut out)",
        "output": "probabilities: float32 [N, classes]; familiar: bool [N], false means unknown",
        "opset": OPSET if to == "onnx" else None,
    }
    writer, reader = (_write_onnx, _read_onnx) if to == "onnx" else (_write_torch, _read_torch)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"model{path.suffix}"
        writer(graph, images, facts, made)
        difference = _difference(graph, reader(made), images)
        if not difference <= TOLERANCE:
            raise OneaError(f"The exported file differs from PyTorch by {difference:.2g}; it was not kept.")
        try:
            content = made.read_bytes()
        except OSError as error:
            raise unwritable(path.parent, 0, error, _REMEDY) from error
    description = path.with_name(path.name + ".json")
    write_atomically(path, content, _REMEDY)
    facts["difference_from_pytorch"] = difference
    write_atomically(description, (json.dumps(facts, indent=1) + "\n").encode(), _REMEDY)
    return Export(path, description, difference)


Answers = Callable[[Tensor], tuple[Tensor, Tensor]]


def _difference(graph: Graph, answers: Answers, images: Tensor) -> float:
    worst = 0.0
    for batch in (images[:1], images[:3], images):
        with torch.no_grad():
            wanted = graph(batch)[0]
        worst = max(worst, float((wanted - answers(batch)[0]).abs().max()))
    return worst


def _write_onnx(graph: Graph, images: Tensor, facts: dict[str, Any], path: Path) -> None:
    onnx = _needed("onnx")
    _needed("onnxscript")
    _needed("onnxruntime")
    program = torch.onnx.export(
        graph,
        (images[:2],),
        dynamo=True,
        opset_version=OPSET,
        input_names=["images"],
        output_names=["probabilities", "familiar"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    written = program.model_proto
    onnx.helper.set_model_props(written, {key: json.dumps(value) for key, value in facts.items()})
    onnx.checker.check_model(written)
    onnx.save(written, path)


def _read_onnx(path: Path) -> Answers:
    session = _needed("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])

    def answers(batch: Tensor) -> tuple[Tensor, Tensor]:
        probabilities, familiar = session.run(None, {"images": batch.numpy()})
        return torch.from_numpy(probabilities), torch.from_numpy(familiar)

    return answers


def _write_torch(graph: Graph, images: Tensor, facts: dict[str, Any], path: Path) -> None:
    program = torch.export.export(graph, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path, extra_files={"onea.json": json.dumps(facts)})


def _read_torch(path: Path) -> Answers:
    loaded: Answers = torch.export.load(path).module()
    return loaded


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise OneaError(f"Export to ONNX needs {name}; install it with: {to_install('export')}") from None
