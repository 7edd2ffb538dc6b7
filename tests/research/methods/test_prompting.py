# SPDX-License-Identifier: Apache-2.0
"""L2P, DualPrompt and CODA-Prompt against naive implementations, and properties of their states."""

from __future__ import annotations

import math

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from support.tiny import write_tiny_vit
from torch.nn import functional as F

from onea import seeds
from onea.errors import OneaError
from onea.learner.tasks import StreamPlan
from onea.research.methods.coda_prompt import (
    CODAOptions,
    CODAPrompt,
    Components,
    component_weights,
    orthonormalise_rows,
)
from onea.research.methods.dualprompt import DualPrompt, DualPromptOptions, _keys_and_values
from onea.research.methods.l2p import L2POptions
from onea.research.methods.presets import preset_options
from onea.research.methods.prompting import GrowingParameter, InputPrompts, PrefixPrompts, match_keys
from onea.runtime import make_runtime
from onea.vit.backbones import load_backbone
from onea.vit.heads import masked_cross_entropy

PROMPTING = ["l2p", "dualprompt", "coda-prompt"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clone(state: dict) -> dict:
    return {name: value.clone() for name, value in state.items()}


def with_options(values: dict, **options) -> dict:
    return values | {"options": values["options"] | options}


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory):
    path = tmp_path_factory.mktemp("two heads") / "vit.safetensors"
    write_tiny_vit(path, width=128, depth=3)
    return load_backbone(str(path))


# --- the hooks and the matching -------------------------------------------------------------------------------------


def naive_input_prompts(vit, image, prompts):
    """One image through timm's modules, with prompts after the class token that have its position embedding."""
    net = vit.vit
    patches = net.patch_embed(image[None])[0] + net.pos_embed[0, 1:]
    start = (net.cls_token[0] + net.pos_embed[0, :1]).reshape(1, -1)
    x = torch.cat([start, prompts + net.pos_embed[0, :1], patches])[None]
    for block in net.blocks:
        x = block(x)
    return net.norm(x)[0, 1 : 1 + len(prompts)].mean(0)


def naive_prefix_prompts(vit, image, by_block):
    """One image; every head and every query on its own."""
    net = vit.vit
    x = net._pos_embed(net.patch_embed(image[None]))[0]
    for number, block in enumerate(net.blocks):
        heads, size = block.attn.num_heads, block.attn.head_dim
        qkv = block.attn.qkv(block.norm1(x))
        q, k, v = qkv.split(heads * size, dim=1)
        if number in by_block:
            k, v = torch.cat([by_block[number][0], k]), torch.cat([by_block[number][1], v])
        columns = [slice(h * size, (h + 1) * size) for h in range(heads)]
        mixed = [(q[:, c] @ k[:, c].T / math.sqrt(size)).softmax(1) @ v[:, c] for c in columns]
        x = x + block.attn.proj(torch.cat(mixed, dim=1))
        x = x + block.mlp(block.norm2(x))
    return net.norm(x)[0]


def test_input_prompts_take_the_class_tokens_position_and_are_the_feature(two_heads):
    images, prompts = random(3, 3, 28, 28), random(3, 4, 128, seed=1)
    actual = two_heads(images, InputPrompts(two_heads, prompts))
    expected = torch.stack([naive_input_prompts(two_heads, i, p) for i, p in zip(images, prompts, strict=True)])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    shared = two_heads(images, InputPrompts(two_heads, prompts[:1]))
    torch.testing.assert_close(shared[0], expected[0], rtol=1e-4, atol=1e-5)


def test_prefix_prompts_equal_a_loop_over_heads(two_heads):
    images = random(3, 3, 28, 28)
    by_block = {0: (random(1, 2, 128, seed=1), random(1, 2, 128, seed=2)), 2: (random(3, 4, 128), random(3, 4, 128))}
    actual = two_heads(images, PrefixPrompts(2, by_block))
    expected = [
        naive_prefix_prompts(two_heads, image, {b: (k[i % len(k)], v[i % len(v)]) for b, (k, v) in by_block.items()})
        for i, image in enumerate(images)
    ]
    torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_no_prefix_differs_from_a_prefix_of_zeros(two_heads):
    images, zeros = random(2, 3, 28, 28), torch.zeros(1, 2, 128)
    plain = two_heads(images)
    assert torch.equal(two_heads(images, PrefixPrompts(2, {})), plain)
    assert not torch.allclose(two_heads(images, PrefixPrompts(2, {0: (zeros, zeros)})), plain, atol=1e-3)


