# SPDX-License-Identifier: Apache-2.0
"""Batched cropping and resizing against torchvision, image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop, functional

from onea.data.transforms import Preprocess, axis_weights, crop_resize, random_crop_boxes, resize

IDENTITY = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def pictures(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(seed)).byte()


@settings(deadline=None, max_examples=40)
@given(st.integers(8, 60), st.integers(8, 60), st.integers(4, 70), st.integers(0, 99))
def test_random_crops_equal_torchvision(height, width, size, seed):
    images = pictures(3, height, width, seed)
    boxes = random_crop_boxes(3, height, width, 0.05, torch.Generator().manual_seed(seed))
    ours = crop_resize(images, boxes, (size, size))
    for image, box, mine in zip(images, boxes.tolist(), ours, strict=True):
        exact = functional.resized_crop(image.float(), *box, [size, size], antialias=True)
        assert (mine - exact).abs().max() < 0.01
        rounded = functional.resized_crop(image, *box, [size, size], antialias=True)
        assert (mine.round().clamp(0, 255) - rounded.float()).abs().max() <= 1


@pytest.mark.parametrize(("height", "width", "size"), [(64, 64, 28), (32, 32, 84), (50, 40, 33)])
def test_bicubic_equals_torchvision(height, width, size):
    images = pictures(2, height, width).float()
    whole = torch.tensor([[0, 0, height, width]] * 2)
    ours = crop_resize(images, whole, (size, size), "bicubic")
    theirs = functional.resize(images, [size, size], InterpolationMode.BICUBIC, antialias=True)
    assert (ours - theirs).abs().max() < 0.01


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_weights_are_averages_over_the_crop_only(pixels, size, data):
    length = data.draw(st.integers(1, pixels))
    start = data.draw(st.integers(0, pixels - length))
    weights = axis_weights(torch.tensor([start]), torch.tensor([length]), pixels, size)[0]
    torch.testing.assert_close(weights.sum(1), torch.ones(size))
    assert weights[:, :start].abs().sum() == 0
    assert weights[:, start + length :].abs().sum() == 0


@pytest.mark.parametrize(("height", "width"), [(40, 40), (30, 90), (90, 30)])
def test_the_distribution_of_boxes_equals_torchvisions(height, width):
    """Mean and standard deviation of the boxes, ours sampled in one batch and torchvision's one by one."""
    ours = random_crop_boxes(4000, height, width, 0.3, torch.Generator().manual_seed(1)).double()
    torch.manual_seed(1)
    law = RandomResizedCrop(10, scale=(0.3, 1.0))
    image = torch.zeros(3, height, width)
    drawn = [law.make_params([image]) for _ in range(4000)]
    theirs = torch.tensor([[d["top"], d["left"], d["height"], d["width"]] for d in drawn]).double()
    spread = theirs.std(0).clamp_min(0.5)
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 0.12 * spread).all()
    assert ((ours.std(0) - theirs.std(0)).abs() < 0.12 * spread).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_resizing_equals_cropping_whole_images(kind):
    images = pictures(3, 20, 31)
    boxes = torch.tensor([[0, 0, 20, 31]] * 3)
    for size in ((8, 12), (28, 40)):
        torch.testing.assert_close(resize(images, size, kind), crop_resize(images, boxes, size, kind))


def test_mirrored_crops_are_the_crops_flipped():
    images, drawn = pictures(4, 20, 31), random_crop_boxes(4, 20, 31, 0.3, torch.Generator().manual_seed(2))
    mirrored = torch.tensor([True, False, True, False])
    plain = crop_resize(images, drawn, (12, 9))
    flipped = crop_resize(images, drawn, (12, 9), mirrored=mirrored)
    torch.testing.assert_close(flipped[::2], plain[::2].flip(3))
    torch.testing.assert_close(flipped[1::2], plain[1::2])


def test_half_precision_rounds_less_than_uint8():
    """Bytes are exact in half precision, so only the weights and two results are rounded."""
    preprocess, images = Preprocess(28, **IDENTITY), pictures(6, 40, 40)
    drawn = preprocess.sample_crops(6, (40, 40), 0.3, torch.Generator().manual_seed(1))
    for view in (
        lambda dtype: preprocess.test_views(images, dtype),
        lambda dtype: preprocess.train_views(images, drawn, dtype),
    ):
        exact, half = (255 * view(dtype) for dtype in (torch.float32, torch.float16))
        assert half.dtype == torch.float32
        assert 0 < (half - exact).abs().max() < 0.25
        assert (half - exact).abs().mean() < 0.05


def test_direct_geometry_is_a_plain_resize_with_the_backbones_normalisation():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    images = pictures(2, 32, 32)
    ours = Preprocess(84, mean, std).test_views(images)
    theirs = functional.normalize(functional.resize(images.float() / 255, [84, 84], antialias=True), mean, std)
    assert (ours - theirs).abs().max() < 1e-3


@pytest.mark.parametrize(("height", "width"), [(256, 256), (48, 64), (64, 40)])
def test_published_geometry_is_resize_256_crop_224(height, width):
    images = pictures(2, height, width)
    ours = Preprocess(224, **IDENTITY, geometry="resize-crop", resize=256, filter="bicubic").test_views(images)
    resized = functional.resize(images.float(), [256], InterpolationMode.BICUBIC, antialias=True)
    theirs = functional.center_crop(resized, [224, 224]).clamp(0, 255) / 255
    assert (ours - theirs).abs().max() < 1e-3


def views(preprocess: Preprocess, images: torch.Tensor, seed: int, crop_scale: float) -> torch.Tensor:
    drawn = preprocess.sample_crops(len(images), images.shape[2:], crop_scale, torch.Generator().manual_seed(seed))
    return preprocess.train_views(images, drawn)


def test_flips_happen_half_of_the_time_unless_they_would_change_the_class():
    ramp = torch.arange(64, dtype=torch.uint8).expand(400, 3, 64, 64)
    mixed = views(Preprocess(16, **IDENTITY), ramp, 3, 0.5)
    flipped = (mixed[:, 0, 0, 0] > mixed[:, 0, 0, -1]).float().mean()
    assert 0.4 < flipped < 0.6
    upright = views(Preprocess(16, **IDENTITY, mirror=False), ramp, 3, 0.5)
    assert (upright[:, 0, 0, 0] < upright[:, 0, 0, -1]).all()


def test_augmentation_depends_only_on_the_generator():
    images = pictures(8, 40, 40)
    preprocess = Preprocess(24, **IDENTITY)
    first, again, other = (views(preprocess, images, seed, 0.3) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert np.isfinite(first.numpy()).all()
