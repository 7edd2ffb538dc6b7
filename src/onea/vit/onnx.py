# SPDX-License-Identifier: Apache-2.0
"""ONNX export: from a PyTorch module to a graph, dynamic int8 quantisation, photos as input, and ONNX Runtime.

In int8 graphs, weights have one scale per output, computed once; activations have one scale per product and batch.

Photos of any size are cropped and resized in the graph as ``onea.data.decode.fit`` does with Pillow. ONNX's antialiased
resize computes its weights in float32, and one pixel in a thousand differs from Pillow. Here the weights are Pillow's:
computed in float64, rounded to 22 fractional bits. Their products with bytes, and all sums, are integers that float64
represents exactly, so pixels depend neither on the order of summation nor on the processor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from onea.errors import import_extra
from onea.vit.frozen import FrozenViT

OPSET = 18


def onnx_runtime(module: str = "onnxruntime") -> Any:
    """ONNX Runtime or one of its modules, without telemetry; import it nowhere else.

    Its telemetry contacts a server of the vendor and writes a database of machine properties below HOME.

    Raises:
        OneaError: it is not installed.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read during the import
    import_extra("onnxruntime", "export").disable_telemetry_events()  # if it was imported before
    return import_extra(module, "export")


def check_installed() -> None:
    """Check that the libraries for ONNX files are installed.

    Raises:
        OneaError: one is missing.
    """
    for library in ("onnx", "onnxscript"):
        import_extra(library, "export")
    onnx_runtime()


def export_onnx(module: nn.Module, images: Tensor, outputs: Sequence[str]) -> Any:
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
        part.ClearField("metadata_props")  # stack traces, with paths of this machine
        part.ClearField("doc_string")
    return model


def save_onnx(model: Any, path: Path, metadata: Mapping[str, str]) -> None:
    """Check an ONNX model and write it with metadata."""
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


_SMOOTHING = 0.75  # alpha of SmoothQuant: share of the activations' spread that moves into the weights
_MIN_MAXIMUM = 1e-5
_PREPROCESSED = {"onnx.quant.pre_process": "onnxruntime.quant"}  # prevents a warning about missing preprocessing


@torch.no_grad()
def smooth_activations(vit: FrozenViT, run: Callable[[], object]) -> None:
    """Even out the input channels of a network's widest products (SmoothQuant); its output stays the same.

    A few channels are many times larger than the others, for which a common scale leaves hardly any levels. Dividing
    each output channel of a norm by a factor, and multiplying the weights of the next layer by it, moves the spread
    into the weights (https://arxiv.org/abs/2211.10438). ``run`` runs the network on representative images.
    """
    maxima: dict[nn.Module, Tensor] = {}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        maximum = inputs[0].abs().flatten(0, -2).amax(0)
        maxima[layer] = torch.maximum(maxima[layer], maximum) if layer in maxima else maximum

    pairs = [pair for block in vit.vit.blocks for pair in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1))]
    handles = [layer.register_forward_pre_hook(record) for _, layer in pairs]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    for norm, layer in pairs:
        if layer in maxima:  # attention of the last block does not call its layer: it needs one token's query only
            weights = layer.weight.abs().amax(0).clamp_min(_MIN_MAXIMUM)
            factors = maxima[layer].clamp_min(_MIN_MAXIMUM) ** _SMOOTHING / weights ** (1 - _SMOOTHING)
            norm.weight.div_(factors)
            norm.bias.div_(factors)
            layer.weight.mul_(factors)


def quantise_int8(model: Any, folder: Path) -> Any:
    """An ONNX model with the matrix products of its blocks in int8; leaves a file ``int8.onnx`` in ``folder``."""
    onnx, quantization = import_extra("onnx", "export"), onnx_runtime("onnxruntime.quantization")
    weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    nodes = list(model.graph.node)  # in the order of computation
    norms = [index for index, node in enumerate(nodes) if node.op_type == "LayerNormalization"]
    blocks = nodes[norms[0] : norms[-1]]
    products = [node.name for node in blocks if node.op_type == "MatMul" and node.input[1] in weights]
    onnx.helper.set_model_props(model, _PREPROCESSED)
    path = folder / "int8.onnx"
    quantization.quantize_dynamic(
        model,
        path,
        op_types_to_quantize=["MatMul"],
        nodes_to_quantize=products,
        per_channel=True,
        weight_type=quantization.QuantType.QInt8,
    )
    return onnx.load(path)


