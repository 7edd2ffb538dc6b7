# SPDX-License-Identifier: Apache-2.0
"""Gaussians of classes, and the classifier that is retrained on features sampled from them."""

from __future__ import annotations

import pytest
import torch

from onea import schedules
from onea.errors import OneaError
from onea.research.methods.alignment import Gaussians, align_head
from onea.vit.heads import GrowingCosineHead, GrowingHead


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_alignment_learns_to_separate_the_gaussians():
    means = 3 * torch.eye(4)
    gaussians = Gaussians(4)
    for position, mean in enumerate(means):
        features = mean + 0.3 * torch.randn(50, 4, generator=generator(position))
        gaussians.add(features, torch.full((50,), position), range(position, position + 1))
    head = GrowingHead(4)
    head.grow(4, generator())
    settings = {"epochs": 10, "weight_decay": 5e-4, "batch_size": 20}
    losses = align_head(head, gaussians, learning_rate=0.1, generator=generator(), **settings)
    assert losses[-1] < 0.1 < losses[0]
    assert head(means).argmax(1).tolist() == [0, 1, 2, 3]
    with pytest.raises(OneaError, match="alignment"):
        align_head(head, gaussians, learning_rate=1e38, generator=generator(), **settings)


def test_gaussians_store_mean_and_covariance_with_jitter():
    features = torch.randn(30, 4, generator=generator(1)) @ torch.randn(4, 4, generator=generator(2))
    labels = torch.tensor([7] * 12 + [8] * 17 + [9])
    full, diagonal = Gaussians(4), Gaussians(4, "diagonal")
    for gaussians in (full, diagonal):
        gaussians.add(features, labels, range(7, 10))
        torch.testing.assert_close(gaussians.means[1], features[12:29].mean(0))
    for index, features_of_class in enumerate((features[:12], features[12:29])):
        expected = torch.cov(features_of_class.T) + 1e-4 * torch.eye(4)
        torch.testing.assert_close(full.factor_of(index) @ full.factor_of(index).T, expected)
        torch.testing.assert_close(diagonal.factor_of(index).square(), torch.diag(torch.diag(expected)))
    for gaussians in (full, diagonal):
        torch.testing.assert_close(gaussians.factor_of(2), 0.01 * torch.eye(4))
    assert full.factors.shape == (3, 10)


def test_gaussians_of_fewer_images_than_dimensions():
    features = 10 * torch.randn(3, 64, generator=generator(1))
    gaussians = Gaussians(64)
    gaussians.add(features, torch.zeros(3, dtype=torch.int64), range(1))
    factor = gaussians.factor_of(0)
    torch.testing.assert_close(factor @ factor.T, torch.cov(features.T) + 1e-4 * torch.eye(64), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_sampled_features_have_the_statistics_of_their_class(covariance):
    source = torch.randn(100, 3, generator=generator(1)) @ torch.tensor([[1.0, 2, 0], [0, 1, 3], [0, 0, 0.5]])
    gaussians = Gaussians(3, covariance)
    gaussians.add(torch.cat([source, source + 5]), torch.arange(2).repeat_interleave(100), range(2))
    features, labels = gaussians.sample(20_000, generator(4))
    assert labels.bincount().tolist() == [20_000, 20_000]
    expected = torch.cov(source.T) if covariance == "full" else torch.diag(source.var(0))
    for label in (0, 1):
        features_of_class = features[labels == label]
        torch.testing.assert_close(features_of_class.mean(0), source.mean(0) + 5 * label, rtol=0, atol=0.1)
        torch.testing.assert_close(torch.cov(features_of_class.T), expected, rtol=0.05, atol=0.15)
    again = Gaussians(3, covariance)
    again.load_state_dict(gaussians.state_dict())
    assert torch.equal(again.sample(5, generator(4))[0], gaussians.sample(5, generator(4))[0])


def test_gaussians_refuse_features_that_are_not_finite():
    with pytest.raises(OneaError, match="NaN"):
        Gaussians(2).add(torch.tensor([[0.0, float("nan")]]), torch.zeros(1, dtype=torch.int64), range(1))


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_single_image_borrows_the_mean_covariance_of_the_other_classes(covariance):
    features = torch.randn(30, 4, generator=generator(1)) @ torch.randn(4, 4, generator=generator(2))
    gaussians = Gaussians(4, covariance, jitter=1e-3, borrows=True)
    gaussians.add(features[:1], torch.tensor([0]), range(1))
    torch.testing.assert_close(gaussians.factor_of(0), 1e-3**0.5 * torch.eye(4))  # there is no other class
    gaussians = Gaussians(4, covariance, jitter=1e-3, borrows=True)
    gaussians.add(features[:10], torch.zeros(10, dtype=torch.int64), range(1))
    gaussians.add(features[10:], torch.tensor([1] + [2] * 18 + [3]), range(1, 4))
    known = torch.stack([torch.cov(features[:10].T), torch.cov(features[11:29].T)]).mean(0) + 1e-3 * torch.eye(4)
    expected = known if covariance == "full" else torch.diag(torch.diag(known))
    for single in (1, 3):
        torch.testing.assert_close(gaussians.factor_of(single) @ gaussians.factor_of(single).T, expected)
    torch.testing.assert_close(gaussians.means[[1, 3]], features[[10, 29]])


def test_scaled_means_share_the_covariances():
    gaussians = Gaussians(3)
    gaussians.add(torch.randn(8, 3, generator=generator(1)), torch.tensor([0, 1]).repeat(4), range(2))
    scaled = gaussians.scale_means(torch.tensor([0.5, 1.0]))
    (plain, _), (half, _) = (each.sample(6, generator(2)) for each in (gaussians, scaled))
    torch.testing.assert_close(plain[:6] - half[:6], (0.5 * gaussians.means[0]).expand(6, 3))
    assert torch.equal(plain[6:], half[6:])
    assert scaled.factors is gaussians.factors


def test_the_schedule_sets_the_rate_of_each_epoch(monkeypatch):
    rates, step = [], torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self, *a: rates.append(self.param_groups[0]["lr"]) or step(self, *a)
    )
    gaussians = Gaussians(3)
    gaussians.add(torch.randn(4, 3, generator=generator(1)), torch.tensor([0, 0, 1, 1]), range(2))
    settings = {"epochs": 4, "learning_rate": 0.5, "weight_decay": 0.0, "batch_size": 3, "generator": generator()}
    for schedule in (schedules.cosine, schedules.constant):
        head = GrowingHead(3)
        head.grow(2, generator())
        align_head(head, gaussians, schedule=schedule, **settings)
    expected = [0.5 * schedules.cosine(epoch, 4) for epoch in range(4)] + [0.5] * 4
    assert rates == pytest.approx([rate for rate in expected for _ in range(2)]), "one step for each class"


def test_a_cosine_head_grows_by_rows():
    head, more = GrowingCosineHead(5, 20.0), GrowingCosineHead(5, 20.0)
    head.grow(2, generator(1))
    more.grow(3, generator(2))
    old = head.weight.detach().clone()
    head.append(more)
    assert torch.equal(head.weight, torch.cat([old, more.weight]))
    features = torch.randn(4, 5, generator=generator(3))
    expected = 20 * torch.cosine_similarity(features[:, None], head.weight[None], dim=2)
    torch.testing.assert_close(head(features), expected)
    loaded = GrowingCosineHead(5, 20.0)
    loaded.load_state_dict(head.state_dict())
    assert torch.equal(loaded.weight, head.weight)
