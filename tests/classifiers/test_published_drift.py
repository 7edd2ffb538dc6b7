# SPDX-License-Identifier: Apache-2.0
"""Published drift maps against their formulas, and what every map does to statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from onea.classifiers import make_classifier
from onea.classifiers.drift import LinearDrift, SampledDrift
from onea.classifiers.published_drift import DPCR, SLDC, AnchorAttention, HopDC, make_compensation
from onea.classifiers.samples import class_gaussians
from onea.classifiers.statistics import ClassStatistics
from onea.errors import OneaError
from onea.learner.merged_adapter import MergedAdapter
from onea.learner.update import LearnerState, NewImages, learn_update

WIDTH = 6
MAPS = ("ridge", "dpcr", "sldc", "hopdc")


def features(seed: int, count: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def rotation(seed: int, width: int = WIDTH) -> torch.Tensor:
    return torch.linalg.qr(features(seed, width, width))[0].double()


def statistics(seed: int = 0, directions: int = WIDTH, counts: tuple[int, ...] = (30, 1, 5)) -> ClassStatistics:
    """Classes of different sizes and covariances, among them one of a single image."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    spread = 1 + features(seed + 1, len(counts)).abs()
    return ClassStatistics.empty(WIDTH, scatter=directions >= 0, directions=max(directions, 0)).add(
        features(seed, len(labels)) * spread[labels] + 2 * labels[:, None], labels
    )


def covariances(known: ClassStatistics) -> list[torch.Tensor]:
    return [gaussian.root.T @ gaussian.root for gaussian in class_gaussians(known)]


def assert_same(actual: ClassStatistics, expected: ClassStatistics, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual.means, expected.means, rtol=1e-4, atol=atol)
    torch.testing.assert_close(actual.counts, expected.counts)
    if expected.scatter is not None:
        torch.testing.assert_close(actual.scatter, expected.scatter, rtol=1e-4, atol=10 * atol)
        for mine, theirs in zip(covariances(actual), covariances(expected), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=10 * atol)


# What every map has in common


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("directions", [-1, 0, 2, WIDTH])
def test_an_unchanged_network_leaves_every_statistic_as_it_was_bit_by_bit(name, directions):
    """Least squares towards zero, or samples of a class, would change statistics even then."""
    known, images = statistics(directions=directions), features(9, 4)
    adapters = [MergedAdapter({"weight": torch.tensor(float(number))}) for number in (0, 1)]
    result = learn_update(
        LearnerState(adapters[0], {"plain": known}, {"held_out": images[:, None]}),
        NewImages(torch.full((4,), 3), lambda view, adapter: images, torch.zeros(4, dtype=torch.bool)),
        lambda adapter: (adapters[1], {}),
        kind="plain",
        classifier=make_classifier("ncm"),
        compensation=make_compensation(name),
    )
    before, after = known.state_dict(), result.state_before_adding.statistics["plain"].state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(result.state.features["held_out"], images[:, None])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("directions", [-1, 0, 2, WIDTH])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_statistics_stay_finite_after_updates_of_any_size(name, directions, count):
    known = statistics(directions=directions)
    for update in range(4):
        old = features(update, count)
        known = make_compensation(name).fit(old, 2 * old + features(update + 7, count)).move_statistics(known)
    assert all(value.isfinite().all() for value in known.state_dict().values())
    if directions >= 0:
        assert torch.linalg.eigvalsh(known.scatter).min() > -1e-6 * known.scatter.norm()


@pytest.mark.parametrize("name", MAPS)
def test_statistics_of_normalised_features_do_not_move(name):
    known = ClassStatistics.empty(WIDTH, directions=2, unit_length=True).add(features(0, 9), torch.arange(9) % 3)
    drift = make_compensation(name).fit(features(1, 20), features(2, 20))
    assert drift.move_statistics(known) is known


