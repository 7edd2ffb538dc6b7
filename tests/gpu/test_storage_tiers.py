# SPDX-License-Identifier: Apache-2.0
"""Images in the GPU's memory, in pinned memory of the host and on disk: the same views, and the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onea.data.image_storage import PackedImages
from onea.data.transforms import Preprocess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU, CPU = torch.device("cuda"), torch.device("cpu")
PREPROCESS = Preprocess(size=28, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
PIXELS = np.random.default_rng(1).integers(0, 256, (200, 3, 32, 40), dtype=np.uint8)
TIERS = ("device", "host", "disk")


def training_views(images: PackedImages) -> list[torch.Tensor]:
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(2))
    return list(images.train_batches(rows, 16, 0.3, torch.Generator().manual_seed(3)))


def test_host_images_are_pinned_and_device_images_are_there():
    device, host = (PackedImages(PIXELS, PREPROCESS, GPU, tier) for tier in ("device", "host"))
    assert host.pixels.device.type == "cpu"
    assert host.pixels.is_pinned()
    assert device.pixels.is_cuda


@pytest.mark.parametrize("tier", TIERS)
def test_views_are_the_cpus(tier):
    ours, expected = PackedImages(PIXELS, PREPROCESS, GPU, tier), PackedImages(PIXELS, PREPROCESS, CPU, "device")
    rows = torch.tensor([7, 0, 199, 7])
    # Two products in float32 of at most 40 terms each: 2 * 40 * 2**-24 of at most 255 / 255 / 0.2 units is 2.4e-5.
    torch.testing.assert_close(ours.test_views(rows).cpu(), expected.test_views(rows), rtol=0, atol=3e-5)
    for mine, theirs in zip(training_views(ours), training_views(expected), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=3e-5)


def test_every_tier_gives_the_same_bits_while_the_gpu_is_busy():
    """The GPU has half a second of work before it when batches are copied; none may take another one's place."""
    expected = training_views(PackedImages(PIXELS, PREPROCESS, GPU, "device"))
    torch.cuda.synchronize()
    matrix = torch.randn(4096, 4096, device=GPU)
    for tier in TIERS:
        images = PackedImages(PIXELS, PREPROCESS, GPU, tier)
        for _ in range(200):
            matrix = torch.tanh(matrix @ matrix)
        found = training_views(images)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
