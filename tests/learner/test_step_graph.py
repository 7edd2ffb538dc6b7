# SPDX-License-Identifier: Apache-2.0
"""Training with captured steps, without a GPU: a fake graph runs them on inputs in fixed memory."""

from __future__ import annotations

import contextlib

import pytest
import torch

from onea.learner import optimisation
from onea.learner.adapter_training import AdapterTraining, initial_adapters, train_adapter
from onea.research.runs.config import make_config
from onea.research.runs.setup import prepare
from onea.runtime import make_runtime


class FakeStepGraph:
    """Runs every step like a CUDA graph: on copies of the inputs in fixed memory."""

    def __init__(self, step, device):
        self._step, self._inputs = step, {}
        self.taken = 0

    def stream(self):
        return contextlib.nullcontext()

    def __call__(self, *inputs):
        signature = tuple((value.shape, value.dtype) for value in inputs)
        static_inputs = self._inputs.setdefault(signature, [torch.empty_like(value) for value in inputs])
        for static, value in zip(static_inputs, inputs, strict=True):
            static.copy_(value)
        FakeStepGraph.steps += 1
        return self._step(*static_inputs).clone()


@pytest.mark.parametrize("store", ["device", "disk"])
@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_captured_steps_learn_the_same(tiny_run, store, blocks, drop, monkeypatch):
    ready = prepare(make_config(tiny_run | {"store": store}), make_runtime("cpu", "fp32", 1))
    task, vit, runtime = ready.task(0), ready.method.vit, ready.method.runtime
    options = AdapterTraining(
        rank=4, batch_size=4, epochs=3, min_epochs=3, max_epochs=3, adapter_blocks=blocks, cached_views=2,
        patch_drop_rate=drop,
    )  # fmt: skip
    results = []
    FakeStepGraph.steps = 0
    for recorded in (False, True):
        if recorded:
            monkeypatch.setattr(optimisation, "_can_capture", lambda *_: True)
            monkeypatch.setattr(optimisation, "StepGraph", FakeStepGraph)
        results.append(train_adapter(vit, initial_adapters(vit, options, 1), task, options, runtime, None))
    plain, recorded = results
    assert FakeStepGraph.steps == 3 * -(-len(task) // 4)
    # The rate is a float32 in a recording, hence the last digits.
    torch.testing.assert_close(recorded.tensors, plain.tensors, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(recorded.report["losses"]), torch.tensor(plain.report["losses"]))
