# SPDX-License-Identifier: Apache-2.0
"""From a PyTorch module to an ONNX graph, and from a file to answers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from onea.errors import import_extra

OPSET = 18


def onnx_runtime(module: str = "onnxruntime") -> Any:
    """ONNX Runtime or a module of it, with its telemetry switched off. All that need it import it here.

    Left on, telemetry looks up a server of its maker and keeps the kind of machine in a database below HOME.

    Raises:
        OneaError: it is not installed.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # is read when it is imported
    import_extra("onnxruntime", "export").disable_telemetry_events()  # for who imported it before
    return import_extra(module, "export")


def check_installed() -> None:
    """Refuse to begin where a library that ONNX files need is missing.

    Raises:
        OneaError: one is.
    """
    for library in ("onnx", "onnxscript"):
        import_extra(library, "export")
    onnx_runtime()


def to_onnx(module: nn.Module, images: Tensor, outputs: Sequence[str]) -> Any:
    """A module as an ONNX model that takes ``images`` in batches of any size."""
    check_installed()
    program = torch.onnx.export(
        module,
        (images,),
        dynamo=True,
        opset_version=OPSET,
        input_names=["images"],
        output_names=list(outputs),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    model = program.model_proto
    graphs = [model.graph, *model.functions]
    for part in [*graphs, *(node for graph in graphs for node in graph.node)]:
        part.ClearField("metadata_props")  # these hold stack traces, with paths of this machine
        part.ClearField("doc_string")
    return model


def save(model: Any, path: Path, metadata: Mapping[str, str]) -> None:
    """Check an ONNX model and write it with what there is to know about it."""
    onnx = import_extra("onnx", "export")
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model)
    onnx.save(model, path)


class Session:
    """An ONNX file in ONNX Runtime on the CPU; ``threads`` 0 is all of its cores."""

    def __init__(self, path: Path, threads: int = 0):
        runtime = onnx_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def __call__(self, images: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """The outputs for a batch of images."""
        outputs: list[npt.NDArray[Any]] = self._session.run(None, {"images": images})
        return outputs
