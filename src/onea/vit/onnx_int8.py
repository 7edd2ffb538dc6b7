# SPDX-License-Identifier: Apache-2.0
"""An ONNX network whose large products are in eight bits, for CPUs that multiply those faster (VNNI and the like).

Weights have a scale for each output, made once; activations have one for each product, made of the batch at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onea.errors import import_extra
from onea.vit.frozen import FrozenViT
from onea.vit.onnx_files import onnx_runtime

_SHARE = 0.75  # of the activations' spread that moves into the weights, which have finer scales
_LEAST = 1e-5
_PREPARED = {"onnx.quant.pre_process": "onnxruntime.quant"}  # or the library warns that the graph may be a raw one


@torch.no_grad()
def smooth(vit: FrozenViT, run: Callable[[], object]) -> None:
    """Even out the channels that enter a network's widest products; what it computes stays the same.

    A few channels are many times larger than the others, and one scale for all leaves those hardly any levels. Dividing
    a norm's outputs by a factor for each channel, and multiplying the weights that read them by it, moves that spread
    into the weights (SmoothQuant, https://arxiv.org/abs/2211.10438).

    Args:
        vit: the network.
        run: runs it on what it may meet.
    """
    largest: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found = inputs[0].abs().flatten(0, -2).amax(0)
        largest[module] = torch.maximum(largest[module], found) if module in largest else found

    pairs = [pair for block in vit.vit.blocks for pair in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1))]
    notes = [product.register_forward_pre_hook(note) for _, product in pairs]
    try:
        run()
    finally:
        for noted in notes:
            noted.remove()
    for norm, product in pairs:
        if product in largest:  # the last block computes the queries of one token alone, in its own way
            weights = product.weight.abs().amax(0).clamp_min(_LEAST)
            factors = largest[product].clamp_min(_LEAST) ** _SHARE / weights ** (1 - _SHARE)
            for parameter in (norm.weight, norm.bias):
                parameter.div_(factors)
            product.weight.mul_(factors)


def to_int8(model: Any, folder: Path) -> Any:
    """The ONNX model of a network with the products of its blocks in eight bits; what is around them stays as it is.

    A file ``int8.onnx`` is left in ``folder``.
    """
    onnx, quantization = import_extra("onnx", "export"), onnx_runtime("onnxruntime.quantization")
    weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    nodes = list(model.graph.node)  # in the order of computation
    norms = [place for place, node in enumerate(nodes) if node.op_type == "LayerNormalization"]
    blocks = nodes[norms[0] : norms[-1]]
    products = [node.name for node in blocks if node.op_type == "MatMul" and node.input[1] in weights]
    onnx.helper.set_model_props(model, _PREPARED)
    written = folder / "int8.onnx"
    quantization.quantize_dynamic(
        model,
        written,
        op_types_to_quantize=["MatMul"],
        nodes_to_quantize=products,
        per_channel=True,
        weight_type=quantization.QuantType.QInt8,
    )
    return onnx.load(written)