# Crop the margins far outside the final square, then resize, width first; only pixels of the square are computed. All
# sizes are (height, width). Round rounds halves to the even number, as in Python.
_FRONT = """
<ir_version: 8, opset_import: ["": {opset}]>
photos (uint8[batch, height, width, 3] images) => (float[batch, 3, {side}, {side}] squares)
<int64[2] photo_swap = {{1, 0}}, int64 photo_two = {{2}}, int64 photo_zero = {{0}}, int64 photo_one = {{1}},
 int64[2] photo_rows = {{1, 2}}, int64 photo_side = {{{side}}}, int64[1] photo_column = {{1}},
 float photo_white = {{255}}, double real_zero = {{0}}, double real_half = {{0.5}}, double real_one = {{1}},
 double real_two = {{2}}, double real_max = {{255}}, double real_fine = {{4194304}}, double real_cubic = {{1.5}},
 double real_square = {{2.5}}, double real_five = {{5}}, double real_eight = {{8}}, double real_four = {{4}},
 double real_a = {{-0.5}}>
{{
  photo_size = Shape <start = 1, end = 3> (images)
  photo_across = Gather (photo_size, photo_swap)
  photo_limit = Mul (photo_across, photo_two)
  photo_surplus = Sub (photo_size, photo_limit)
  photo_excess = Max (photo_surplus, photo_zero)
  photo_spare = Div (photo_excess, photo_two)
  photo_end = Sub (photo_size, photo_spare)
  photo_cut = Slice (images, photo_spare, photo_end, photo_rows)
  photo_kept = Sub (photo_end, photo_spare)
  photo_short = ReduceMin (photo_kept)
  photo_scaled = Mul (photo_kept, photo_side)
  photo_covering = Div (photo_scaled, photo_short)
  photo_beyond = Sub (photo_covering, photo_side)
  photo_margins = Cast <to = 11> (photo_beyond)
  photo_margin = Mul (photo_margins, real_half)
  photo_first = Round (photo_margin)
  photo_width = Cast <to = 11> (photo_side)
  photo_last = Add (photo_first, photo_width)
  photo_upright = Transpose <perm = [0, 3, 1, 2]> (photo_cut)
  photo_levels = Cast <to = 11> (photo_upright)
  {across}
  across_turned = Transpose <perm = [1, 0]> (across_weights)
  across_sums = MatMul (photo_levels, across_turned)
  {across_rounded}
  {down}
  down_sums = MatMul (down_weights, across_levels)
  {down_rounded}
  photo_bytes = Cast <to = 1> (down_levels)
  squares = Div (photo_bytes, photo_white)
}}
"""

# Pillow's weights along one axis, ``[side, kept]``: Keys' cubic of the distances between the centres of the pixels,
# widened by the scale, normalised to sum one; in Pillow's order of operations.
_WEIGHTS = """
  {axis}_kept = Gather (photo_kept, {index})
  {axis}_wanted = Gather (photo_covering, {index})
  {axis}_from = Cast <to = 11> ({axis}_kept)
  {axis}_to = Cast <to = 11> ({axis}_wanted)
  {axis}_scale = Div ({axis}_from, {axis}_to)
  {axis}_wide = Max ({axis}_scale, real_one)
  {axis}_narrow = Div (real_one, {axis}_wide)
  {axis}_first = Gather (photo_first, {index})
  {axis}_last = Gather (photo_last, {index})
  {axis}_numbers = Range ({axis}_first, {axis}_last, real_one)
  {axis}_middles = Add ({axis}_numbers, real_half)
  {axis}_places = Mul ({axis}_middles, {axis}_scale)
  {axis}_centres = Unsqueeze ({axis}_places, photo_column)
  {axis}_pixels = Range (real_zero, {axis}_from, real_one)
  {axis}_offsets = Sub ({axis}_pixels, {axis}_centres)
  {axis}_shifted = Add ({axis}_offsets, real_half)
  {axis}_signed = Mul ({axis}_shifted, {axis}_narrow)
  {axis}_x = Abs ({axis}_signed)
  {axis}_near_a = Mul ({axis}_x, real_cubic)
  {axis}_near_b = Sub ({axis}_near_a, real_square)
  {axis}_near_c = Mul ({axis}_near_b, {axis}_x)
  {axis}_near_d = Mul ({axis}_near_c, {axis}_x)
  {axis}_near = Add ({axis}_near_d, real_one)
  {axis}_far_a = Sub ({axis}_x, real_five)
  {axis}_far_b = Mul ({axis}_far_a, {axis}_x)
  {axis}_far_c = Add ({axis}_far_b, real_eight)
  {axis}_far_d = Mul ({axis}_far_c, {axis}_x)
  {axis}_far_e = Sub ({axis}_far_d, real_four)
  {axis}_far = Mul ({axis}_far_e, real_a)
  {axis}_is_near = Less ({axis}_x, real_one)
  {axis}_is_close = Less ({axis}_x, real_two)
  {axis}_outer = Where ({axis}_is_close, {axis}_far, real_zero)
  {axis}_cubic = Where ({axis}_is_near, {axis}_near, {axis}_outer)
  {axis}_sum = ReduceSum ({axis}_cubic, photo_column)
  {axis}_share = Div ({axis}_cubic, {axis}_sum)
  {axis}_fine = Mul ({axis}_share, real_fine)
  {axis}_size = Abs ({axis}_fine)
  {axis}_up = Add ({axis}_size, real_half)
  {axis}_whole = Floor ({axis}_up)
  {axis}_sign = Sign ({axis}_fine)
  {axis}_weights = Mul ({axis}_whole, {axis}_sign)
"""

# Weighted sums of bytes, rounded to bytes.
_ROUNDED = """
  {axis}_raw = Div ({axis}_sums, real_fine)
  {axis}_raised = Add ({axis}_raw, real_half)
  {axis}_floor = Floor ({axis}_raised)
  {axis}_levels = Clip ({axis}_floor, real_zero, real_max)
"""


def prepend_resize(model: Any, side: int) -> None:
    """Change the input of a model from squares of pixels in 0..1 to RGB photos ``uint8 [N, height, width, 3]``."""
    axes = {"down": "photo_zero", "across": "photo_one"}
    parts = {axis: _WEIGHTS.format(axis=axis, index=index) for axis, index in axes.items()}
    parts |= {f"{axis}_rounded": _ROUNDED.format(axis=axis) for axis in axes}
    front = import_extra("onnx.parser", "export").parse_model(_FRONT.format(opset=OPSET, side=side, **parts)).graph
    body = model.graph
    for node in body.node:
        node.input[:] = ["squares" if name == "images" else name for name in node.input]
    nodes = [*front.node, *body.node]
    del body.node[:]
    body.node.extend(nodes)
    body.initializer.extend(front.initializer)
    body.input[0].CopyFrom(front.input[0])
