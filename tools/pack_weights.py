# SPDX-License-Identifier: Apache-2.0
"""Quantise the weights of a backbone to int8, as those of the bundled network.

    python tools/pack_weights.py vit_small_patch14_dinov2:float32.safetensors --photos FOLDER --image-size 140 \
        --keep patch_embed --out src/onea/assets/vit_small_patch14_dinov2.safetensors

The file holds a ViT under timm's names: a plain one, or that of ``ARCHITECTURE:FILE``. Its classification head is left
out. Each row has one float16 scale for ``--group`` columns. Matrices whose name contains one of ``--keep`` and
positions are stored in float16; biases, norms and tokens are not changed. The metadata of the new file contain the
sha256 of the original weights. ``--photos`` is a folder of about two hundred photos, which are resized to
``--image-size``: each matrix is then rounded column by column, and later columns compensate the errors of earlier ones
on the inputs from these photos (GPTQ, https://arxiv.org/abs/2210.17323). Without it every weight is rounded separately.
``--expanded FILE`` also writes the quantised weights in float32, for comparisons.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from onea.files import write_atomically
from onea.model.learning.images import find_images, read_unlabelled
from onea.tensors import Tensors
from onea.vit.backbones import digest_of
from onea.vit.network_config import NetworkConfig
from onea.vit.weight_files import (
    INT8_SCALE,
    build_network,
    dequantise,
    load_config,
    read_weights,
    split_file_name,
    without_head,
)

LARGEST = 127  # of the integers, which are symmetric around 0
CLIP_RATIOS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)  # of the largest weight of a group
DAMPING = 0.01  # of the mean square of the inputs
MATRICES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")  # of a block, in the order of computation
GROUP = 32  # columns


def quantise(tensors: Mapping[str, Tensor], group: int = GROUP, keep: Sequence[str] = ()) -> Tensors:
    """These tensors with matrices and convolutions in int8, kept ones and positions in float16, all others unchanged.

    >>> quantise({"a.weight": torch.tensor([[0.5, -0.5]]), "a.bias": torch.ones(1)})["a.weight"].tolist()
    [[127, -127]]
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        if is_matrix(name, tensor) and not any(part in name for part in keep):
            rows = tensor.double().flatten(1)
            scales = group_scales(rows, group)
            result[name] = round_rows(rows, scales).view(tensor.shape)
            result[name + INT8_SCALE] = scales
        else:
            result[name] = tensor.half() if is_matrix(name, tensor) or name == "pos_embed" else tensor
    return result


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a linear layer or a convolution."""
    return tensor.ndim > 1 and name.endswith(".weight")


def group_scales(rows: Tensor, group: int) -> Tensor:
    """The scale of each group of columns, float16 ``[rows, groups]``.

    It belongs to the clipping of ``CLIP_RATIOS`` with the smallest squared error. If ``group`` does not divide the
    columns, the whole row is one group.
    """
    columns = rows.shape[1]
    groups = rows.double().unflatten(1, (-1, group if columns % group == 0 else columns))
    largest = groups.abs().amax(2, keepdim=True).clamp(min=1e-300)  # a group of zeros stays one
    best = torch.full_like(largest, -1.0)
    scales = torch.zeros_like(largest)
    for ratio in CLIP_RATIOS:
        trial = (groups * (LARGEST / (ratio * largest))).round().clamp(-LARGEST, LARGEST)
        product, square = (groups * trial).sum(2, keepdim=True), trial.square().sum(2, keepdim=True).clamp(min=1)
        explained = product.square() / square  # of the group's squares, with the best scale for these integers
        scales = torch.where(explained > best, product / square, scales)
        best = torch.maximum(explained, best)
    return scales[..., 0].half()


def round_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """Integers for a matrix with these scales; where a scale is zero, the integers are zero."""
    step = scales.double().repeat_interleave(rows.shape[1] // scales.shape[1], 1)
    return torch.where(step > 0, rows.double() / step, 0.0).round().clamp(-LARGEST, LARGEST).to(torch.int8)


def quantise_with_inputs(matrix: Tensor, scales: Tensor, inputs: Tensor) -> Tensor:
    """Integers for a matrix, column by column; later columns compensate the errors of earlier ones on these inputs.

    Args:
        matrix: ``[rows, columns]``.
        scales: of its groups of columns, ``[rows, groups]``.
        inputs: of the matrix product, ``[N, columns]``.
    """
    left, inputs = matrix.double().clone(), inputs.double()
    step = scales.double().repeat_interleave(matrix.shape[1] // scales.shape[1], 1)
    moments = inputs.T @ inputs / len(inputs)
    moments += DAMPING * moments.diagonal().mean() * torch.eye(len(moments))
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    numbers = torch.empty_like(left, dtype=torch.int8)
    for column in range(left.shape[1]):
        one = slice(column, column + 1)
        numbers[:, one] = round_rows(left[:, one], scales[:, column * scales.shape[1] // left.shape[1], None])
        lost = (left[:, column] - numbers[:, column] * step[:, column]) / spread[column, column]
        left[:, column:] -= lost[:, None] * spread[column, column:]
    return numbers


@torch.no_grad()
def quantise_for_photos(
    vit: Any, weights: Mapping[str, Tensor], pixels: Tensor, group: int = GROUP, keep: Sequence[str] = ()
) -> Tensors:
    """These weights in int8; each matrix is quantised for the inputs that the quantised matrices before it give.

    Args:
        vit: timm's network with these weights, for images of the size of ``pixels``; its matrices are replaced.
        weights: as stored in the file.
        pixels: photos as input of the network.
        group: columns that share a scale.
        keep: matrices with one of these in their name are stored in float16.
    """
    result = quantise(weights, group, keep)

    def store(layer: nn.Module, name: str, inputs: Tensor) -> None:
        matrix, name = layer.get_parameter("weight"), f"{name}.weight"
        if result[name].dtype == torch.int8:
            scales = result[name + INT8_SCALE]
            numbers = quantise_with_inputs(matrix.flatten(1), scales, inputs.flatten(0, -2))
            result[name] = numbers.view(matrix.shape)
            matrix.copy_(dequantise({"": result[name], INT8_SCALE: scales})[""])

    patch = vit.patch_embed.proj
    store(patch, "patch_embed.proj", F.unfold(pixels, patch.kernel_size, stride=patch.stride).transpose(1, 2))
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(pixels)))
    for number, block in enumerate(vit.blocks):
        for name in MATRICES:
            layer = block.get_submodule(name)
            captured: list[Tensor] = []
            hook = layer.register_forward_pre_hook(lambda _, inputs, captured=captured: captured.append(inputs[0]))
            block(tokens)
            hook.remove()
            store(layer, f"blocks.{number}.{name}", captured[0])
        tokens = block(tokens)
    return result


def network_input(folder: Path, size: int, config: NetworkConfig) -> Tensor:
    """The photos of a folder as input of a network with this image size."""
    pixels = torch.from_numpy(read_unlabelled(find_images(folder), size).pixels).float() / 255
    return (pixels - torch.tensor(config.mean)[:, None, None]) / torch.tensor(config.std)[:, None, None]


def main() -> None:
    """Read, pack, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="FILE of a plain ViT, or ARCHITECTURE:FILE")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--image-size", type=int, help="image size, if it differs from that of the positions")
    parser.add_argument("--group", type=int, default=GROUP, help="columns that share a scale")
    parser.add_argument("--keep", nargs="*", default=(), help="matrices with one of these in their name are in float16")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--expanded", type=Path)
    arguments = parser.parse_args()

    parts = split_file_name(arguments.weights)
    if parts is None:
        parser.error(f"{arguments.weights} is not a .safetensors file")
    architecture, path = parts
    source, config = read_weights(path), load_config(path, architecture) or NetworkConfig()
    weights = without_head(source)
    if arguments.photos:
        vit = build_network(weights, config, path).eval()
        if size := arguments.image_size:
            vit.set_input_size(img_size=(size, size))
        side = vit.patch_embed.img_size[0]
        pixels = network_input(arguments.photos, side, config)
        small = quantise_for_photos(vit, weights, pixels, arguments.group, arguments.keep)
    else:
        small = quantise(weights, arguments.group, arguments.keep)
    # A single entry, because safetensors writes several in arbitrary order.
    about = {"made_of": f"weights with sha256 {digest_of(source)}, rounded to int8 with float16 scales"}
    write_atomically(arguments.out, save(small, about))
    if arguments.expanded:
        write_atomically(arguments.expanded, save(dequantise(small)))
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")
    print(f"sha256 of the original weights  {digest_of(source)}\nsha256 of the quantised weights {digest_of(small)}")


if __name__ == "__main__":
    main()