def test_instance_matching_equals_a_loop():
    queries, keys = random(7, 16), random(9, 16, seed=1)
    indices, selected = match_keys(queries, keys, 5)
    for row, query in enumerate(queries):
        cosines = [float(F.cosine_similarity(query, key, dim=0)) for key in keys]
        best = sorted(range(9), key=lambda k: -cosines[k])[:5]
        assert indices[row].tolist() == best
        assert selected[row].tolist() == pytest.approx([cosines[k] for k in best], abs=1e-6)
    for sign in (1, -1):
        _, same = match_keys(queries[:1], sign * queries[:1].expand(5, -1), 5)
        assert float(same.sum()) == pytest.approx(sign * 5, abs=1e-5)


def test_batch_matching_counts_votes_and_depends_on_the_neighbours():
    keys = torch.eye(4)
    queries = torch.tensor([[3.0, 2, 0, 0], [0, 2, 3, 0], [0, 3, 2, 0], [0.1, 0, 0, 3]])
    # votes with two each: 0, 1 | 2, 1 | 1, 2 | 3, 0: key 1 has three, keys 0 and 2 two each, and 0 comes first
    indices, cosines = match_keys(queries, keys, 2, "batch")
    assert indices.tolist() == [[1, 0]] * 4
    torch.testing.assert_close(cosines, F.normalize(queries, dim=1)[:, [1, 0]])
    assert match_keys(queries[3:], keys, 2, "batch")[0].tolist() == [[0, 3]], "alone, the last query gets its own keys"


def test_old_rows_get_no_gradients_and_no_weight_decay():
    rows = GrowingParameter(3)
    rows.grow(random(2, 3))
    rows.grow(random(1, 3, seed=1))
    before = rows().detach().clone()
    optimiser = torch.optim.Adam(rows.parameters(), lr=0.1, weight_decay=0.5)
    rows().square().sum().backward()
    optimiser.step()
    assert len(rows) == 3
    assert not rows.old.requires_grad
    assert torch.equal(rows()[:2], before[:2])
    assert not torch.equal(rows()[2:], before[2:])
    again = GrowingParameter(3)
    again.load_rows(rows().detach())
    again.grow(random(1, 3))
    assert torch.equal(again()[:3], rows())
    assert len(again.new) == 1


