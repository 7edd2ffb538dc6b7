# SPDX-License-Identifier: Apache-2.0
"""MoAL: averages of the adapter, recursive least squares, the affine map and rumination."""

from __future__ import annotations

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from support.tiny import write_tiny_images
from torch.nn import functional as F

from onea.classifiers.ranpac import RandomFeatureSums
from onea.errors import OneaError
from onea.research.methods.moal import AffineMap
from onea.vit.heads import GrowingCosineHead


def moal(tiny_run, sizes="3,1,2", **options):
    return prepared(tiny_run, "moal", sizes=sizes, options=tiny_run["options"] | options)


def weights_of(method) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in method.module.parameters()]


def recursive_least_squares(blocks, strength: float, size: int, classes: int) -> torch.Tensor:
    """As published: the inverse and the weights are updated block by block."""
    inverse, weight = torch.eye(size).double() / strength, torch.zeros(size, classes).double()
    for random, targets in blocks:
        gain = inverse @ random.T @ torch.linalg.inv(torch.eye(len(random)).double() + random @ inverse @ random.T)
        weight = weight + gain @ (targets - random @ weight)
        inverse = inverse - gain @ random @ inverse
    return weight


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_recursive_least_squares_of_any_batches_equal_the_sums(parts):
    generator = torch.Generator().manual_seed(2)
    features, labels = torch.randn(40, 6, generator=generator), torch.arange(40) % 3
    sums = RandomFeatureSums.empty(torch.randn(6, 12, generator=generator), 0)
    blocks = []
    for rows in torch.randperm(40, generator=generator).chunk(parts):
        sums = sums.add(features[rows], labels[rows])
        random = torch.relu(features[rows] @ sums.projection).double()
        blocks.append((random, F.one_hot(labels[rows], 3).double()))
    expected = recursive_least_squares(blocks, 0.1, 12, 3)
    torch.testing.assert_close(sums.ridge_weights(0.1), expected, rtol=1e-4, atol=1e-5)


def test_with_a_momentum_near_one_the_adapter_is_frozen_after_the_first_task(tiny_run):
    ready = moal(tiny_run, "3,3", momentum=1 - 1e-12)
    learn_all(ready, [0])
    first = weights_of(ready.method)
    learn_all(ready, [1])
    for before, after in zip(first, weights_of(ready.method), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-8)