@pytest.mark.parametrize("name", MAPS)
def test_features_of_any_shape_move_row_by_row(name):
    drift = make_compensation(name).fit(features(1, 20), features(2, 20))
    rows = features(3, 12).double()
    moved = drift.move_features(rows)
    assert moved.dtype == rows.dtype
    torch.testing.assert_close(drift.move_features(rows.reshape(3, 4, WIDTH)).flatten(0, 1), moved)
    assert not torch.allclose(moved, rows)


def test_a_wrong_option_is_refused():
    with pytest.raises(OneaError, match="neighbours is 0"):
        make_compensation("hopdc", neighbours=0)
    with pytest.raises(OneaError, match="Unknown option 'alpha'"):
        make_compensation("dpcr", alpha=1)
    with pytest.raises(OneaError, match="'alpha' is an option of a drift map, but there is none"):
        make_compensation("none", alpha=1)
    assert make_compensation("none") is None


# Samples of classes


@pytest.mark.parametrize("directions", [0, 2, WIDTH])
def test_samples_under_a_linear_map_give_the_statistics_under_this_map(directions):
    known, matrix = statistics(directions=directions), torch.eye(WIDTH) + 0.3 * features(5, WIDTH)
    sampled = SampledDrift(lambda rows: rows @ matrix, samples=50).move_statistics(known)
    expected = LinearDrift(matrix.double()).move_statistics(known)
    assert_same(sampled, expected)