# --- all three ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", PROMPTING)
def test_old_rows_of_the_head_stay_bit_identical_even_under_weight_decay(method, tiny_run):
    ready = prepared(with_options(tiny_run, weight_decay=0.1), method)
    learn_all(ready, [0, 1])
    old = clone(ready.method.state_dict())
    ready.method.learn(ready.task(2))
    new = ready.method.state_dict()
    assert torch.equal(new["head.weight"][:4], old["head.weight"])
    assert torch.equal(new["head.bias"][:4], old["head.bias"])
    assert new["learned"].tolist() == [1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("method", PROMPTING)
def test_rows_of_the_head_start_as_published(method, tiny_run):
    head = learn_all(prepared(with_options(tiny_run, learning_rate=0.0), method, sizes="6")).head
    if method == "coda-prompt":  # as nn.Linear: uniform within 1 / sqrt(width)
        assert 0.9 / 8 < float(head.weight.detach().abs().max()) <= 1 / 8
        assert float(head.bias.detach().abs().min()) > 0
    else:
        assert float(head.weight.detach().std()) == pytest.approx(0.02, rel=0.15)
        assert not head.bias.any()


@pytest.mark.parametrize("method", PROMPTING)
def test_training_lowers_the_loss(method, tiny_run):
    ready = prepared(with_options(tiny_run, epochs=12, learning_rate=0.02), method, sizes="6")
    losses = ready.method.learn(ready.task(0))["losses"]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("method", PROMPTING)
def test_the_row_of_a_single_class_stays_random(method, tiny_run):
    ready = prepared(with_options(tiny_run, weight_decay=0.0), method, sizes="3,1,2")
    ready.method.learn(ready.task(0))
    before = clone(ready.method.state_dict())
    report = ready.method.learn(ready.task(1))
    after = ready.method.state_dict()
    rows = type(ready.method.head)(ready.method.vit.width, ready.method.new_rows)
    rows.grow(1, seeds.generator(ready.seed, 1, "head"))
    assert torch.equal(after["head.weight"][3:], rows.weight)
    assert torch.equal(after["head.bias"][3:], rows.bias)
    assert report["trained"]
    changed = {
        n for n, old in before.items() if n.startswith("prompts.") and not torch.equal(after[n][: len(old)], old)
    }
    assert changed == ({"prompts.keys"} if method == "l2p" else set())


@pytest.mark.parametrize("sizes", ["1,3,2", "3,1,2"])
@pytest.mark.parametrize("method", PROMPTING)
def test_a_skipped_task_adds_only_a_row_of_the_head(method, sizes, tiny_run):
    ready = prepared(with_options(tiny_run, single_class_policy="skip"), method, sizes=sizes)
    shapes = []
    for index, size in enumerate(map(int, sizes.split(","))):
        before = clone(ready.method.state_dict())
        report = ready.method.learn(ready.task(index))
        after = ready.method.state_dict()
        assert report["trained"] == (size > 1)
        assert ready.method.scores(shown_images(ready)).isfinite().all()
        if size == 1:
            assert "losses" not in report
            kept = [n for n in before if n.startswith("prompts.") and (index or n != "prompts.general")]
            first = index == 0 and method == "l2p"  # the pool is initialised in the first task of any kind
            assert first or all(torch.equal(before[n], after[n]) for n in kept)
        shapes.append(len(after["head.weight"]))
    assert shapes[-1] == 6


@pytest.mark.parametrize("method", PROMPTING)
def test_prototype_rows_are_mean_features_with_the_norm_of_trained_rows(method, tiny_run):
    ready = prepared(with_options(tiny_run, single_class_policy="prototype-row"), method, sizes="1,3,1,1")
    for index in range(4):
        ready.method.learn(ready.task(index))
        weight, bias = ready.method.head.weight.detach(), ready.method.head.bias.detach()
        if index == 0:
            assert float(weight[0].norm()) == pytest.approx(1, abs=1e-5)
        if index == 2:
            task = ready.task(2)
            mean = ready.method.prompted(task.images.test_views(task.rows)).mean(0)
            torch.testing.assert_close(F.normalize(weight[4], dim=0), F.normalize(mean, dim=0), atol=1e-5, rtol=1e-4)
    norms, trained = weight.norm(dim=1), [1, 2, 3]
    expected = float(norms[trained].mean())
    assert norms[[0, 4, 5]].tolist() == pytest.approx([expected] * 3, rel=1e-5)
    assert bias[[0, 4, 5]].tolist() == [0, 0, 0]
    assert ready.method.state_dict()["learned"].tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("method", PROMPTING)
def test_one_epoch_and_a_last_batch_of_one(method, tiny_run):
    ready = prepared(with_options(tiny_run, epochs=1, batch_size=17), method)  # 18 images: 17 and 1
    report = ready.method.learn(ready.task(0))
    assert len(report["losses"]) == 1
    assert math.isfinite(report["losses"][0])


# --- each method's second task, repeated by a plain loop with the full head masked by minus infinity -----------------


def naive_task(ready, task, head, parameters, extra_loss, features, rates):
    """The training of one task with a head over all six classes (weight, bias); returns the mean loss per epoch."""
    options = ready.method.options
    optimiser = torch.optim.Adam([*head, *parameters], lr=options.learning_rate, weight_decay=0)
    order, crops = (seeds.generator(task.seed, task.index, name) for name in ("order", "crops"))
    outside = torch.ones(6, dtype=torch.bool)
    outside[task.classes.start : task.classes.stop] = False
    means = []
    for rate in rates:
        values = []
        optimiser.param_groups[0]["lr"] = options.learning_rate * rate
        for images, labels in task.train_batches(options.batch_size, options.crop_scale, order, crops):
            queries = ready.method.vit(images)
            logits = torch.stack([features(i, q) for i, q in zip(images, queries, strict=True)]) @ head[0].T + head[1]
            loss = F.cross_entropy(logits.masked_fill(outside, -math.inf), labels) + extra_loss(queries)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            values.append(float(loss.detach()))
        means.append(sum(values) / len(values))
    return pytest.approx(means, rel=1e-3, abs=1e-4)


def second_task(values, method, **options):
    """A method before and after its second task, and a full head as it was before (with the new rows)."""
    ready = prepared(with_options(values, weight_decay=0.0, learning_rate=0.01, **options), method, sizes="2,3,1")
    ready.method.learn(ready.task(0))
    before = clone(ready.method.state_dict())
    losses = ready.method.learn(ready.task(1))["losses"]
    rows = type(ready.method.head)(ready.method.vit.width, ready.method.new_rows)
    rows.grow(3, seeds.generator(ready.seed, 1, "head"))
    weight = torch.cat([before["head.weight"], rows.weight.detach(), torch.ones(1, 64)]).requires_grad_()
    bias = torch.cat([before["head.bias"], rows.bias.detach(), torch.ones(1)]).requires_grad_()
    return ready, before, ready.method.state_dict() | {"losses": losses}, (weight, bias)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-4)


