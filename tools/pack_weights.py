# SPDX-License-Identifier: Apache-2.0
"""Quantise the weights of a backbone to int8, as those of the bundled networks.

    python tools/pack_weights.py float16/vit_small_patch14_112.safetensors --photos FOLDER \
        --out vit_small_patch14_112.safetensors

The file holds a ViT under timm's names: a plain one, or that of ``ARCHITECTURE:FILE``. Its classification head is left
out. Positions are not changed; photos are resized to ``--image-size``. The metadata of the new file contain the sha256
of the original weights. ``--photos`` is a folder of about a thousand photos: each matrix is then rounded column by
column, and later columns compensate the errors of earlier ones on the inputs from these photos (GPTQ,
https://arxiv.org/abs/2210.17323). Without it every weight is rounded separately. ``--expanded FILE`` also writes the
quantised weights in float32, for comparisons.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
CLIP_RATIOS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)  # of the largest weight of a row
DAMPING = 0.01  # of the mean square of the inputs
MATRICES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")  # of a block, in the order of computation


def quantise(tensors: Mapping[str, Tensor]) -> Tensors:
    """These tensors with every matrix and convolution in int8; norms, biases, tokens and positions stay as they are.

    >>> quantise({"a.weight": torch.tensor([[0.5, -0.5]]), "a.bias": torch.ones(1)})["a.weight"].tolist()
    [[127, -127]]
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and name.endswith(".weight"):
            result[name], result[name + INT8_SCALE] = quantise_rows(tensor)
        else:
            result[name] = tensor
    return result


def quantise_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Integers, and the scale of each row, for the clipping of ``CLIP_RATIOS`` with the smallest squared error."""
    rows = matrix.double().flatten(1)
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-300)  # a row of zeros stays one
    best = torch.full((len(rows), 1), -1.0, dtype=torch.float64)
    numbers, scales = torch.zeros_like(rows), torch.zeros_like(best)
    for ratio in CLIP_RATIOS:
        trial = (rows * (LARGEST / (ratio * largest))).round().clamp(-LARGEST, LARGEST)
        product, square = (rows * trial).sum(1, keepdim=True), trial.square().sum(1, keepdim=True).clamp(min=1)
        explained = product.square() / square  # of the row's squares, with the best scale for these integers
        better = explained > best
        numbers, scales = torch.where(better, trial, numbers), torch.where(better, product / square, scales)
        best = torch.where(better, explained, best)
    return numbers.to(torch.int8).view(matrix.shape), scales.flatten().float()


def quantise_with_inputs(matrix: Tensor, scales: Tensor, inputs: Tensor) -> Tensor:
    """Integers for a matrix, column by column; later columns compensate the errors of earlier ones on these inputs.

    Args:
        matrix: ``[rows, columns]``.
        scales: of its rows.
        inputs: of the matrix product, ``[N, columns]``.
    """
    left, units, inputs = matrix.double().clone(), scales.double(), inputs.double()
    moments = inputs.T @ inputs / len(inputs)
    moments += DAMPING * moments.diagonal().mean() * torch.eye(len(moments))
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    numbers = torch.empty_like(left)
    for column in range(left.shape[1]):
        numbers[:, column] = (left[:, column] / units).round().clamp(-LARGEST, LARGEST)
        lost = (left[:, column] - numbers[:, column] * units) / spread[column, column]
        left[:, column:] -= lost[:, None] * spread[column, column:]
    return numbers.to(torch.int8)


@torch.no_grad()
def quantise_for_photos(vit: Any, weights: Mapping[str, Tensor], pixels: Tensor) -> Tensors:
    """These weights in int8; each matrix is quantised for the inputs that the quantised matrices before it give.

    Args:
        vit: timm's network with these weights, for images of the size of ``pixels``; its matrices are replaced.
        weights: as stored in the file.
        pixels: photos as input of the network.
    """
    result: Tensors = dict(weights)

    def store(layer: nn.Module, name: str, inputs: Tensor) -> None:
        matrix = layer.get_parameter("weight")
        _, scales = quantise_rows(matrix)
        numbers = quantise_with_inputs(matrix.flatten(1), scales, inputs.flatten(0, -2)).view(matrix.shape)
        result[f"{name}.weight"], result[f"{name}.weight{INT8_SCALE}"] = numbers, scales
        matrix.copy_(dequantise({"": numbers, INT8_SCALE: scales})[""])

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
        small = quantise_for_photos(vit, weights, network_input(arguments.photos, side, config))
    else:
        small = quantise(weights)
    # A single entry, because safetensors writes several in arbitrary order.
    about = {"made_of": f"weights with sha256 {digest_of(source)}, rounded to int8 with a float32 scale for each row"}
    write_atomically(arguments.out, save(small, about))
    if arguments.expanded:
        write_atomically(arguments.expanded, save(dequantise(small)))
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")
    print(f"sha256 of the original weights  {digest_of(source)}\nsha256 of the quantised weights {digest_of(small)}")


if __name__ == "__main__":
    main()
