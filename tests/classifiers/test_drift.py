# SPDX-License-Identifier: Apache-2.0
"""Drift maps recover the drift that the new images show, and change nothing else."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import class_folders, tiny_model

from onea.classifiers.drift import fit_drift_map


def features(seed: int, count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 10**6), size=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_a_linear_drift_is_recovered(seed, size):
    drift = torch.eye(6) + size * features(seed + 1, 6, 6) / 3
    found = fit_drift_map(features(seed, 200, 6), features(seed, 200, 6) @ drift)
    torch.testing.assert_close(found.float(), drift, atol=5e-3, rtol=0)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_noise_hardly_changes_the_map(seed):
    """Changes that cannot be predicted from the old features hardly move prototypes."""
    old = features(seed, 60, 30)
    found = fit_drift_map(old, old + features(seed + 1, 60, 30))
    assert (found - torch.eye(30)).norm() < 0.25 * 30**0.5


def test_directions_without_features_do_not_change():
    old = torch.cat([features(0, 50, 3), torch.zeros(50, 3)], dim=1)
    found = fit_drift_map(old, 2 * old)
    torch.testing.assert_close(found[3:, 3:], torch.eye(3).double())
    assert max(found[:3, 3:].abs().max(), found[3:, :3].abs().max()) < 1e-12


def test_a_single_image_gives_the_identity():
    """When it is left out, nothing is left to predict it, so no map is better than the identity."""
    for seed in range(20):
        old = features(seed, 1, 6)
        assert torch.equal(fit_drift_map(old, old + features(seed + 1, 1, 6)), torch.eye(6).double())


def test_only_training_moves_old_prototypes(tiny_vit, tiny_images):
    files = class_folders(tiny_images / "train")
    teach = [("class00", "class01"), ("class02",), ("class03", "class04")]
    moved = []
    model = tiny_model(tiny_vit)
    for names in teach:
        before = model.snapshot().state.statistics.means.clone() if model.version else None
        model.learn([f for name in names for f in files[name]], [name for name in names for _ in files[name]])
        if before is not None:
            moved.append(not torch.equal(model.snapshot().state.statistics.means[: len(before)], before))
    assert moved == [False, True]