def test_l2p_equals_a_naive_loop(tiny_run):
    ready, before, after, head = second_task(tiny_run, "l2p", top_k=2, prompt_length=3)
    prompts, keys = (before[f"prompts.{name}"].requires_grad_() for name in ("prompts", "keys"))

    def nearest(query):
        cosines = F.cosine_similarity(query[None], keys, dim=1)
        return cosines, cosines.argsort(descending=True)[:2]

    def features(image, query):
        _, chosen = nearest(query)
        return naive_input_prompts(ready.method.vit, image, torch.cat([prompts[int(k)] for k in chosen]))

    def extra_loss(queries):
        chosen = (nearest(query) for query in queries)
        return -0.1 * sum(cosines[best].sum() for cosines, best in chosen) / len(queries)

    assert after["losses"] == naive_task(ready, ready.task(1), head, [prompts, keys], extra_loss, features, [1, 1])
    assert_same(after["prompts.prompts"], prompts.detach())
    assert_same(after["prompts.keys"], keys.detach())
    assert_same(after["head.weight"], head[0].detach()[:5])
    assert_same(after["head.bias"], head[1].detach()[:5])


def test_dualprompt_equals_a_naive_loop(tiny_run):
    ready, before, after, head = second_task(tiny_run, "dualprompt")
    general = before["prompts.general"].requires_grad_()
    expert = before["prompts.experts"][0].clone().requires_grad_()  # the second slot starts from the trained first one
    generator = seeds.generator(ready.seed, 1, "expert prompt")
    torch.empty(1, *expert.shape).uniform_(-1, 1, generator=generator)
    key = torch.empty(64).uniform_(-1, 1, generator=generator).requires_grad_()

    def features(image, query):
        by_block = {0: (general[0, 0], general[0, 1]), 1: (expert[0, 0], expert[0, 1])}
        return naive_prefix_prompts(ready.method.vit, image, by_block)

    def extra_loss(queries):
        return -0.1 * F.cosine_similarity(queries, key[None], dim=1).mean()

    assert after["losses"] == naive_task(
        ready, ready.task(1), head, [general, expert, key], extra_loss, features, [1, 1]
    )
    assert_same(after["prompts.general"], general.detach())
    assert_same(after["prompts.experts"][1], expert.detach())
    assert_same(after["prompts.keys"][1], key.detach())
    assert_same(after["head.weight"], head[0].detach()[:5])