@given(seed=st.integers(0, 10**6), share=st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_a_map_that_moves_nothing_changes_nothing(seed, share):
    known = statistics(seed)
    assert_same(SampledDrift(lambda rows: rows, 50, share).move_statistics(known), known)


@given(seed=st.integers(0, 10**6), directions=st.integers(0, WIDTH))
@settings(max_examples=20, deadline=None)
def test_the_gaussians_of_classes_have_the_pooled_covariance_on_average(seed, directions):
    known = statistics(seed, directions)
    pooled, freedom = known.scatter / known.degrees_of_freedom, (known.counts - 1).double()
    found = covariances(known)
    weighted = sum(weight * covariance for weight, covariance in zip(freedom, found, strict=True)) / freedom.sum()
    torch.testing.assert_close(weighted, pooled, rtol=1e-4, atol=1e-5)
    # The covariance of a single image is the pooled one.
    torch.testing.assert_close(found[1], pooled, rtol=1e-6, atol=1e-8)


def test_with_all_directions_the_gaussian_of_a_class_is_its_own():
    own = features(3, 30) * torch.arange(1, WIDTH + 1)
    known = ClassStatistics.empty(WIDTH, directions=WIDTH).add(own, torch.zeros(30, dtype=torch.int64))
    torch.testing.assert_close(covariances(known)[0], torch.cov(own.double().T), rtol=1e-4, atol=1e-4)


# SLDC


def test_sldc_is_the_identity_for_equal_features():
    old = features(0, 4000)
    found = SLDC(strength=1e-9).fit(old, old)
    torch.testing.assert_close(found.matrix, torch.eye(WIDTH).double(), atol=1e-6, rtol=0)


def test_sldc_blends_a_rotation_with_the_identity():
    old, turn, identity = features(0, 60), rotation(1), torch.eye(WIDTH).double()
    blend = math.exp(-60 / (10 * WIDTH))
    found = SLDC(strength=1e-9, alpha=10).fit(old.double(), old.double() @ turn)
    torch.testing.assert_close(found.matrix, (1 - blend) * turn + blend * identity, atol=1e-6, rtol=0)
    torch.testing.assert_close(SLDC(alpha=1e12).fit(old, features(2, 60)).matrix, identity, atol=1e-6, rtol=0)


def test_sldc_keeps_the_published_share_of_a_direction_without_images():
    old = torch.cat([features(0, 25, 39), torch.zeros(25, 1)], dim=1)
    found = SLDC().fit(old, old).matrix
    assert float(found[-1, -1]) == pytest.approx(math.exp(-25 / 40)) == pytest.approx(0.535, abs=1e-3)


def test_sldc_is_fitted_to_directions_and_applied_to_features():
    old = features(0, 50)
    lengths = features(1, 50).abs()[:, :1] + 0.1
    matrices = [SLDC().fit(scale * old, old @ rotation(2).float()).matrix for scale in (1, lengths)]
    torch.testing.assert_close(matrices[0], matrices[1], atol=1e-6, rtol=1e-6)
    known, drift = statistics(), LinearDrift(matrices[0])
    assert_same(SLDC().fit(old, old @ rotation(2).float()).move_statistics(known), drift.move_statistics(known))


def test_the_ridge_of_sldc_accumulates_where_asked():
    known, old = statistics(), features(0, 4000)
    plain = SLDC(strength=1e-9).fit(old, old).move_statistics(known)
    ridged = known
    for _ in range(3):
        ridged = SLDC(strength=1e-9, ridge=0.01).fit(old, old).move_statistics(ridged)
    identity = 0.03 * torch.eye(WIDTH).double()
    for before, after in zip(covariances(plain), covariances(ridged), strict=True):
        torch.testing.assert_close(after, before + identity, rtol=1e-4, atol=1e-5)


def test_the_nonlinear_map_of_sldc_learns_a_drift_and_scales_with_length():
    old = F.normalize(features(0, 400), dim=1)
    new = F.normalize(old @ (torch.eye(WIDTH) + 0.3 * features(1, WIDTH)), dim=1)
    drift, again = (SLDC(kind="nonlinear", steps=600, samples=40).fit(old, new) for _ in range(2))
    assert F.mse_loss(drift.move_features(old), new) < 0.3 * F.mse_loss(old, new)
    torch.testing.assert_close(drift.move_features(7 * old), 7 * drift.move_features(old))
    assert torch.equal(again.move_features(old), drift.move_features(old))


def test_the_nonlinear_map_of_sldc_starts_with_the_published_weights():
    old = features(0, 30)
    shares = SLDC(kind="nonlinear", steps=1).fit(old, old).move.shares()
    torch.testing.assert_close(shares, torch.tensor([0.576, 0.212, 0.212]), atol=2e-3, rtol=0)


def test_the_loss_on_the_weights_acts_only_if_it_is_back_propagated():
    old = features(0, 60)
    new = old.abs()  # not linear
    weak, official = (
        SLDC(kind="nonlinear", steps=300, weak_gradient=gradient).fit(old, new).move.shares()[2]
        for gradient in (True, False)
    )
    assert weak < official


# DPCR


def test_dpcr_is_least_squares():
    old, new = features(0, 50).double(), features(1, 50).double()
    expected = torch.linalg.lstsq(old, new).solution
    torch.testing.assert_close(DPCR().fit(old, new).matrix, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(DPCR().fit(old, old).matrix, torch.eye(WIDTH).double(), atol=1e-8, rtol=0)


def test_directions_without_images_are_kept_or_as_published_erased():
    old = torch.cat([features(0, 3, 4), torch.zeros(3, 2)], dim=1)
    keep, official = (DPCR(small_tasks=rule).fit(old, 2 * old).matrix for rule in ("keep", "official"))
    absent = torch.linalg.svd(old.double())[2][3:].T
    torch.testing.assert_close(absent.T @ keep, absent.T, atol=1e-8, rtol=0)
    torch.testing.assert_close(absent.T @ official, torch.zeros(3, WIDTH).double(), atol=1e-8, rtol=0)
    for matrix in (keep, official):
        torch.testing.assert_close(old.double() @ matrix, 2 * old.double(), atol=1e-6, rtol=1e-6)


def test_dpcr_projects_each_class_onto_the_span_of_its_old_features():
    labels = torch.tensor([0] * 3 + [1] * 20)
    images = features(0, 23)
    known = ClassStatistics.empty(WIDTH, directions=WIDTH).add(images, labels)
    old, new = features(1, 40).double(), features(2, 40).double()
    drift, plain = DPCR().fit(old, new), DPCR(rank_tolerance=0).fit(old, new)
    moved, unprojected = drift.move_statistics(known), plain.move_statistics(known)
    span = torch.linalg.svd(images[:3].double())[2][:3]
    expected = known.means[0].double() @ plain.matrix @ span.T @ span
    torch.testing.assert_close(moved.means[0].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(covariances(moved)[0], covariances(moved)[0] @ span.T @ span, rtol=1e-4, atol=1e-5)
    # More images than features span everything.
    torch.testing.assert_close(moved.means[1], unprojected.means[1], rtol=1e-4, atol=1e-5)
    assert_same(
        DPCR(rank_tolerance=0).fit(old, new).move_statistics(known), LinearDrift(plain.matrix).move_statistics(known)
    )


@pytest.mark.parametrize("directions", [0, 2])
def test_statistics_without_all_directions_of_a_class_are_not_projected(directions):
    """What is not known of single classes spans everything."""
    known = statistics(directions=directions, counts=(30, 3))
    old, new = features(1, 40), features(2, 40)
    projected, plain = (DPCR(rank_tolerance=share).fit(old, new).move_statistics(known) for share in (1e-6, 0))
    assert_same(projected, plain, atol=1e-4)


def test_means_alone_have_no_span_to_be_projected_onto():
    known = statistics(directions=-1)
    old, new = features(1, 40), features(2, 40)
    assert_same(
        DPCR().fit(old, new).move_statistics(known), DPCR(rank_tolerance=0).fit(old, new).move_statistics(known)
    )


# HopDC


def test_attention_equals_a_loop():
    old, new, asked = features(0, 12), features(1, 12), features(2, 5)
    attention = AnchorAttention(old, new, temperature=0.05, neighbours=4)
    for row, moved in zip(asked, attention.move(asked), strict=True):
        cosines = F.cosine_similarity(row[None], old, dim=1)
        nearest = cosines.argsort(descending=True)[:4]
        weights = (cosines[nearest] / 0.05).exp()
        expected = row + (weights[:, None] * (new - old)[nearest]).sum(0) / weights.sum()
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("directions", [-1, 2, WIDTH])
def test_without_drift_hopdc_changes_nothing_up_to_sampling(directions):
    known, old = statistics(directions=directions), features(3, 20)
    moved = HopDC(samples=100).fit(old, old).move_statistics(known)
    assert_same(moved, known)


@pytest.mark.parametrize("directions", [-1, 2, WIDTH])
def test_at_a_high_temperature_hopdc_moves_all_means_by_nine_tenths_of_the_mean_drift(directions):
    known, old, new = statistics(directions=directions), features(3, 20), features(4, 20)
    moved = HopDC(temperature=1e9, neighbours=20, samples=100).fit(old, new).move_statistics(known)
    expected = known.shift_means(0.9 * (new - old).mean(0).expand(3, -1))
    assert_same(moved, expected)


def test_classes_move_as_the_images_near_them():
    """Two groups of images drift in different directions; the mean of each class follows its own."""
    centres = torch.tensor([[9.0, 0, 0, 0, 0, 0], [0, 9.0, 0, 0, 0, 0]])
    shifts = torch.tensor([[0.0, 0, 3, 0, 0, 0], [0, 0, 0, 3, 0, 0]])
    labels = torch.arange(60) % 2
    old, images = centres[labels] + features(0, 60), centres[labels] + features(1, 60)
    known = ClassStatistics.empty(WIDTH, directions=WIDTH).add(old, labels)
    moved = HopDC().fit(images, images + shifts[labels]).move_statistics(known)
    torch.testing.assert_close(moved.means, known.means + 0.9 * shifts, atol=0.1, rtol=0)
