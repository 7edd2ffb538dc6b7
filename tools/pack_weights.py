# SPDX-License-Identifier: Apache-2.0
"""Store a backbone in eight bits, as the embedded ones are.

    python tools/pack_weights.py float16/vit_small_patch14_112.safetensors --photos FOLDER \
        --out vit_small_patch14_112.safetensors

The file holds a ViT under timm's names: a plain one, or that of ``ARCHITECTURE:FILE``. Its classification head, which
features do without, is left out. Positions stay as they are; photos are looked at in the size of ``--image-size``.
The new file says which weights it was made of. ``--photos`` names a folder with about a thousand photos: each matrix is
then rounded column by column, and later columns make up for what earlier ones lose on the inputs that these photos give
(GPTQ, https://arxiv.org/abs/2210.17323). Without it every weight is rounded on its own. ``--expanded FILE`` also writes
what the network will compute with, in float32, to compare the two elsewhere.
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
from onea.vit.eight_bits import LARGEST, SCALE, expanded, packed, rounded
from onea.vit.network_config import NetworkConfig
from onea.vit.weight_files import build_network, load_config, read_weights, split_file_name, without_head

DAMPING = 0.01  # of the mean square of the inputs
MATRICES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")  # of a block, in the order of computation


def rounded_together(matrix: Tensor, scales: Tensor, inputs: Tensor) -> Tensor:
    """Whole numbers for a matrix, column by column; later columns make up for what earlier ones lose on these inputs.

    Args:
        matrix: ``[rows, columns]``.
        scales: of its rows.
        inputs: what it is multiplied with, ``[N, columns]``.
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
def packed_for(vit: Any, weights: Mapping[str, Tensor], pixels: Tensor) -> Tensors:
    """These weights in eight bits; each matrix is rounded for the inputs that the matrices before it, rounded, give.

    Args:
        vit: timm's network with these weights, for images of the size of ``pixels``; its matrices are replaced.
        weights: as they are in the file.
        pixels: photos as the network gets them.
    """
    result: Tensors = dict(weights)

    def store(layer: nn.Module, name: str, inputs: Tensor) -> None:
        matrix = layer.get_parameter("weight")
        _, scales = rounded(matrix)
        numbers = rounded_together(matrix.flatten(1), scales, inputs.flatten(0, -2)).view(matrix.shape)
        result[f"{name}.weight"], result[f"{name}.weight{SCALE}"] = numbers, scales
        matrix.copy_(expanded({"": numbers, SCALE: scales})[""])

    patch = vit.patch_embed.proj
    store(patch, "patch_embed.proj", F.unfold(pixels, patch.kernel_size, stride=patch.stride).transpose(1, 2))
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(pixels)))
    for number, block in enumerate(vit.blocks):
        for name in MATRICES:
            layer = block.get_submodule(name)
            seen: list[Tensor] = []
            hook = layer.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
            block(tokens)
            hook.remove()
            store(layer, f"blocks.{number}.{name}", seen[0])
        tokens = block(tokens)
    return result


def network_input(folder: Path, size: int, config: NetworkConfig) -> Tensor:
    """The photos of a folder as a network of this size gets them."""
    pixels = torch.from_numpy(read_unlabelled(find_images(folder), size).pixels).float() / 255
    return (pixels - torch.tensor(config.mean)[:, None, None]) / torch.tensor(config.std)[:, None, None]


def main() -> None:
    """Read, pack, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="FILE of a plain ViT, or ARCHITECTURE:FILE")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--image-size", type=int, help="if not that which the positions are for")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--expanded", type=Path)
    arguments = parser.parse_args()

    parts = split_file_name(arguments.weights)
    if parts is None:
        parser.error(f"{arguments.weights} is no .safetensors file")
    told, path = parts
    source, config = read_weights(path), load_config(path, told) or NetworkConfig()
    weights = without_head(source)
    if arguments.photos:
        vit = build_network(weights, config, path).eval()
        if size := arguments.image_size:
            vit.set_input_size(img_size=(size, size))
        side = vit.patch_embed.img_size[0]
        small = packed_for(vit, weights, network_input(arguments.photos, side, config))
    else:
        small = packed(weights)
    # One entry, because safetensors writes several in any order.
    about = {"made_of": f"weights with sha256 {digest_of(source)}, rounded to int8 with a float32 scale for each row"}
    write_atomically(arguments.out, save(small, about))
    if arguments.expanded:
        write_atomically(arguments.expanded, save(expanded(small)))
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")
    print(f"sha256 of the weights before {digest_of(source)}\nsha256 of the weights now    {digest_of(small)}")


if __name__ == "__main__":
    main()