@pytest.mark.parametrize("orthogonality", [0.0, 0.5])
def test_coda_prompt_equals_a_naive_loop(orthogonality, tiny_run):
    ready, before, after, head = second_task(
        tiny_run, "coda-prompt", epochs=3, orthogonality=orthogonality, schedule="late-cosine"
    )
    generator = seeds.generator(ready.seed, 1, "components")
    kinds = ("prompts", "keys", "attention")
    old = {name: before[f"prompts.{name}"] for name in kinds}
    new = {}
    for name in kinds:
        fresh = torch.randn(4, *old[name].shape[1:], generator=generator)
        for block in range(2):
            fresh[:, block] = gram_schmidt(old[name][:, block].flatten(1), fresh[:, block].flatten(1)).reshape(
                fresh[:, block].shape
            )
        new[name] = fresh.requires_grad_()

    def features(image, query):
        by_block = {}
        for block in range(2):
            prompt = torch.zeros(8, 64)
            for source in (old, new):
                for p, k, a in zip(*(source[name][:, block] for name in kinds), strict=True):
                    prompt = prompt + F.cosine_similarity(query * a, k, dim=0) * p
            by_block[block] = (prompt[:4], prompt[4:])
        return naive_prefix_prompts(ready.method.vit, image, by_block)

    def extra_loss(queries):
        total = torch.zeros(())
        for name in kinds:
            for block in range(2):
                rows = torch.cat([old[name], new[name]])[:, block].flatten(1)
                total = total + (rows @ rows.T - torch.eye(8)).square().mean()
        return orthogonality * total

    rates = [1, 1, math.cos(99 * math.pi / 400)]
    assert after["losses"] == naive_task(ready, ready.task(1), head, list(new.values()), extra_loss, features, rates)
    for name in kinds:
        assert torch.equal(after[f"prompts.{name}"][:4], old[name])
        assert_same(after[f"prompts.{name}"][4:], new[name].detach())
    assert_same(after["head.weight"], head[0].detach()[:5])


def test_cross_entropy_of_the_rows_of_a_task_equals_masked_cross_entropy():
    features, weight, labels = random(5, 8), random(7, 8, seed=1), torch.tensor([2, 3, 4, 2, 3])
    alone = F.cross_entropy(features @ weight[2:5].T, labels - 2)
    assert torch.equal(masked_cross_entropy(features @ weight.T, labels, range(2, 5)), alone)


# --- L2P ------------------------------------------------------------------------------------------------------------


def test_l2p_prompts_that_are_never_selected_do_not_change(tiny_run):
    ready = prepared(with_options(tiny_run, weight_decay=0.0, top_k=1, pool=6), "l2p")
    method = ready.method
    chosen = set()
    plain = method.prompts_for_training

    def record_selection(queries):
        chosen.update(method._match(queries)[0].flatten().tolist())
        return plain(queries)

    method.prompts_for_training = record_selection
    learn_all(ready, [0])
    untrained = prepared(with_options(tiny_run, pool=6), "l2p").method
    untrained.initialise(ready.task(0))
    pool, initial = method.prompts, untrained.prompts
    assert 0.9 < float(initial.keys.detach().abs().max()) <= 1
    assert 0 < len(chosen) < 6
    for prompt in range(6):
        assert torch.equal(pool.prompts[prompt], initial.prompts[prompt]) == (prompt not in chosen)
        assert torch.equal(pool.keys[prompt], initial.keys[prompt]) == (prompt not in chosen)


def test_l2p_batch_selection_depends_on_the_batch(tiny_run):
    ready = prepared(with_options(tiny_run, prompt_selection="batch", top_k=1), "l2p")
    learn_all(ready)
    with torch.no_grad():  # two keys that split the test images
        queries = ready.method.features(shown_images(ready))
        ready.method.prompts.keys.copy_(-queries.mean(0) + 0.1 * random(*ready.method.prompts.keys.shape))
        ready.method.prompts.keys[0], ready.method.prompts.keys[1] = queries[0], queries[-1]
    images = shown_images(ready)
    ends = images[[0, -1]]
    together, alone = ready.method.scores(ends), torch.cat([ready.method.scores(one[None]) for one in ends])
    assert torch.allclose(together[0], alone[0], atol=1e-5)
    assert not torch.allclose(together[1], alone[1], atol=1e-3)


def test_l2p_options_are_checked():
    with pytest.raises(OneaError, match="top_k is 11; it must not exceed pool 10"):
        L2POptions(top_k=11)
    with pytest.raises(OneaError, match="prompt_length is 0"):
        L2POptions(prompt_length=0)
    with pytest.raises(OneaError, match="pull is -1"):
        L2POptions(pull=-1)


