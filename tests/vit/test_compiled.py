# SPDX-License-Identifier: Apache-2.0
"""A compiled network gives the same features for the adapters, prompts or LoRA of all tasks, without recompiling."""

from __future__ import annotations

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from onea.errors import OneaError
from onea.learner.local_head import local_head, train_with_local_head
from onea.research.methods.aper import VPT
from onea.research.methods.lora import FoldedUpdates, LowRank, LowRankUpdates, SummedUpdates
from onea.research.methods.prompting import InputPrompts, PrefixPrompts
from onea.research.methods.sema import ExpandableAdapters, MeanTokenRecorder
from onea.research.runs.config import make_config
from onea.research.runs.runner import run
from onea.research.runs.setup import prepare
from onea.runtime import make_runtime
from onea.vit import compiled
from onea.vit.adapter import Adapters, FlatAdapters
from onea.vit.backbones import load_backbone
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.hooks import NO_HOOKS

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not compiled.can_compile(CPU), reason="no C++ compiler")


def adapters(vit, seed: int) -> Adapters:
    hooks = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(seed), dropout=0.0)
    with torch.no_grad():
        for adapter in hooks.adapters():
            adapter.up.weight.normal_(generator=torch.Generator().manual_seed(seed + 1))
    return hooks


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_compiled_features_and_gradients_equal_eager_ones_without_recompiling(tiny_vit, backend):
    torch.compiler.reset()
    vit = load_backbone(str(tiny_vit)).compile_for({4}, backend)
    images = torch.randn(7, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(1))

    def gradients(features, hooks):
        return torch.autograd.grad(features.square().sum(), list(hooks.parameters()))

    def check(seed: int, count: int) -> None:
        hooks = adapters(vit, seed)
        mine, plain = vit(images[:count], hooks), vit.forward_eager(images[:count], hooks)
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradients(mine, hooks), gradients(plain, hooks), rtol=1e-3, atol=1e-3)

    check(seed=1, count=4)
    with torch.compiler.set_stance("fail_on_recompile"):  # the adapter of another task, a full batch and a partial one
        check(seed=2, count=4)
        check(seed=3, count=3)
    too_many = images[:7]
    torch.testing.assert_close(vit(too_many, NO_HOOKS), vit.forward_eager(too_many, NO_HOOKS))