def test_without_rumination_the_weights_are_those_of_joint_ridge_regression(tiny_run, monkeypatch):
    """With an adapter that stays; the targets of the first task count nine tenths, as published."""
    ready = moal(tiny_run, "3,1,2", momentum=1 - 1e-12, first_share=0.9)
    monkeypatch.setattr(type(ready.method), "_ruminate", lambda *_: 0)
    method = learn_all(ready)
    tasks = [ready.task(index) for index in range(3)]
    features = torch.cat([method.task_features(task, method.hooks()) for task in tasks])
    labels = torch.cat([task.labels for task in tasks])
    random = torch.relu(features @ method.sums.projection).double()
    targets = F.one_hot(labels, 6).double() * torch.where(labels < 3, 0.9, 1.0)[:, None]
    gram = random.T @ random + float(method.strength) * torch.eye(64)
    expected = torch.linalg.solve(gram, random.T @ targets)
    images = shown_images(ready)
    asked = torch.relu(method.features(images, method.hooks()) @ method.sums.projection).double()
    torch.testing.assert_close(method.scores(images).double(), asked @ expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("by", ["epoch", "step"])
def test_the_adapter_is_an_average_over_epochs_or_steps(by, tiny_run, monkeypatch):
    import onea.research.methods.moal as module

    ready = moal(tiny_run, "3,3", momentum=0.7, moal_ema=by)
    learn_all(ready, [0])
    before, seen = weights_of(ready.method), []
    train = module.train

    def watched(groups, loss, task, recipe, runtime, *, after_step, should_stop):
        def record():
            seen.append(weights_of(ready.method))

        def step():
            record()
            after_step()

        def end():
            record()
            return should_stop()

        return train(
            groups,
            loss,
            task,
            recipe,
            runtime,
            after_step=step if after_step else None,
            should_stop=end if should_stop else None,
        )

    monkeypatch.setattr(module, "train", watched)
    task = ready.task(1)
    ready.method.learn(task)
    assert len(seen) == (2 if by == "epoch" else 2 * -(-len(task) // 8))
    for position, ended in enumerate(weights_of(ready.method)):
        average = before[position]
        for trained in seen:
            average = 0.7 * average + 0.3 * trained[position]
        torch.testing.assert_close(ended, average, rtol=1e-4, atol=1e-6)


def test_the_ridge_is_selected_once_two_classes_are_known(tiny_run):
    ready = moal(tiny_run, "1,2,3")
    strengths = [ready.method.learn(ready.task(index))["strength"] for index in range(3)]
    assert strengths[0] == 0
    assert strengths[1] == strengths[2] > 0


def before_rumination(tiny_run):
    """The method, a second task, and its update, whose features were added to the sums."""
    ready = moal(tiny_run, "3,3")
    learn_all(ready, [0])
    method, task = ready.method, ready.task(1)
    method.head.append_rows(torch.ones(3, method.vit.width))
    update = method.update(task)
    method._set_sums(method.sums.add(update.features[0], task.labels))
    return method, task, update


def test_misclassified_features_of_old_classes_join_the_sums(tiny_run):
    method, task, update = before_rumination(tiny_run)
    gram, counts, means = method.sums.gram.sum(0), method.sums.counts.sum(0), method.prototypes
    expected, number = gram.clone(), 0
    for row in range(3):
        nearest = 3 + int(F.cosine_similarity(means[row][None], means[3:]).argmax())
        for feature in update.features[0][task.labels == nearest]:
            shifted = (feature + means[row] - means[nearest])[None]
            if int(method.regression()(shifted).argmax()) != row:
                random = torch.relu(shifted @ method.sums.projection)
                expected, number = expected + random.T @ random, number + 1
    assert method._ruminate(update.features[0], task.labels, range(3)) == number
    torch.testing.assert_close(method.sums.gram.sum(0), expected, rtol=1e-4, atol=1e-3)
    assert int(method.sums.counts.sum() - counts.sum()) == number


def test_without_misclassified_features_rumination_changes_nothing(tiny_run):
    method, task, update = before_rumination(tiny_run)
    before, regression = method.sums, method.regression()

    def always_correct(features):  # the old classes come one after the other
        return F.one_hot(torch.full((len(features),), next(rows)), 6)

    rows = iter(range(3))
    method._regression = always_correct
    assert method._ruminate(update.features[0], task.labels, range(3)) == 0
    assert torch.equal(method.sums.gram, before.gram)
    assert torch.equal(method.sums.hits, before.hits)
    torch.testing.assert_close(method.regression()(update.features[0]), regression(update.features[0]))


def test_the_sums_are_not_corrected_for_drift_but_the_means_are(tiny_run):
    ready = moal(tiny_run, "3,3", momentum=0.0, learning_rate=0.5, scale=1.0)
    learn_all(ready, [0])
    means, gram = ready.method.prototypes.clone(), ready.method.sums.gram.sum(0)
    learn_all(ready, [1])
    assert not torch.allclose(ready.method.prototypes[:3], means)
    assert (ready.method.sums.gram.sum(0) - gram).diagonal().min() >= -1e-3, "images are only added"


def test_the_affine_map_is_learned_with_its_bias():
    generator = torch.Generator().manual_seed(3)
    before = torch.randn(300, 5, generator=generator)
    matrix, shift = torch.eye(5) + 0.3 * torch.randn(5, 5, generator=generator), torch.arange(5.0)
    drift = AffineMap(epochs=60).fit(before, before @ matrix + shift)
    torch.testing.assert_close(drift.matrix, matrix, rtol=0, atol=0.05)
    torch.testing.assert_close(drift.shift, shift, rtol=0, atol=0.1)
    asked = torch.randn(3, 5, generator=generator)
    torch.testing.assert_close(drift.move_features(asked), asked @ drift.matrix + drift.shift)
    assert AffineMap(epochs=2).fit(before[:1], before[:1]).matrix.isfinite().all()
    with pytest.raises(OneaError, match="diverged; lower its learning rate"):
        AffineMap(epochs=5, learning_rate=1e30).fit(before, before)


def test_rows_of_the_head_are_kept_or_as_published_replaced(tiny_run):
    kept, official = (moal(tiny_run, "3,3", moal_head=choice).method for choice in ("kept", "official"))
    assert isinstance(kept.head, GrowingCosineHead)
    rows = {}
    for name, method, ready in (("kept", kept, moal(tiny_run, "3,3")), ("official", official, moal(tiny_run, "3,3"))):
        method.learn(ready.task(0))
        rows[name] = method.head.weight.detach().clone()
        method.learn(ready.task(1))
        assert method.head.weight.shape == (6, method.vit.width)
    assert not torch.allclose(rows["kept"], rows["official"]), "the official code discards what it has trained"
    norms = [method.head.weight.detach()[3:].norm(dim=1) for method in (kept, official)]
    assert norms[1].min() > 1e3 * norms[0].max(), "rows of zeros get a huge first gradient"


@pytest.mark.parametrize("policy", ["train", "skip"])
def test_a_task_of_one_class_biases_the_adapter_unless_it_is_skipped(policy, tiny_run):
    ready = moal(tiny_run, "3,1,2", single_class=policy, momentum=0.0)
    learn_all(ready, [0])
    before = weights_of(ready.method)
    report = ready.method.learn(ready.task(1))
    same = all(torch.equal(a, b) for a, b in zip(before, weights_of(ready.method), strict=True))
    assert same == (policy == "skip")
    assert report["trained"] == (policy == "train")
    assert ready.method.scores(shown_images(ready)).shape[1] == 4
    assert len(ready.method.head.weight) == 4


def test_uneven_streams_keep_finite_statistics(tiny_run, tmp_path):
    write_tiny_images(tmp_path, classes=48, train=2, test=1)
    (tmp_path / "train/class40/1.png").unlink()
    ready = moal(tiny_run | {"data": f"folder:{tmp_path}"}, "36,1,2,9")
    learned = learn_all(ready)
    assert all(value.isfinite().all() for value in learned.state_dict().values() if value.is_floating_point())
    assert learned.scores(shown_images(ready)).shape == (48, 48)


@pytest.mark.parametrize(
    "switch",
    [
        {"first_share": 0.5},
        {"momentum": 0.5},
        {"moal_ema": "step"},
        {"moal_head": "official"},
        {"map_epochs": 1},
        {"map_learning_rate": 0.001},
        {"single_class": "skip"},
        {"random_features": 20},
    ],
)
def test_every_option_changes_the_result(switch, tiny_run):
    plain, switched = (learn_all(moal(tiny_run, **values)).state_dict() for values in ({}, switch))
    assert any(
        a.shape != b.shape or not torch.equal(a, b) for a, b in zip(plain.values(), switched.values(), strict=True)
    )
