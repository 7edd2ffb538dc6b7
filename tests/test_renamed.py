# SPDX-License-Identifier: Apache-2.0
"""Names of earlier versions: they work, and say what to write instead."""

from __future__ import annotations

import warnings
from importlib import import_module

import pytest
import torch
from method_tools import learn_all, prepared, shown_images

from onea.methods.contract import Method
from onea.methods.per_task import PerTaskAdapter
from onea.processes import Processes
from onea.renamed import RenamedMethods, renamed_arguments
from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.heads import cosine_scores
from onea.vit.hooks import NO_HOOKS, BlockHooks

OLD = {
    "onea.vit.plug:Plug": "onea.vit.hooks:BlockHooks",
    "onea.vit.plug:Nothing": "onea.vit.hooks:NoHooks",
    "onea.vit.plug:NOTHING": "onea.vit.hooks:NO_HOOKS",
    "onea.vit.lora:Together": "onea.vit.lora:SummedUpdates",
    "onea.learner.tasks:Plan": "onea.learner.tasks:StreamPlan",
    "onea.methods.contract:filled_up": "onea.methods.contract:pad_rows",
    "onea.methods.adapter_merging:AdapterMemo": "onea.methods.adapter_merging:AdapterCache",
    "onea.merging.one_a:OneA": "onea.merging.one_a:OneAMerge",
    "onea.merging.one_a:gates": "onea.merging.fusion:gates",
    "onea.runs.engine:run": "onea.runs.runner:run",
    "onea.runs.record:essence": "onea.runs.record:comparable_fields",
    "onea.runs.record:now": "onea.text:now",
    "onea.report.find:find_records": "onea.report.load:load_records",
}


@pytest.mark.parametrize(("old", "new"), OLD.items())
def test_an_old_name_gives_the_new_object_and_a_warning(old, new):
    module, name = old.split(":")
    place, now = new.split(":")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is now {place}\.{now}"):
        assert getattr(import_module(module), name) is getattr(import_module(place), now)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        import_module(module).nonsense  # noqa: B018


def test_a_method_with_the_old_contract_answers(tiny_run):
    """As a package for an earlier version has it: ``parts`` and ``scores_from``."""
    with pytest.warns(DeprecationWarning, match="is now cacheable_modules"):

        class Old(Method):
            title = paper = trains = stores = ""

            def learn(self, task):
                new = self.prototypes_of(task)
                self.prototypes = torch.cat([self.prototypes, new]) if task.index else new
                return {}

            def parts(self):
                return {"plain": NO_HOOKS}

            def scores_from(self, features):
                return cosine_scores(features["plain"], self.prototypes)

            def state_dict(self):
                return {"prototypes": self.prototypes}

            def load_state_dict(self, state):
                self.prototypes = state["prototypes"]

    ready = prepared(tiny_run, "simplecil")
    expected = learn_all(ready)
    old = Old(expected.vit, expected.options, expected.runtime)
    for index in range(ready.stream.tasks):
        old.learn(ready.task(index))
    images = shown_images(ready)
    torch.testing.assert_close(old.scores(images), expected.scores(images), rtol=1e-5, atol=1e-6)
    assert old.cacheable_modules() == {"plain": NO_HOOKS}


def test_a_subclass_of_ours_may_go_on_calling_its_parents_by_old_names(tiny_run):
    with pytest.warns(DeprecationWarning, match="is now cacheable_modules"):

        class Old(PerTaskAdapter):
            def parts(self):
                return super().parts() | {"plain": NO_HOOKS}

    method = learn_all(prepared(tiny_run, "per-task"))
    method.__class__ = Old
    with pytest.warns(DeprecationWarning, match="is now cacheable_modules"):
        found = method.cacheable_modules()
    assert list(found) == [*PerTaskAdapter.cacheable_modules(method), "plain"]
    assert len(found) == 4


def test_hooks_with_old_names_take_part_in_a_pass(tiny_vit):
    vit = load_backbone(tiny_vit)
    adapters = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(1)).eval()
    for adapter in adapters.each():
        torch.nn.init.normal_(adapter.up.weight, generator=torch.Generator().manual_seed(2))
    with pytest.warns(DeprecationWarning, match="Old.* is now") as heard:

        class Old(BlockHooks):
            def beside_mlp(self, block, u):
                return adapters.mlp_update(block, u)

            def enter(self, block, x):
                return x + 1

            def leave(self, block, x):
                return x - 1

    assert len(heard) == 3
    images = torch.randn(2, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(3))

    class New(BlockHooks):
        def mlp_update(self, block, u):
            return adapters.mlp_update(block, u)

        def before_block(self, block, x):
            return x + 1

        def after_block(self, block, x):
            return x - 1

    with torch.no_grad():
        assert torch.equal(vit(images, Old()), vit(images, New()))
        assert not torch.equal(vit(images, Old()), vit(images))
        with pytest.warns(DeprecationWarning, match="eagerly is now forward_eager"):
            assert torch.equal(vit.eagerly(images, adapters), vit(images, adapters))
        with pytest.warns(DeprecationWarning, match="beside_mlp is now mlp_update"):
            adapters.beside_mlp(0, torch.zeros(1, 2, vit.width))


def test_who_defines_both_names_hears_nothing():
    class Renamed(RenamedMethods, old_names={"old": "new"}):
        def new(self):
            return 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Both(Renamed):
            def new(self):
                return 2

            def old(self):
                return 3

        assert (Both().new(), Both().old(), Renamed().new()) == (2, 3, 1)


def test_attributes_and_arguments(tiny_run):
    task = prepared(tiny_run, "simplecil").task(1)
    with pytest.warns(DeprecationWarning, match="is now cumulative_task"):
        assert len(task.so_far()) == len(task.cumulative_task()) > len(task)
    batch = torch.arange(7)
    with pytest.warns(DeprecationWarning, match="deal is now shard"):
        assert torch.equal(Processes(1, 3).deal(batch), Processes(1, 3).shard(batch))

    @renamed_arguments(old="new")
    def twice(new: int) -> int:
        return 2 * new

    with pytest.warns(DeprecationWarning, match="the argument old of twice is now new"):
        assert twice(old=2) == twice(new=2) == twice(2) == 4
