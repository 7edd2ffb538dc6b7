# SPDX-License-Identifier: Apache-2.0
"""Nobody may make us slow without noticing: the work is counted, and the slow suite times it next to the plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tiny import write_tiny_vit
from torch.utils._python_dispatch import TorchDispatchMode

from onea.bench.config import CLASSES, BenchConfig
from onea.bench.flops import inference_flops, training_flops
from onea.bench.plain import plain_network
from onea.bench.workload import bench_backbone, make_workload
from onea.methods.adapter_training import blank_adapters, train_adapter
from onea.runs.evaluation import count_flops
from onea.vit.embedded import FAST

CONFIG = BenchConfig(FAST, rank=64, device="cpu", batch=10, precision="fp32", threads=1, seconds=0.05)


@pytest.fixture(scope="module")
def workload():
    vit = bench_backbone(FAST)
    return make_workload(CONFIG, vit, CONFIG.runtime(same_numerics=True), (CLASSES,), 4, 4, compiled=False)


def test_a_pass_needs_fewer_operations_than_the_plain_loops(workload):
    """One token in the last of six blocks, there and back."""
    images = torch.zeros(2, 3, workload.method.vit.size, workload.method.vit.size)
    network = plain_network(bench_backbone(FAST).vit, CONFIG.rank)
    with torch.no_grad():
        inference = count_flops(lambda: network(images)) / 2
    training = count_flops(lambda: network(images).sum().backward()) / 2
    assert inference_flops(workload.method) < 0.9 * inference
    assert training_flops(workload.method) < 0.9 * training


def test_adapters_in_the_last_blocks_save_most_of_a_training(tmp_path):
    """The tokens of four views included, over the paper's fewest epochs: a factor of 2.5 or more in operations."""
    write_tiny_vit(tmp_path / "vit.safetensors", depth=12)
    vit, runtime = bench_backbone(str(tmp_path / "vit.safetensors")), CONFIG.runtime(same_numerics=True)
    made = make_workload(replace(CONFIG, rank=8, batch=32), vit, runtime, (CLASSES,), 8, 1, compiled=False)
    task = made.prepared.task(0)

    def operations(blocks: int, epochs: int) -> int:
        count = {"epochs": epochs, "min_epochs": epochs, "max_epochs": epochs}
        options = replace(made.method.options, adapter_blocks=blocks, cached_views=4, **count)
        adapters = blank_adapters(made.method.vit, options, seed=1)
        return count_flops(lambda: train_adapter(made.method.vit, adapters, task, options, runtime, None))

    def whole(blocks: int) -> int:
        once, twice = operations(blocks, 1), operations(blocks, 2)
        return once + 19 * (twice - once)

    assert whole(3) < whole(0) / 2.5


class Calls(TorchDispatchMode):
    """Counts what PyTorch is asked to do."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(action) -> int:
    with Calls() as counter:
        action()
    return counter.count


def test_more_images_are_prepared_by_no_more_calls(workload):
    images = workload.prepared.train.images

    def augmented(count: int) -> int:
        draw = torch.Generator().manual_seed(1)
        return calls(lambda: next(images.augmented_batches(torch.arange(count), count, 0.05, draw)))

    def plain(count: int) -> int:
        return calls(lambda: images.plain(torch.arange(count)))

    assert augmented(4) >= augmented(32) > 0
    assert plain(4) >= plain(32) > 0


# Well below what is measured (see benchmarks/), because the machine may be busy. Without bf16 the gain is what the
# mathematics saves: one token in the last block, and images cropped in batches.
GUARD = {"bf16": {"training": 1.2, "inference": 1.4}, "fp32": {"training": 1.05, "inference": 1.05}}
TRIES = 3
MEASURE = """
import json, sys
from onea.bench.speedup import speedups
from onea.bench.config import BenchConfig
config = BenchConfig(*json.loads(sys.argv[1]), threads=1, seconds=0.05)
print(json.dumps([config.runtime(same_numerics=False).precision, speedups(config, per_class=2)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_faster_than_the_plain_loop(precision):
    """In a process of its own, with all instructions that these tests leave unused (conftest.py)."""
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    command = [sys.executable, "-c", MEASURE, json.dumps([FAST, 64, "cpu", 10, precision])]
    best = {"training": 0.0, "inference": 0.0}
    for _ in range(TRIES):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        chosen, found = json.loads(done.stdout)
        best = {name: max(gain, best[name]) for name, gain in found.items()}
        if all(best[name] >= level for name, level in GUARD[chosen].items()):
            return
    pytest.fail(f"times faster than the plain loop in {chosen}: {best}, wanted {GUARD[chosen]}")