# --- DualPrompt -----------------------------------------------------------------------------------------------------


def test_dualprompt_trains_only_the_newest_expert_which_starts_as_a_copy(tiny_run):
    ready = prepared(with_options(tiny_run, weight_decay=0.1), "dualprompt", sizes="2,2,2")
    learn_all(ready, [0, 1])
    old = clone(ready.method.state_dict())
    ready.method.learn(ready.task(2))
    new = ready.method.state_dict()
    for name in ("prompts.experts", "prompts.keys"):
        assert torch.equal(new[name][:2], old[name])
        assert len(new[name]) == 3
    assert not torch.equal(new["prompts.general"], old["prompts.general"])
    untrained_run = prepared(with_options(tiny_run, learning_rate=0.0), "dualprompt", sizes="2,2,2")
    experts, keys = (learn_all(untrained_run).state_dict()[f"prompts.{name}"] for name in ("experts", "keys"))
    assert torch.equal(experts[0], experts[2])
    assert len(keys.unique(dim=0)) == 3


def test_dualprompt_trains_only_the_key_for_a_single_class(tiny_run):
    values = with_options(tiny_run, weight_decay=0.0)
    ready = prepared(values, "dualprompt", sizes="1,1,1,1,1,1")
    state = learn_all(ready).state_dict()
    generator = seeds.generator(ready.seed, 0, "general prompt")
    assert len(state["prompts.keys"]) == 6
    assert torch.equal(state["prompts.general"], torch.empty(1, 2, 5, 64).uniform_(-1, 1, generator=generator))
    assert len(state["prompts.experts"].unique(dim=0)) == 1
    generator = seeds.generator(ready.seed, 3, "expert prompt")
    torch.empty(1, 1, 2, 5, 64).uniform_(-1, 1, generator=generator)
    assert not torch.equal(state["prompts.keys"][3], torch.empty(64).uniform_(-1, 1, generator=generator))


def test_dualprompt_key_approaches_the_mean_direction_of_its_tasks_queries(tiny_run):
    values = with_options(tiny_run, epochs=30, weight_decay=0.0, crop_scale=1.0)
    ready = prepared(values, "dualprompt", sizes="3,3")
    learn_all(ready)
    for index in range(2):
        task = ready.task(index)
        queries = ready.method.features(task.images.test_views(task.rows))
        mean = F.normalize(queries, dim=1).mean(0)  # the optimum for a single key
        assert float(F.cosine_similarity(mean, ready.method.prompts.keys().detach()[index], dim=0)) > 0.9


@pytest.mark.parametrize(("batch", "expected"), [(4, ["kk", "kk", "vv", "vv"]), (5, ["kk", "kk", "kv", "vv", "vv"])])
def test_the_official_layout_mixes_up_keys_and_values(batch, expected):
    slot = torch.stack([torch.zeros(3, 8), torch.ones(3, 8)])  # keys are zeros, values are ones
    whole = slot.expand(batch, -1, -1, -1)
    letters = "kv"
    keys, values = _keys_and_values(whole, "official")
    assert [letters[int(k[0, 0])] + letters[int(v[0, 0])] for k, v in zip(keys, values, strict=True)] == expected
    keys, values = _keys_and_values(whole, "correct")
    assert not keys.any()
    assert values.all()


def test_the_official_layout_mixes_up_prompts_between_images():
    own = torch.arange(4.0)[:, None, None, None].expand(-1, 2, 3, 8)
    keys, values = _keys_and_values(own, "official")
    assert keys[:, 0, 0].tolist() == [0, 2, 0, 2]
    assert values[:, 0, 0].tolist() == [1, 3, 1, 3]
    assert _keys_and_values(own, "correct")[0][:, 0, 0].tolist() == [0, 1, 2, 3]


def test_the_cosine_schedule_ends_short_trainings_at_a_low_rate(tiny_run):
    rates = {}
    for schedule in ("late-cosine", "cosine"):
        ready = prepared(with_options(tiny_run, schedule=schedule, epochs=5), "coda-prompt")
        recipe = ready.method.recipe(ready.task(0))
        rates[schedule] = [recipe.schedule(epoch, 5) for epoch in range(5)]
    assert rates["late-cosine"][-1] == pytest.approx(0.39, abs=0.01)
    assert rates["cosine"][-1] < 0.1


