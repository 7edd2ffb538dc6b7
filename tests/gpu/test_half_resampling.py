# SPDX-License-Identifier: Apache-2.0
"""Cropping and resizing in float16, as runs in bf16 do it on a GPU, against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from onea.data.transforms import Preprocess, crop_resize, resize
from onea.runtime import make_runtime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = torch.device("cuda")
IMAGES = torch.randint(0, 256, (24, 3, 96, 80), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)

# Pixels 0..255 are exact in float16. Each of the two products rounds its weights and its result, by 2**-11 of their
# size at most, and sums in float32. The weights of a row sum to one; the absolute ones of a bicubic row to 1.25.
BOUND = {"bilinear": 255 * 4 * 2**-11, "bicubic": 1.25**2 * 255 * 4 * 2**-11}


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(28, 28), (160, 144)])
def test_crops_are_within_a_grey_level(kind, size):
    draw = torch.Generator().manual_seed(2)
    boxes = Preprocess(28, (0, 0, 0), (1, 1, 1)).draw(len(IMAGES), (96, 80), 0.1, draw)
    flips = boxes[:, 4] == 1
    expected = crop_resize(IMAGES, boxes[:, :4], size, kind, mirrored=flips, dtype=torch.float64)
    found = crop_resize(IMAGES.to(GPU), boxes[:, :4].to(GPU), size, kind, mirrored=flips.to(GPU), dtype=torch.float16)
    assert found.dtype == torch.float16
    off = (found.cpu().double() - expected).abs().max()
    assert 0 < off < BOUND[kind]


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_whole_images_are_within_a_grey_level(kind):
    expected = resize(IMAGES, (28, 28), kind, torch.float64)
    found = resize(IMAGES.to(GPU), (28, 28), kind, torch.float16)
    assert 0 < (found.cpu().double() - expected).abs().max() < BOUND[kind]


def test_network_inputs_are_in_full_precision_and_near():
    """What a run in bf16 feeds its network: float32, off by no more than the resampling."""
    runtime = make_runtime("cuda", "bf16")
    assert runtime.pixel_dtype == torch.float16
    preprocess = Preprocess(size=28, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    found = preprocess.test_views(IMAGES.to(GPU), runtime.pixel_dtype)
    assert found.dtype == torch.float32
    bound = BOUND["bilinear"] / 255 / 0.2 + 1e-5  # and the normalisation itself, in float32
    torch.testing.assert_close(found.cpu(), preprocess.test_views(IMAGES), rtol=0, atol=bound)
