# SPDX-License-Identifier: Apache-2.0
"""Statistics do not depend on how images are divided into updates; classifiers equal their formulas."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onea.classifiers import CLASSIFIERS, make_classifier
from onea.classifiers.loranpac import LoRanPAC
from onea.classifiers.ranpac import RandomFeatureSums, RanPAC
from onea.classifiers.samples import class_gaussians
from onea.classifiers.statistics import ClassStatistics, inverse_sqrt, shrunk_covariance
from onea.errors import OneaError

WIDTH, CLASSES = 6, 4
QUICK = {"ranpac": {"features": 40}, "loranpac": {"features": 90}, "sampled-head": {"samples": 100}}


def sample(
    seed: int, images: int = 80, width: int = WIDTH, classes: int = CLASSES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of classes with different means and covariances, and at least two images of each class."""
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(classes, width, generator=generator)
    spreads = torch.randn(classes, width, width, generator=generator) / width**0.5
    rows = torch.cat(
        [torch.arange(classes).repeat(2), torch.randint(classes, (images - 2 * classes,), generator=generator)]
    )
    noise = torch.randn(images, width, generator=generator)
    return means[rows] + (noise[:, None] @ spreads[rows])[:, 0], rows


def scatter_of(features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    deviations = torch.cat([features[rows == row] - features[rows == row].mean(0) for row in rows.unique()]).double()
    return deviations.T @ deviations


@pytest.fixture(params=sorted(CLASSIFIERS.builtin))
def classifier(request):
    return make_classifier(request.param, **QUICK.get(request.param, {}))


@given(seed=st.integers(0, 10**6), parts=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_statistics_do_not_depend_on_the_division_into_updates(seed, parts):
    features, rows = sample(seed)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    known = ClassStatistics.empty(WIDTH, directions=WIDTH)
    for chosen in order.chunk(parts):
        known = known.add(features[chosen], rows[chosen])
    assert torch.equal(known.counts, rows.bincount())
    torch.testing.assert_close(known.means, torch.stack([features[rows == row].mean(0) for row in range(CLASSES)]))
    torch.testing.assert_close(known.scatter, scatter_of(features, rows), rtol=1e-5, atol=1e-5)
    for row in range(CLASSES):  # nothing is truncated if all directions are kept
        factor = known.factors[row].double()
        torch.testing.assert_close(
            factor.T @ factor, scatter_of(features[rows == row], rows[rows == row]), rtol=1e-4, atol=1e-4
        )
    assert known.degrees_of_freedom == len(rows) - CLASSES


@given(seed=st.integers(0, 10**6), directions=st.integers(1, 5), parts=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_the_truncation_error_is_below_its_bound(seed, directions, parts):
    features, rows = sample(seed)
    known = ClassStatistics.empty(WIDTH, directions=directions)
    for chosen in torch.arange(len(rows)).chunk(parts):
        known = known.add(features[chosen], rows[chosen])
    for row in range(CLASSES):
        factor, whole = known.factors[row].double(), scatter_of(features[rows == row], rows[rows == row])
        lost = torch.linalg.matrix_norm(whole - factor.T @ factor, 2)
        assert lost <= known.cut[row] + 1e-4 * torch.linalg.matrix_norm(whole, 2)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_mapped_statistics_are_those_of_mapped_features(seed):
    features, rows = sample(seed)
    by = torch.eye(WIDTH, dtype=torch.float64) + 0.2 * torch.randn(
        WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    empty = ClassStatistics.empty(WIDTH, directions=WIDTH)
    mapped, expected = empty.add(features, rows).apply_drift_map(by), empty.add((features.double() @ by).float(), rows)
    torch.testing.assert_close(mapped.means, expected.means, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mapped.scatter, expected.scatter, rtol=1e-4, atol=1e-3)
    for mine, theirs in zip(mapped.factors.double(), expected.factors.double(), strict=True):
        torch.testing.assert_close(mine.T @ mine, theirs.T @ theirs, rtol=1e-3, atol=1e-3)


def test_concatenated_statistics_are_those_of_all_classes():
    features, rows = sample(1)
    empty, first = ClassStatistics.empty(WIDTH), rows < 2
    both = empty.add(features[first], rows[first]).concatenate(empty.add(features[~first], rows[~first] - 2))
    whole = empty.add(features, rows)
    torch.testing.assert_close(both.means, whole.means)
    torch.testing.assert_close(both.scatter, whole.scatter)
    assert (both.degrees_of_freedom, both.counts.tolist()) == (whole.degrees_of_freedom, whole.counts.tolist())


def test_removing_classes_keeps_the_pooled_scatter():
    known = ClassStatistics.empty(WIDTH, directions=2).add(*sample(2))
    fewer = known.select_classes(torch.tensor([0, 3]))
    assert torch.equal(fewer.means, known.means[[0, 3]])
    assert torch.equal(fewer.factors, known.factors[[0, 3]])
    assert torch.equal(fewer.scatter, known.scatter)
    assert fewer.degrees_of_freedom == known.degrees_of_freedom


def test_removing_all_classes_removes_the_scatter():
    empty = ClassStatistics.empty(WIDTH, directions=2)
    features, rows = sample(2)
    again = empty.add(features, rows).select_classes(torch.empty(0, dtype=torch.int64)).add(features, rows)
    assert again.degrees_of_freedom == empty.add(features, rows).degrees_of_freedom
    torch.testing.assert_close(again.scatter, empty.add(features, rows).scatter)


@given(seed=st.integers(0, 10**6), directions=st.sampled_from([0, WIDTH]))
@settings(max_examples=20, deadline=None)
def test_merged_classes_equal_a_single_class_from_the_start(seed, directions):
    features, rows = sample(seed)
    empty = ClassStatistics.empty(WIDTH, directions=directions)
    kept = torch.tensor([row for row in range(CLASSES) if row != 1])
    made = empty.add(features, rows).merge_classes(1, 3).select_classes(kept)
    taught = empty.add(features, rows.where(rows != 1, 3)).select_classes(kept)
    assert (made.counts.tolist(), made.degrees_of_freedom) == (taught.counts.tolist(), taught.degrees_of_freedom)
    torch.testing.assert_close(made.means, taught.means, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.scatter, taught.scatter, rtol=1e-4, atol=1e-4)
    if directions:
        for mine, theirs in zip(made.factors.double(), taught.factors.double(), strict=True):
            torch.testing.assert_close(mine.T @ mine, theirs.T @ theirs, rtol=1e-3, atol=1e-3)


def test_every_classifier_predicts_its_training_images(classifier):
    features, rows = sample(3, images=200)
    known = classifier.statistics(WIDTH).add(features, rows)
    scores = classifier.fit(known)(features)
    assert scores.shape == (len(rows), CLASSES)
    assert (scores.argmax(1) == rows).double().mean() > 0.9
    assert known.classes == CLASSES


def test_every_classifier_can_be_fitted_to_a_single_image_or_class(classifier):
    features, _ = sample(4)
    one = classifier.statistics(WIDTH).add(features[:1], torch.tensor([0]))
    assert classifier.fit(one)(features).isfinite().all()
    assert classifier.fit(one.add(features[1:9], torch.ones(8, dtype=torch.int64)))(features).shape == (
        len(features),
        2,
    )


def test_statistics_are_restored_from_their_state(classifier):
    known = classifier.statistics(WIDTH).add(*sample(5))
    back = classifier.statistics(WIDTH).from_state_dict(
        {name: value.clone() for name, value in known.state_dict().items()}
    )
    features, _ = sample(6)
    assert torch.equal(classifier.fit(back)(features), classifier.fit(known)(features))


def test_more_detailed_statistics_give_the_same_scores():
    """The classifiers of a run share statistics that are more detailed than some of them need."""
    features, rows = sample(7, images=300)
    rich = ClassStatistics.empty(WIDTH, directions=WIDTH).add(features, rows)
    for name in ("ncm", "slda", "whitened", "rgda"):
        classifier = make_classifier(name, **({"directions": 3} if name == "rgda" else {}))
        own = classifier.statistics(WIDTH).add(features, rows)
        torch.testing.assert_close(classifier.fit(rich)(features), classifier.fit(own)(features), rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_whitened_features_have_unit_covariance(seed):
    rng = np.random.default_rng(seed)
    turned = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    deviations = torch.from_numpy(rng.normal(size=(50_000, 5)) * np.array([4, 2, 1, 0.5, 0.5]) @ turned)
    white = deviations @ inverse_sqrt(*torch.linalg.eigh(shrunk_covariance(deviations.T @ deviations, len(deviations))))
    torch.testing.assert_close(white.T @ white / len(white), torch.eye(5).double(), atol=0.05, rtol=0)


def test_the_shrinkage_equals_scikit_learns():
    from sklearn.covariance import OAS

    deviations = np.random.default_rng(0).normal(size=(30, 12)) * np.linspace(0.2, 3, 12)
    reference = OAS(assume_centered=True).fit(deviations)
    ours = shrunk_covariance(torch.from_numpy(deviations.T @ deviations), 30).numpy()
    np.testing.assert_allclose(ours, reference.covariance_, rtol=2e-4, atol=1e-6)


def test_without_deviations_the_covariance_is_the_identity():
    assert torch.equal(shrunk_covariance(torch.zeros(3, 3, dtype=torch.float64), 0), torch.eye(3).double())


def test_lda_equals_scikit_learns():
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    features, rows = sample(8, images=400)
    known = ClassStatistics.empty(WIDTH).add(features, rows)
    covariance = shrunk_covariance(known.scatter, known.degrees_of_freedom).numpy()

    class FixedCovariance:
        def fit(self, X):
            self.covariance_ = covariance
            return self

    reference = LinearDiscriminantAnalysis(
        solver="lsqr", covariance_estimator=FixedCovariance(), priors=np.full(CLASSES, 0.25)
    )
    expected = reference.fit(features.numpy(), rows.numpy()).decision_function(features.numpy())
    found = WIDTH * make_classifier("slda").fit(known)(features).double().numpy()  # scores are per feature
    expected, found = (part - part.mean(1, keepdims=True) for part in (expected, found))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("prior", [10.0, 800.0])
def test_the_regularised_gaussian_is_a_likelihood(prior):
    """With all directions, the scores are log densities of normal distributions, up to a constant."""
    features, rows = sample(9, images=400)
    classifier = make_classifier("rgda", directions=WIDTH, prior_images=prior)
    known = classifier.statistics(WIDTH).add(features, rows)
    shared, expected = known.covariance(), []
    for row in range(CLASSES):
        own, count = features[rows == row].double(), int(known.counts[row])
        share = count / (count + prior)
        covariance = share * scatter_of(own, torch.zeros(len(own))) / (count - 1) + (1 - share) * shared
        expected.append(torch.distributions.MultivariateNormal(own.mean(0), covariance).log_prob(features.double()))
    expected = torch.stack(expected, 1)
    found = WIDTH * classifier.fit(known)(features).double()
    expected, found = (part - part.mean() for part in (expected, found))  # up to a constant
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


def lr_rgda(known, features, rank, alpha1=0.2, alpha2=2.0, alpha3=0.5):
    """The published formula: Woodbury's identity and the determinant lemma on each class's leading directions."""
    covariances = [gaussian.root.T @ gaussian.root for gaussian in class_gaussians(known)]
    base = alpha2 * torch.stack(covariances).mean(0) + alpha3 * torch.eye(known.width).double()
    inverse, scores = torch.linalg.inv(base), []
    for mean, covariance in zip(known.means.double(), covariances, strict=True):
        values, vectors = torch.linalg.eigh(covariance)
        low = vectors[:, -rank:] * (alpha1 * values[-rank:]).sqrt()
        inner = torch.eye(rank).double() + low.T @ inverse @ low
        projected = (features.double() - mean) @ inverse @ low
        correction = 0.5 * ((projected @ torch.linalg.inv(inner)) * projected).sum(1)
        constant = -0.5 * (mean @ inverse @ mean + torch.logdet(base) + torch.logdet(inner))
        scores.append(features.double() @ inverse @ mean + constant + correction)
    return torch.stack(scores, 1)


@pytest.mark.parametrize("rank", [1, 3, WIDTH])
def test_lr_rgda_equals_the_published_formula(rank):
    features, rows = sample(19, images=300)
    classifier = make_classifier("lr-rgda", rank=rank)
    known = classifier.statistics(WIDTH).add(features, rows)
    expected, found = lr_rgda(known, features, rank), WIDTH * classifier.fit(known)(features).double()
    expected, found = (part - part.mean(1, keepdim=True) for part in (expected, found))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


def test_lr_rgda_with_all_directions_is_a_likelihood():
    features, rows = sample(20, images=300)
    classifier = make_classifier("lr-rgda", rank=WIDTH)
    known = classifier.statistics(WIDTH).add(features, rows)
    covariances = [torch.cov(features[rows == row].double().T) for row in range(CLASSES)]
    base = 2.0 * sum(covariances) / CLASSES + 0.5 * torch.eye(WIDTH)
    expected = torch.stack(
        [
            torch.distributions.MultivariateNormal(mean, base + 0.2 * own).log_prob(features.double())
            for mean, own in zip(known.means.double(), covariances, strict=True)
        ],
        1,
    )
    found = WIDTH * classifier.fit(known)(features).double()
    expected, found = (part - part.mean() for part in (expected, found))  # up to a constant
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


def test_lr_rgda_without_covariances_of_classes_is_lda():
    features, rows = sample(21, images=300)
    classifier = make_classifier("lr-rgda", alpha1=0)
    known = classifier.statistics(WIDTH).add(features, rows)
    covariances = [torch.cov(features[rows == row].double().T) for row in range(CLASSES)]
    weight = torch.linalg.solve(2.0 * sum(covariances) / CLASSES + 0.5 * torch.eye(WIDTH), known.means.double().T)
    expected = features.double() @ weight - 0.5 * (known.means.double().T * weight).sum(0)
    found = WIDTH * classifier.fit(known)(features).double()
    expected, found = (part - part.mean(1, keepdim=True) for part in (expected, found))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_class_of_one_image_has_the_shared_covariance_in_lr_rgda():
    features, rows = sample(22, images=60)
    classifier = make_classifier("lr-rgda")
    without = classifier.statistics(WIDTH).add(features, rows)
    known = without.add(features[:1] + 1, torch.tensor([CLASSES]))
    torch.testing.assert_close(  # the others keep their differences
        classifier.fit(known)(features)[:, :CLASSES].diff(),
        classifier.fit(without)(features).diff(),
        rtol=1e-3,
        atol=1e-4,
    )


def test_ridge_is_joint_ridge_regression_with_columns_of_length_one():
    features, rows = sample(23, images=90)
    parts, known = torch.randperm(90, generator=torch.Generator().manual_seed(1)).chunk(4), ClassStatistics.empty(WIDTH)
    for part in parts:
        known = known.add(features[part], rows[part])
    exact, targets = features.double(), torch.nn.functional.one_hot(rows, CLASSES).double()
    weight = torch.linalg.solve(exact.T @ exact + 200 * torch.eye(WIDTH), exact.T @ targets)
    expected = exact @ (weight / weight.norm(dim=0))
    found = make_classifier("ridge").fit(known)(features).double()
    expected, found = (part - part.mean(1, keepdim=True) for part in (expected, found))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_ridge_of_infinite_strength_compares_with_normalised_means():
    features, rows = sample(24, images=90)
    known = ClassStatistics.empty(WIDTH).add(features, rows)
    found = make_classifier("ridge", strength=1e12).fit(known)(features)
    expected = features @ torch.nn.functional.normalize(known.means, dim=1).T
    torch.testing.assert_close(found.diff(), expected.diff(), rtol=1e-4, atol=1e-4)


def test_the_whitened_cosine_is_invariant_to_translation():
    features, rows = sample(10)
    classifier, shift = make_classifier("whitened"), 5.0
    here = classifier.fit(classifier.statistics(WIDTH).add(features, rows))(features)
    there = classifier.fit(classifier.statistics(WIDTH).add(features + shift, rows))(features + shift)
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)


def test_fecam_equals_the_published_formula():
    features, rows = sample(11, images=200)
    unit = torch.nn.functional.normalize(features, dim=1).double()
    expected = []
    for row in range(CLASSES):
        own = unit[rows == row]
        covariance = torch.cov(own.T)
        covariance = covariance + covariance.diagonal().mean() * torch.eye(WIDTH, dtype=torch.float64)
        deviation = covariance.diagonal().sqrt()
        deviations = unit - own.mean(0)
        expected.append(
            -((deviations @ torch.linalg.inv(covariance / torch.outer(deviation, deviation))) * deviations).sum(1)
        )
    classifier = make_classifier("fecam")
    found = classifier.fit(classifier.statistics(WIDTH).add(features, rows))(features)
    torch.testing.assert_close(found.double(), torch.stack(expected, 1), rtol=1e-3, atol=1e-5)


def test_ranpac_does_not_depend_on_the_order_of_tasks():
    features, rows = sample(12, images=120)
    classifier = RanPAC(features=30)
    tasks = [rows == row for row in range(CLASSES)]  # of one class each
    forward = backward = classifier.statistics(WIDTH)
    for task in tasks:
        forward = forward.add(features[task], rows[task])
    for task in reversed(tasks):
        backward = backward.add(features[task], rows[task])
    torch.testing.assert_close(forward.gram, backward.gram)
    torch.testing.assert_close(forward.hits, backward.hits)
    torch.testing.assert_close(
        classifier.fit(forward)(features), classifier.fit(backward)(features), rtol=1e-3, atol=1e-3
    )


def test_ranpac_also_holds_out_images_of_small_classes():
    features, rows = sample(15, images=60, classes=20)
    few = torch.cat([(rows == row).nonzero()[:3, 0] for row in range(20)])
    known = RanPAC(features=30).statistics(WIDTH).add(features[few], rows[few])
    assert known.counts[1].tolist() == [1] * 20


def test_statistics_of_normalised_features_are_not_mapped():
    """A linear map of features does not map normalised features linearly."""
    known = ClassStatistics.empty(WIDTH, directions=2, unit_length=True).add(*sample(16))
    assert known.apply_drift_map(2 * torch.eye(WIDTH, dtype=torch.float64)) is known


def test_ranpac_is_ridge_regression_on_random_features():
    features, rows = sample(13, images=200)
    classifier = RanPAC(features=20)
    known = classifier.statistics(WIDTH).add(features, rows)
    assert isinstance(known, RandomFeatureSums)
    random = torch.relu(features.double() @ known.projection.double())
    targets = torch.nn.functional.one_hot(rows, CLASSES).double()
    held_out = (
        torch.cat([((rows == row).cumsum(0) % 5 == 2) & (rows == row) for row in range(CLASSES)])
        .view(CLASSES, -1)
        .any(0)
    )

    def weights(strength: float, chosen: torch.Tensor) -> torch.Tensor:
        gram = random[chosen].T @ random[chosen] + strength * torch.eye(20, dtype=torch.float64)
        return torch.linalg.solve(gram, random[chosen].T @ targets[chosen])

    errors = {
        s: (random[held_out] @ weights(s, ~held_out) - targets[held_out]).square().sum()
        for s in (10.0**p for p in range(-2, 9))
    }
    best = min(errors, key=errors.get)
    expected = random @ weights(best, torch.ones_like(held_out))
    torch.testing.assert_close(classifier.fit(known)(features).double(), expected, rtol=1e-2, atol=1e-3)


def random_features(known, features):
    return torch.relu(features.double() @ known.projection.double())


@given(seed=st.integers(0, 10**6), parts=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_loranpac_without_truncation_is_least_squares_in_any_order(seed, parts):
    features, rows = sample(seed, images=60)
    classifier = LoRanPAC(features=200, kept=1)
    known = classifier.statistics(WIDTH)
    for part in torch.randperm(60, generator=torch.Generator().manual_seed(seed)).chunk(parts):
        known = known.add(features[part], rows[part])
    assert known.energy_kept == pytest.approx(1, abs=1e-4)
    random, targets = random_features(known, features), torch.nn.functional.one_hot(rows, CLASSES).double()
    asked = sample(seed + 1)[0]
    expected = random_features(known, asked) @ torch.linalg.lstsq(random, targets, driver="gelsd").solution
    torch.testing.assert_close(classifier.fit(known)(asked).double(), expected, rtol=2e-2, atol=2e-2)


def test_loranpac_is_the_limit_of_ranpac_without_a_ridge():
    features, rows = sample(3, images=60)
    classifier = LoRanPAC(features=200, kept=1)
    known = classifier.statistics(WIDTH).add(features, rows)
    random, targets = random_features(known, features), torch.nn.functional.one_hot(rows, CLASSES).double()
    weight = torch.linalg.solve(random.T @ random + 1e-6 * torch.eye(200).double(), random.T @ targets)
    asked = sample(4)[0]
    found = classifier.fit(known)(asked).double()
    torch.testing.assert_close(found, random_features(known, asked) @ weight, rtol=1e-2, atol=1e-2)


def test_loranpac_keeps_the_leading_singular_vectors():
    features, rows = sample(5, images=60)
    known = LoRanPAC(features=200, kept=0.5).statistics(WIDTH).add(features, rows)
    left, values, _ = torch.linalg.svd(random_features(known, features).T, full_matrices=False)
    torch.testing.assert_close(known.values.double(), values[:30], rtol=1e-4, atol=1e-4)
    own, expected = known.basis.double(), left[:, :30]
    torch.testing.assert_close(own @ own.T, expected @ expected.T, rtol=0, atol=1e-3)
    assert known.energy_kept == pytest.approx(float((values[:30] ** 2).sum() / (values**2).sum()), rel=1e-4)
    halves = LoRanPAC(features=200, kept=0.5).statistics(WIDTH)
    for part in torch.arange(60).chunk(3):  # which loses some of what a single block keeps
        halves = halves.add(features[part], rows[part])
    assert len(halves.values) == 30
    assert 0.9 < halves.energy_kept <= known.energy_kept


@pytest.mark.parametrize(("options", "rank"), [({"kept": 0.75}, 45), ({"max_rank": 7}, 7), ({"features": 20}, 15)])
def test_the_rank_of_loranpac_has_three_bounds(options, rank):
    features, rows = sample(6, images=60, width=40)
    known = LoRanPAC(**{"features": 200} | options).statistics(40).add(features, rows)
    assert known.values.shape == (rank,)
    assert known.basis.shape == (options.get("features", 200), rank)
    torch.testing.assert_close(known.basis.T @ known.basis, torch.eye(rank), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"), [("rgda", {"directions": 0}), ("slda", {"shrinkage": 2}), ("ranpac", {"features": 0})]
)
def test_options_out_of_range_are_refused(name, options):
    with pytest.raises(OneaError, match="must"):
        make_classifier(name, **options)


def test_an_unknown_classifier_is_refused():
    with pytest.raises(OneaError, match="Unknown classifier 'lda'"):
        make_classifier("lda")


def test_statistics_are_immutable():
    known = ClassStatistics.empty(WIDTH, directions=2)
    known.add(*sample(14))
    assert known.classes == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        known.degrees_of_freedom = 1


@pytest.mark.parametrize("directions", [0, 4])
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize(
    "spoil",
    [lambda value: value.double(), lambda value: value.long(), lambda value: value[:, 1:], lambda value: value[0]],
)
def test_statistics_of_another_type_or_shape_are_refused(spoil, scatter, directions):
    """They are read from a file, and would otherwise fail only when images are added."""
    empty = ClassStatistics.empty(WIDTH, scatter=scatter, directions=directions if scatter else 0)
    features, rows = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    state = empty.add(features, rows).state_dict()
    assert empty.from_state_dict(state).classes == 3
    with pytest.raises(ValueError, match="means of"):
        empty.from_state_dict(state | {"prototypes": spoil(state["prototypes"])})
    if scatter:
        with pytest.raises(ValueError, match="scatter of"):
            empty.from_state_dict(state | {"scatter": state["scatter"][1:]})