def random_tensor(vit, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, vit.width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def input_prompts(vit, seed: int, count: int):
    prompts = random_tensor(vit, seed, count, 3)
    return InputPrompts(vit, 0.1 * prompts), [prompts]  # not a leaf, as if selected from a pool


def prefix_prompts(vit, seed: int, count: int):
    pairs = [random_tensor(vit, seed + index, count, 2) for index in range(2)]
    return PrefixPrompts(vit.heads, {1: (pairs[0], pairs[1])}), pairs


def low_rank_updates(vit, seed: int, count: int):
    updates = LowRankUpdates(
        [{name: LowRank(0.1 * random_tensor(vit, seed, 4).detach(), trains_down=False) for name in "kv"}] * vit.depth
    )
    for up in updates.ups():
        torch.nn.init.normal_(up, std=0.1, generator=torch.Generator().manual_seed(seed))
    folded = FoldedUpdates(vit.depth, vit.width, "kv")
    folded.fold(updates)
    return SummedUpdates(folded, updates), [up for up in updates.parameters() if up.requires_grad]


def deep_prompts(vit, seed: int, count: int):
    prompts = VPT(vit.depth, vit.width, 3, deep=True)
    torch.nn.init.normal_(prompts.prompts, generator=torch.Generator().manual_seed(seed))
    return prompts, [prompts.prompts]


def expandable_adapters(vit, seed: int, count: int):
    adapters = ExpandableAdapters(vit.depth, 1, vit.width, rank=2, scale=1.0, descriptor_width=4, buffer=10)
    generator = torch.Generator().manual_seed(seed)
    adapters.initialise(generator)
    adapters.expand(vit.depth - 1, generator)
    for name, parameter in adapters.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        parameter.requires_grad_("descriptor" not in name)
    return adapters, [parameter for parameter in adapters.parameters() if parameter.requires_grad]


MADE = [input_prompts, prefix_prompts, low_rank_updates, deep_prompts, expandable_adapters]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_passes_with_hooks_other_than_adapters_are_compiled_once(tiny_vit, made, backend):
    """Such hooks differ from batch to batch or task to task; batches of another size are not compiled."""
    torch.compiler.reset()
    vit = load_backbone(str(tiny_vit)).compile_for({4}, backend)

    def check(seed: int, count: int) -> None:
        images = torch.randn(count, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(seed))
        hooks, trained = made(vit, seed, count)
        mine, plain = vit(images, hooks), vit.forward_eager(images, hooks)
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)
        pairs = (torch.autograd.grad(features.square().sum(), trained, retain_graph=True) for features in (mine, plain))
        torch.testing.assert_close(*pairs, rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            torch.testing.assert_close(vit(images, hooks), plain, rtol=1e-4, atol=1e-4)

    counters.clear()
    check(seed=1, count=4)
    assert counters["stats"]["unique_graphs"] == 2  # one graph per pass: with and without gradients
    with torch.compiler.set_stance("fail_on_recompile"):
        check(seed=2, count=4)
        check(seed=3, count=3)
    assert counters["stats"]["unique_graphs"] == 2


def test_hook_state_of_a_compiled_pass_belongs_to_its_batch(tiny_vit):
    torch.compiler.reset()
    vit = load_backbone(str(tiny_vit)).compile_for({4}, "aot_eager")
    adapters, trained = expandable_adapters(vit, 1, 4)
    mine, plain = MeanTokenRecorder(adapters), MeanTokenRecorder(adapters)
    for seed in range(3):
        images = torch.randn(4, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(seed))
        features, exact = vit(images, mine), vit.forward_eager(images, plain)
        torch.testing.assert_close(features, exact, rtol=1e-4, atol=1e-4)
        assert mine.means.keys() == plain.means.keys() == {vit.depth - 1}
        torch.testing.assert_close(mine.means, plain.means, rtol=1e-4, atol=1e-4)
        torch.autograd.grad(features.sum(), trained)


def in_reused_memory(graph, examples):
    """Write the results to the same memory at every call, as a CUDA graph does."""
    kept: dict[int, torch.Tensor] = {}

    def run(*given):
        inputs = {value.data_ptr() for value in given if isinstance(value, torch.Tensor)}
        results = []
        for index, value in enumerate(graph(*given)):
            if isinstance(value, torch.Tensor) and value.data_ptr() not in inputs:
                buffer = kept.setdefault(index, torch.empty_like(value))
                value = buffer.copy_(value).detach()
            results.append(value)
        return results

    return make_boxed_func(run)


REUSING = aot_autograd(fw_compiler=in_reused_memory, bw_compiler=in_reused_memory)


@pytest.mark.parametrize("method", ["one-a", "joint"])
def test_training_with_reused_output_memory(method, tiny_run):
    """Features, gradients and stored results, over two tasks with an evaluation between them."""
    torch.compiler.reset()
    options = {"rank": 4, "epochs": 2, "learning_rate": 0.5, "dropout": 0.0, "batch_size": 8}
    config = make_config(tiny_run | {"method": method, "options": options})
    answers = []
    for backend in (None, REUSING):
        ready = prepare(config, make_runtime("cpu", "fp32", 1))
        images = ready.test.images.test_views(torch.arange(len(ready.test.labels)))
        if backend:
            ready.method.vit.compile_for({8, len(images), EVALUATION_BATCH}, backend)
        for index in range(2):
            ready.method.learn(ready.task(index))
            first = ready.method.features(images)
            before = first.clone()
            ready.method.features(images.flip(0))
            assert torch.equal(first, before)
            answers.append(ready.method.scores(images))
    for mine, theirs in zip(answers[:2], answers[2:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_frozen_adapter_weights_stay_frozen_when_compiled(tiny_run):
    torch.compiler.reset()
    ready = prepare(make_config(tiny_run), make_runtime("cpu", "fp32", 1))
    vit, task, options = ready.method.vit.compile_for({8}, "eager"), ready.task(0), ready.method.options
    hooks = adapters(vit, 1)
    for adapter in hooks.adapters():
        adapter.down.requires_grad_(False)
    before = copy.deepcopy(hooks)
    train_with_local_head(
        vit, hooks, local_head(vit.width, task, "linear"), task, options.recipe(), ready.method.runtime
    )
    for now, then in zip(hooks.adapters(), before.adapters(), strict=True):
        assert torch.equal(now.down.weight, then.down.weight)
        assert not torch.equal(now.up.weight, then.up.weight)


def test_networks_in_one_process_have_separate_compilation_caches(tiny_vit):
    torch.compiler.reset()
    limits = torch._dynamo.config
    limit = limits.recompile_limit if hasattr(limits, "recompile_limit") else limits.cache_size_limit  # up to 2.6
    for seed in range(limit + 1):
        vit = load_backbone(str(tiny_vit)).compile_for({2}, "eager")
        images, hooks = torch.randn(2, 3, vit.size, vit.size), adapters(vit, seed)
        torch.testing.assert_close(vit(images, hooks), vit.forward_eager(images, hooks))


def test_flat_weights_restore_every_weight(tiny_vit):
    vit = load_backbone(str(tiny_vit))
    hooks = adapters(vit, 1)
    tokens = torch.randn(2, 5, vit.width)
    for frozen in (False, True):
        flat = hooks.requires_grad_(not frozen).flat(torch.float32)
        given = FlatAdapters(flat, vit.depth, vit.width, hooks.rank, hooks.scale, 0.0)
        for block in range(vit.depth):
            torch.testing.assert_close(given.mlp_update(block, tokens), hooks.mlp_update(block, tokens))


def test_flat_weights_follow_changes_of_the_adapter(tiny_vit):
    hooks = adapters(load_backbone(str(tiny_vit)), 1)

    def check(dtype: torch.dtype = torch.float32) -> None:
        trained = hooks.requires_grad_(True).flat(dtype)
        kept = hooks.requires_grad_(False).flat(dtype)
        assert torch.equal(kept, trained)
        assert hooks.flat(dtype) is kept, "the weights are flattened only once"

    check()
    hooks.load_state_dict({name: value + 1 for name, value in hooks.state_dict().items()})
    check()
    hooks.requires_grad_(True).flat(torch.float32).square().sum().backward()
    torch.optim.SGD(hooks.parameters(), lr=0.1, fused=True).step()  # does not change the version counter
    assert hooks.flat(torch.float32)[0] == hooks.blocks[0].down.weight[0, 0]
    assert hooks.requires_grad_(False).flat(torch.float32)[0] == hooks.blocks[0].down.weight[0, 0]
    twin = copy.deepcopy(hooks.requires_grad_(False)).double()
    assert twin.flat(torch.float64).dtype == torch.float64
    hooks.load_state_dict({name: value + 1 for name, value in hooks.state_dict().items()})
    check()
    hooks.double()
    check(torch.float64)


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_counts_the_same_operations(tiny_run, tmp_path):
    changes = {"sizes": "3,3", "options": tiny_run["options"] | {"dropout": 0.0, "epochs": 1}}
    plain = run(make_config(tiny_run | changes), tmp_path / "plain")
    fast = run(make_config(tiny_run | changes | {"compile": "yes"}), tmp_path / "fast")
    assert fast["runtime"]["compiled"]
    assert not plain["runtime"]["compiled"]
    assert fast["cost"] == plain["cost"]
    assert fast["correct"][-1] == pytest.approx(plain["correct"][-1], abs=1)
    for mine, theirs in zip(fast["tasks"], plain["tasks"], strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-3)


def test_a_missing_compiler_is_reported(tiny_run, monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    with pytest.raises(OneaError, match="needs a C\\+\\+ compiler"):
        prepare(make_config(tiny_run | {"compile": "yes"}), make_runtime("cpu", "fp32", 1))
    assert not prepare(make_config(tiny_run), make_runtime("cpu", "fp32", 1)).compiled
