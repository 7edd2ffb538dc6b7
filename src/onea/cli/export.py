# SPDX-License-Identifier: Apache-2.0
"""``onea export``: a model as one file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onea.cli.options import Model, MovedBackbone

_ENDINGS = {"onnx": ".onnx", "torch": ".pt2"}


def export(
    model: Model,
    to: Annotated[str, typer.Option(help="onnx (ONNX Runtime and others) or torch (torch.export.load).")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File; by default beside the model.")] = None,
    backbone: MovedBackbone = None,
) -> None:
    """Write a model as one file: network, adapter, prototypes and normalisation in one graph, for any batch size.

    The file is kept only if its answers are PyTorch's. A description (classes, input, output) lies beside it as JSON.
    """
    from onea.errors import OneaError, nearest
    from onea.model.export import OPSET
    from onea.model.export import export as write
    from onea.model.folder import load_for

    if to not in _ENDINGS:
        raise OneaError(f"Unknown format '{to}'; {nearest(to, _ENDINGS)}")
    loaded = load_for(model, backbone=backbone, device="cpu").snapshot()
    done = write(loaded, to, out or model.with_suffix(_ENDINGS[to]))  # type: ignore[arg-type]
    opset = f", opset {OPSET}" if to == "onnx" else ""
    print(f"{done.path}: {len(loaded.classes):,} classes, version {loaded.version}{opset}")
    print(f"input: float32 [N, 3, {loaded.side}, {loaded.side}], RGB, pixels in 0..1; see {done.description}")
    print(f"differs from PyTorch by at most {done.difference:.1g}")
