# SPDX-License-Identifier: Apache-2.0
"""Whole training steps recorded on a GPU against steps that run as they are: the same losses and weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onea.data.image_storage import PackedImages
from onea.data.transforms import Preprocess
from onea.learner import optimisation
from onea.learner.adapter_training import AdapterTraining, initial_adapters, train_adapter
from onea.learner.step_graph import StepGraph
from onea.learner.tasks import Task
from onea.runtime import make_runtime
from onea.vit.backbones import load_backbone
from onea.vit.compiled import can_compile

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IMAGES, BATCH, EPOCHS = 44, 8, 6  # five whole batches and a rest of four
PIXELS = np.random.default_rng(1).integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)


class Counted(StepGraph):
    """Notes how many steps were replayed."""

    last: Counted

    def __init__(self, *given: object):
        super().__init__(*given)  # type: ignore[arg-type]
        Counted.last = self


def learned(
    tiny_vit, *, recorded: bool, compiled: bool, tier="device", precision="fp32", blocks=0, dropout=0.0, drop=0.0
):
    """Losses and weights of a training, and the number of steps that were replayed."""
    torch.compiler.reset()
    runtime = make_runtime("cuda", precision)
    vit = load_backbone(tiny_vit).cast_matrices(runtime.dtype, runtime.fp8).to(GPU)
    if compiled:
        vit.compile_for({BATCH, 256})
    images = PackedImages(PIXELS, Preprocess(vit.size, vit.mean, vit.std), GPU, tier)
    task = Task(0, "task 1", range(4), images, torch.arange(IMAGES), torch.arange(IMAGES) % 4, seed=1)
    options = AdapterTraining(
        rank=4, batch_size=BATCH, epochs=EPOCHS, min_epochs=EPOCHS, max_epochs=EPOCHS, dropout=dropout,
        learning_rate=0.1, adapter_blocks=blocks, cached_views=2, patch_drop_rate=drop,
    )  # fmt: skip
    adapters = initial_adapters(vit, options, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimisation, "StepGraph", Counted if recorded else _AsTheyAre)
        result = train_adapter(vit, adapters, task, options, runtime, None)
        replayed = Counted.last.replayed if recorded else 0
    weights = torch.cat([value.flatten() for value in result.tensors.values()]).cpu()
    return torch.tensor(result.report["losses"]), weights, replayed


class _AsTheyAre(StepGraph):
    """Every step runs as it is, on the same stream."""

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._step(*inputs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("tier", "blocks", "drop"), [("device", 0, 0.0), ("host", 0, 0.0), ("device", 1, 0.0), ("device", 0, 0.5)]
)
def test_recorded_steps_learn_the_same(tiny_vit, compiled, tier, blocks, drop):
    if compiled and not can_compile(GPU):
        pytest.skip("needs Triton")
    mine, theirs = (
        learned(tiny_vit, recorded=recorded, compiled=compiled, tier=tier, blocks=blocks, drop=drop)
        for recorded in (True, False)
    )
    # Six steps an epoch: two of the five whole ones and two of the rests run as they are.
    assert mine[2] == 6 * EPOCHS - 4
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-2, atol=1e-3)
    assert len(mine[0].unique()) == EPOCHS  # the labels are chance, so losses need not fall; but every step learns


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_recorded_steps_learn_in_low_precision(tiny_vit, precision):
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8")
    losses, weights, replayed = learned(
        tiny_vit, recorded=True, compiled=can_compile(GPU), precision=precision, dropout=0.1
    )
    expected = learned(tiny_vit, recorded=False, compiled=False, precision="fp32")[0]
    assert replayed == 6 * EPOCHS - 4
    assert weights.isfinite().all()
    torch.testing.assert_close(losses, expected, rtol=0.2, atol=0.1)


def test_dropout_differs_from_step_to_step_and_a_seed_repeats_it(tiny_vit):
    first, again = (learned(tiny_vit, recorded=True, compiled=False, dropout=0.5) for _ in range(2))
    torch.testing.assert_close(first[1], again[1], rtol=1e-4, atol=1e-5)
    drawn = []

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5).sum()

    graph = StepGraph(step, GPU)
    with graph.stream():
        drawn = [graph(torch.ones(1000, device=GPU)) for _ in range(6)]
    assert graph.replayed == 4
    assert len({float(value) for value in drawn}) > 3


def test_random_numbers_are_drawn_after_a_recording_that_failed():
    graph = StepGraph(lambda x: torch.nn.functional.dropout(x, 0.5) * float(x.sum()), GPU)
    with graph.stream():
        found = [graph(torch.ones(1000, device=GPU)).sum() for _ in range(5)]
    assert graph.replayed == 0
    assert len({float(value) for value in found}) > 2


def test_what_cannot_be_recorded_runs_as_it_is():
    graph = StepGraph(lambda x: x * float(x.sum()), GPU)  # reads a value
    with graph.stream():
        found = [float(graph(torch.full((1,), float(value), device=GPU))) for value in range(5)]
    assert found == [0.0, 1.0, 4.0, 9.0, 16.0]
    assert graph.replayed == 0
