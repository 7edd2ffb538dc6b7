# SPDX-License-Identifier: Apache-2.0
"""MOS against independent formulas: merging, Gaussians, alignment and retrieval."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from support.tiny import write_tiny_images
from torch.nn import functional as F

from onea.classifiers.alignment import align_classifier
from onea.errors import OneaError
from onea.research.methods.mos import MOS, Gaussians, separation_loss
from onea.vit.heads import GrowingHead


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mos(tiny_run, sizes="3,1,2", **options):
    return prepared(tiny_run, "mos", sizes=sizes, options=tiny_run["options"] | options)


def copied(state):
    return {name: value.clone() for name, value in state.items()}


def naive_scores(method: MOS, images):
    """The retrieval as described in the paper: one image at a time, with a separate pass for every feature."""
    task_of = [task for task, size in enumerate(method.sizes) for _ in range(size)]
    rows, paths = [], []
    for image in images:
        features = [method.features(image[None], snapshot)[0] for snapshot in method.snapshots]
        similar = torch.stack([F.cosine_similarity(features[0], p, dim=0) for p in method.prototypes])
        adapter, path = task_of[int(similar.argmax())], []
        for _ in range(method.options.refinements):
            path.append(adapter)
            logits = method.head.weight @ features[adapter] + method.head.bias
            predicted_task = task_of[int(logits.argmax())]
            if predicted_task == adapter:
                break
            adapter = predicted_task
        rows.append(logits.softmax(0) + (similar * len(method.sizes)).softmax(0))
        paths.append(path)
    return torch.stack(rows).detach(), paths


def randomise(method: MOS) -> None:
    """Random adapters and a random head, so that the retrieved adapter changes repeatedly."""
    random_generator = generator(5)
    for part in (*method.snapshots, method.head):
        for parameter in part.parameters():
            parameter.data = torch.randn(parameter.shape, generator=random_generator)


@pytest.mark.parametrize("refinements", [1, 2, 4])
def test_batched_retrieval_equals_a_loop_over_images(refinements, tiny_run):
    ready = mos(tiny_run, "1,2,1,1,1", refinements=refinements)
    method, images = learn_all(ready), shown_images(ready)
    randomise(method)
    expected, paths = naive_scores(method, images)
    num_passes = sum(len({0, *path}) for path in paths)
    batch_sizes = []
    hook = method.vit.vit.blocks[0].attn.qkv.register_forward_pre_hook(
        lambda _, inputs: batch_sizes.append(len(inputs[0]))
    )
    actual = method.scores(images)
    hook.remove()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    alone = torch.cat([method.scores(image[None]) for image in images])
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)
    assert sum(batch_sizes) == num_passes < len(images) * method.forward_passes(method.options, 5)
    if refinements == 4:
        assert max(len(set(path)) for path in paths) > 2, "the retrieved adapter changes repeatedly"
        assert any(len(set(path)) < len(path) for path in paths), "also back to an earlier one"


def test_scores_after_learning_equal_a_loop_over_images(tiny_run):
    ready = mos(tiny_run)
    method = learn_all(ready)
    torch.testing.assert_close(
        method.scores(shown_images(ready)), naive_scores(method, shown_images(ready))[0], rtol=1e-4, atol=1e-5
    )


def test_one_task_needs_one_pass(tiny_run):
    ready = mos(tiny_run, "6")
    method, images = learn_all(ready), shown_images(ready)
    batch_sizes = []
    method.vit.vit.blocks[0].attn.qkv.register_forward_pre_hook(lambda _, inputs: batch_sizes.append(len(inputs[0])))
    scores = method.scores(images)
    assert batch_sizes == [len(images)]
    features = method.features(images, method.snapshots[0])
    similar = F.cosine_similarity(features[:, None], method.prototypes[None], dim=2)
    torch.testing.assert_close(scores, method.head(features).softmax(1) + similar.softmax(1))


@pytest.mark.parametrize("mode", ["per-step", "official"])
def test_prediction_changes_no_parameters_and_snapshots_are_frozen(mode, tiny_run):
    ready = mos(tiny_run, mos_ema=mode)
    method = ready.method
    learn_all(ready, [0, 1])
    before = copied(method.state_dict())
    method.scores(shown_images(ready))
    assert all(torch.equal(before[name], value) for name, value in method.state_dict().items())
    learn_all(ready, [2])
    old = [name for name in before if name.startswith("snapshots.")]
    assert len(old) == 2 * 2 * 4
    assert all(torch.equal(before[name], method.state_dict()[name]) for name in old)
    assert torch.equal(before["gaussians.means"], method.state_dict()["gaussians.means"][:4])


def test_one_merge_moves_the_adapter_by_the_momentum(tiny_run):
    ready = mos(tiny_run)
    method = ready.method
    learn_all(ready, [0, 1])
    randomise(method)
    pairs = list(zip(*(module.parameters() for module in (method.working, *method.snapshots)), strict=True))
    before = [(parameter.detach().clone(), (first + second) / 2) for parameter, first, second in pairs]
    method._merge_towards(method.snapshots)()
    for (parameter, *_), (old, mean) in zip(pairs, before, strict=True):
        torch.testing.assert_close(parameter.detach() - mean, 0.9 * (old - mean), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "merges"), [("per-step", 1), ("official", 3)])
def test_number_of_merges_per_step(mode, merges, tiny_run):
    """Without learning, only the merge changes the adapter: once per step, plus once for each of the two blocks."""
    ready = mos(tiny_run, mos_ema=mode, learning_rate=0.0, batch_size=4, epochs=2)
    method = ready.method
    learn_all(ready, [0, 1])
    randomise(method)
    for parameter in method.working.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator(3))
    task = ready.task(2)
    steps = 2 * -(-len(task) // 4)
    start = [parameter.detach().clone() for parameter in method.working.parameters()]
    method.learn(task)
    parts = (*method.snapshots, method.working)
    for began, *values in zip(start, *(part.parameters() for part in parts), strict=True):
        first, second, ended, left = (value.detach() for value in values)
        mean_of_earlier = (first + second) / 2
        torch.testing.assert_close(
            ended - mean_of_earlier, 0.9 ** (merges * steps) * (began - mean_of_earlier), rtol=1e-3, atol=1e-5
        )
        # The official code also merges while it computes the Gaussians, which changes the start of the next task.
        further_factor = 0.9**2 if mode == "official" else 1.0
        torch.testing.assert_close(
            left - mean_of_earlier, further_factor * (ended - mean_of_earlier), rtol=1e-3, atol=1e-5
        )


def test_each_task_continues_from_the_previous_adapter(tiny_run):
    ready = mos(tiny_run, learning_rate=0.0)
    first, second, third = learn_all(ready).snapshots
    for a, b, c in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_alignment_changes_only_the_head_and_starts_with_the_second_task(tiny_run):
    plain, aligned = (mos(tiny_run, alignment_epochs=epochs) for epochs in (0, 2))
    reports = [(plain.method.learn(plain.task(i)), aligned.method.learn(aligned.task(i))) for i in (0, 1)]
    assert ["alignment_losses" in report for _, report in reports] == [False, True]
    for name, value in plain.method.state_dict().items():
        assert torch.equal(value, aligned.method.state_dict()[name]) != name.startswith("head."), name


def test_alignment_learns_to_separate_the_gaussians():
    means = 3 * torch.eye(4)
    gaussians = Gaussians(4)
    for position, mean in enumerate(means):
        features = mean + 0.3 * torch.randn(50, 4, generator=generator(position))
        gaussians.add(features, torch.full((50,), position), range(position, position + 1))
    head = GrowingHead(4)
    head.grow(4, generator())

    def align(rate):
        optimiser = torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
        sample = partial(gaussians.sample, 20, generator())
        return align_classifier(head, sample, optimiser=optimiser, epochs=10, batch_size=20, generator=generator())

    losses = align(0.1)
    assert losses[-1] < 0.1 < losses[0]
    assert head(means).argmax(1).tolist() == [0, 1, 2, 3]
    with pytest.raises(OneaError, match="alignment"):
        align(1e38)


def test_prototypes_use_the_first_adapter_and_gaussians_that_of_their_task(tiny_run):
    ready = mos(tiny_run, "2,2,2", learning_rate=0.5, scale=1.0, momentum=0.0)
    method = learn_all(ready)
    for index, snapshot in enumerate(method.snapshots):
        task = ready.task(index)
        images = task.images.test_views(task.rows)
        for adapters, stored in ((method.snapshots[0], method.prototypes), (snapshot, method.gaussians.means)):
            features = method.features(images, adapters)
            for position in task.classes:
                torch.testing.assert_close(stored[position], features[task.labels == position].mean(0))
    assert torch.equal(method.prototypes[:2], method.gaussians.means[:2])
    assert (method.prototypes[2:] - method.gaussians.means[2:]).abs().max() > 1e-2


def test_a_single_class_is_learned_despite_zero_cross_entropy(tiny_run):
    ready = mos(tiny_run, momentum=0.0, weight_decay=0.0, alignment_epochs=20, alignment_learning_rate=0.1)
    method = ready.method
    learn_all(ready, [0])
    report = method.learn(ready.task(1))
    assert min(report["losses"]) > 0, "the regulariser remains"
    first, second = (list(snapshot.parameters()) for snapshot in method.snapshots)
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert report["alignment_losses"][-1] < report["alignment_losses"][0]
    assert method.head(method.gaussians.means).argmax(1).tolist() == [0, 1, 2, 3]


def test_the_learning_rate_of_the_head_is_a_tenth(tiny_run, monkeypatch):
    import onea.research.methods.mos as module

    rates = []
    monkeypatch.setattr(
        module, "train", lambda groups, *_, **__: rates.append([group.lr_scale for group in groups]) or []
    )
    ready = mos(tiny_run)
    ready.method.learn(ready.task(0))
    assert rates == [[1.0, 0.1]]


def test_one_image_per_class(tiny_run, tmp_path):
    write_tiny_images(tmp_path, train=1)
    for covariance in ("full", "diagonal"):
        ready = mos(tiny_run | {"data": f"folder:{tmp_path}"}, "1,3,2", covariance=covariance)
        assert torch.isfinite(learn_all(ready).scores(shown_images(ready))).all()


@pytest.mark.parametrize(
    "switch",
    [
        {"momentum": 0.5},
        {"mos_ema": "official"},
        {"regulariser": 0.0},
        {"regulariser_temperature": 5.0},
        {"covariance": "diagonal"},
        {"alignment_learning_rate": 0.1},
        {"alignment_samples": 2},
        {"dropout": 0.0},
        {"scale": 0.5},
    ],
)
def test_every_option_changes_the_result(switch, tiny_run):
    plain, switched = (learn_all(mos(tiny_run, **values)).state_dict() for values in ({}, switch))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(plain.values(), switched.values(), strict=1))


def test_separation_equals_loops_over_rows():
    features, old = torch.randn(3, 5, generator=generator(1)), torch.randn(2, 5, generator=generator(2))
    rows = [*old, *features]
    terms = []
    for i, row in enumerate(rows):
        exponentials = torch.stack([torch.exp(row @ other / 0.8) for other in rows])
        terms.append(-torch.log(exponentials[i] / exponentials.sum()))
    torch.testing.assert_close(separation_loss(features, old), torch.stack(terms).mean())
    assert separation_loss(features[:1], old[:0]) == 0
    assert torch.isfinite(separation_loss(1e3 * features, 1e3 * old))


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


def test_published_adapter_has_the_published_size(tiny_run):
    ready = mos(tiny_run)
    rank, width, depth = 4, 64, 2
    assert sum(p.numel() for p in ready.method.working.parameters()) == depth * (2 * width * rank + rank + width)
    assert 12 * (2 * 768 * MOS.Options().rank + MOS.Options().rank + 768) == 304_320
    assert MOS.paper_presets["imagenet-a"]["covariance"] == "diagonal"


@pytest.mark.parametrize("option", [{"rank": 0}, {"momentum": 1.0}, {"regulariser_temperature": 0.0}])
def test_impossible_options_are_refused(option):
    with pytest.raises(OneaError, match=next(iter(option))):
        MOS.Options(**option)