def test_the_options_of_dualprompt_change_the_result(tiny_run):
    plain = learn_all(prepared(tiny_run, "dualprompt"))
    official = prepared(with_options(tiny_run, eprompt_layout="official"), "dualprompt")
    assert not torch.equal(learn_all(official).state_dict()["prompts.general"], plain.state_dict()["prompts.general"])
    images = shown_images(official)
    alone = torch.cat([official.method.scores(one[None]) for one in images])
    assert not torch.allclose(official.method.scores(images), alone, atol=1e-3)
    batch = prepared(with_options(tiny_run, prompt_selection="batch"), "dualprompt")
    batch.method.load_state_dict(clone(plain.state_dict()))
    whole = batch.method.scores(images)
    votes = match_keys(plain.features(images), plain.prompts.keys(), 1)[0][:, 0]
    same = votes == votes.mode().values
    torch.testing.assert_close(whole[same], plain.scores(images)[same], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("depth", "general", "expert"), [(1, [], [0]), (2, [0], [1]), (4, [0, 1], [2, 3]), (6, [0, 1], [2, 3, 4])]
)
def test_dualprompt_blocks_of_shallow_networks(depth, general, expert, tmp_path):
    write_tiny_vit(tmp_path / "vit.safetensors", depth=depth)
    method = DualPrompt(load_backbone(str(tmp_path / "vit.safetensors")), DualPromptOptions(), make_runtime("cpu"))
    assert list(method.g_blocks) == general
    assert list(method.e_blocks) == expert


# --- CODA-Prompt ----------------------------------------------------------------------------------------------------


def gram_schmidt(old, fresh):
    """One row after the other, against an orthonormal basis of the old rows, in float64."""
    basis = []
    for row in [*old.double(), *fresh.double()]:
        for _ in range(2):
            for known in basis:
                row = row - (row @ known) * known
        basis.append(row / row.norm())
    return torch.stack(basis[len(old) :]).float()


