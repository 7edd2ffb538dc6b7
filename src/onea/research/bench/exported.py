# SPDX-License-Identifier: Apache-2.0
"""Inference of one network on the CPU, in PyTorch and as an exported file."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from onea import cpu
from onea.errors import OneaError
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.bench.measure import SEED, bench_backbone, inference_rows
from onea.research.bench.results import EXPORT, PYTORCH, BenchResult, Row, load_average
from onea.research.bench.run import OnStatus
from onea.research.runs.runner import environment
from onea.runtime import make_runtime
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.heads import cosine_scores
from onea.vit.onnx import Session, export_onnx, quantise_int8, save_onnx

Images = npt.NDArray[np.float32]
Inference = Callable[[Images], object]


class _Network(nn.Module):
    """A network with adapters and prototypes, as it is exported."""

    def __init__(self, vit: FrozenViT, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.vit, self.adapters = vit, Adapters(vit.depth, vit.width, rank, generator=generator, dropout=0.0)
        self.register_buffer("prototypes", torch.randn(CLASSES, vit.width, generator=generator))
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``[N, classes]``."""
        return cosine_scores(self.vit(images, self.adapters), self.get_buffer("prototypes"))


def export_bench(config: BenchConfig, on_status: OnStatus = lambda text: None) -> BenchResult:
    """Time inference at each batch size on the CPU, with the columns in turn.

    Raises:
        OneaError: ``device`` is not the CPU, or a library is missing.
    """
    if config.device not in ("auto", "cpu"):
        raise OneaError(f"--export measures the CPU, not {config.device}; leave --device out.")
    load = load_average()
    config = dataclasses.replace(config, device="cpu")
    runtime = config.runtime(same_numerics=True)
    vit = bench_backbone(config.backbone)
    network = _Network(vit, config.rank)
    with tempfile.TemporaryDirectory() as folder:
        on_status("exporting")
        columns = _columns(network, torch.get_num_threads(), Path(folder))
        rows: list[Row] = []
        for batch in config.batches:
            on_status(f"inference at batch {batch}")
            images = np.random.default_rng(SEED).standard_normal((batch, 3, vit.size, vit.size), dtype=np.float32)
            functions = {name: partial(function, images) for name, function in columns.items()}
            rows += inference_rows(functions, batch, runtime.device, config.seconds)
    return BenchResult(config, rows, vit.name, "fp32", False, load, environment(runtime.device), EXPORT)


def _columns(network: _Network, threads: int, folder: Path) -> dict[str, Inference]:
    size = network.vit.size
    model = export_onnx(network, torch.zeros(2, 3, size, size), ["scores"])
    fp32, int8 = folder / "fp32.onnx", folder / "int8.onnx"
    save_onnx(model, fp32, {})
    save_onnx(quantise_int8(model, folder), int8, {})
    columns: dict[str, Inference] = {PYTORCH: _pytorch(network, "fp32", threads)}
    if cpu.has_bf16():
        columns["PyTorch bf16"] = _pytorch(network, "bf16", threads)
    columns |= {"ONNX Runtime fp32": Session(fp32, threads), "ONNX Runtime int8": Session(int8, threads)}
    if importlib.util.find_spec("openvino"):
        columns["OpenVINO"] = _openvino(fp32, threads)
    return columns


def _pytorch(network: _Network, precision: str, threads: int) -> Inference:
    runtime = make_runtime("cpu", precision, threads)
    network = copy.deepcopy(network)
    network.vit.cast_matrices(runtime.dtype)

    def infer(images: Images) -> Tensor:
        with torch.no_grad(), runtime.autocast():
            scores: Tensor = network(torch.from_numpy(images))
            return scores

    return infer


def _openvino(path: Path, threads: int) -> Inference:
    """OpenVINO in its default precision for this CPU."""
    openvino: Any = importlib.import_module("openvino")
    compiled = openvino.Core().compile_model(
        str(path), "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    )

    def infer(images: Images) -> object:
        return compiled([images])[0]

    return infer