def test_new_components_are_what_gram_schmidt_gives():
    old, fresh = random(4, 20), random(3, 20, seed=1)
    actual = orthonormalise_rows(old, fresh)
    torch.testing.assert_close(actual, gram_schmidt(old, fresh), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(actual @ actual.T, torch.eye(3), rtol=0, atol=1e-6)
    assert float((actual @ old.T).abs().max()) < 1e-5
    assert orthonormalise_rows(old[:0], fresh).shape == (3, 20)


def test_component_weights_equal_a_loop_and_ignore_scales():
    queries, attention, keys = random(4, 16), random(6, 16, seed=1), random(6, 16, seed=2)
    actual = component_weights(queries, attention, keys)
    for b, query in enumerate(queries):
        for k in range(6):
            expected = F.cosine_similarity(query * attention[k], keys[k], dim=0)
            torch.testing.assert_close(actual[b, k], expected)
    assert (actual < 0).any()
    torch.testing.assert_close(component_weights(3 * queries, attention, 5 * keys), actual)
    assert component_weights(torch.zeros(1, 16), attention, keys).tolist() == [[0] * 6]


def test_components_start_orthonormal_and_are_frozen_after_their_task(tiny_run):
    untrained_run = prepared(with_options(tiny_run, learning_rate=0.0), "coda-prompt")
    untrained_run.method.learn(untrained_run.task(0))
    assert float(untrained_run.method.prompts.penalty().detach()) < 1e-10
    for part in untrained_run.method.prompts.parts():
        for block in range(2):
            rows = part().detach()[:, block].flatten(1)
            torch.testing.assert_close(rows @ rows.T, torch.eye(4), rtol=0, atol=1e-6)
    ready = prepared(with_options(tiny_run, weight_decay=0.1), "coda-prompt", sizes="3,2,1")
    learn_all(ready, [0, 1])
    old = clone(ready.method.state_dict())
    report = ready.method.learn(ready.task(2))
    assert report["components"] == [8, 12]
    new = ready.method.state_dict()
    for name in ("prompts", "keys", "attention"):
        assert torch.equal(new[f"prompts.{name}"][:8], old[f"prompts.{name}"])


def test_new_components_are_orthogonal_to_trained_ones(tiny_run):
    ready = prepared(tiny_run, "coda-prompt")
    ready.method.learn(ready.task(0))
    ready.method.begin_task(ready.task(1))
    for part in ready.method.prompts.parts():
        for block in range(2):
            rows = part().detach()[:, block].flatten(1)
            assert float((rows[4:] @ rows[:4].T).abs().max()) < 1e-5
            assert not torch.allclose(rows[:4] @ rows[:4].T, torch.eye(4), atol=1e-3), "the old ones were trained"


def test_coda_prompt_has_the_published_number_of_parameters():
    components = Components(blocks=5, length=8, width=768)
    components.grow(100, torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in components.parameters()) == 3_840_000


def coda(vit, plan, **options):
    return CODAPrompt(load_backbone(vit), CODAOptions(**options), make_runtime("cpu"), plan)


def test_components_are_allocated_equally_or_by_classes(tiny_vit):
    assert coda(tiny_vit, StreamPlan(100, 10), components=60)._num_components(36) == 6
    assert coda(tiny_vit, StreamPlan(100, 7), components=60)._num_components(1) == 8
    proportional = coda(tiny_vit, StreamPlan(100, 10), components=50, allocation="proportional")
    sizes = (36, 23, 14, 9, 6, 4, 3, 2, 2, 1)
    assert [proportional._num_components(n) for n in sizes] == [18, 12, 7, 4, 3, 2, 2, 1, 1, 1]


def test_coda_prompt_errors(tiny_vit, tiny_run):
    with pytest.raises(OneaError, match="too few for 20 tasks; give at least --components 20"):
        coda(tiny_vit, StreamPlan(100, 20), components=10)
    assert coda(tiny_vit, StreamPlan(100, 20), components=10, allocation="proportional")._num_components(1) == 1
    with pytest.raises(OneaError, match="the number of tasks and classes"):
        coda(tiny_vit, None, components=10)._num_components(1)
    with pytest.raises(OneaError, match="components is 100; it must not exceed the width 64"):
        coda(tiny_vit, StreamPlan(100, 10))
    with pytest.raises(OneaError, match="length is 7; it must be even"):
        CODAOptions(length=7)
    full = prepared(with_options(tiny_run, components=64, allocation="proportional"), "coda-prompt", sizes="5,1")
    full.method.plan = StreamPlan(5, 1)
    full.method.learn(full.task(0))
    with pytest.raises(OneaError, match="Task 2 would need components 65 to 77, but only 64"):
        full.method.learn(full.task(1))


def test_without_components_coda_prompt_uses_plain_features(tiny_run):
    ready = prepared(with_options(tiny_run, single_class_policy="skip"), "coda-prompt", sizes="1,5")
    ready.method.learn(ready.task(0))
    images = shown_images(ready)
    assert torch.equal(ready.method.scores(images), ready.method.head(ready.method.features(images)))


# --- published values -----------------------------------------------------------------------------------------------


def test_published_values_follow_the_table():
    expected_presets = {
        "l2p": {"cifar100": (5, 0.001875, 16), "imagenet-r": (10, 0.001875, 32)},
        "dualprompt": {"cifar100": (5, 0.001, 24), "imagenet-r": (10, 0.001, 24)},
        "coda-prompt": {"cifar100": (20, 0.001, 128), "imagenet-r": (50, 0.001, 128)},
    }
    for name, table in expected_presets.items():
        for dataset in ("cifar100", "cub200", "imagenet-a", "imagenet-r", ""):
            actual = preset_options(name, f"paper/{dataset}" if dataset else "paper")
            expected = table.get(dataset, table["imagenet-r"])
            assert (actual["epochs"], actual["learning_rate"], actual["batch_size"]) == expected
            assert actual["weight_decay"] == 0
            crop = 0.08 if dataset in table else 0.05
            assert actual.get("crop_scale", 0.05) == (crop if name == "coda-prompt" else 0.05)
