# SPDX-License-Identifier: Apache-2.0
"""Speed-up over the plain loop, measured in turn in one process: a ratio that any machine can check."""

from __future__ import annotations

import torch

from onea.learner.adapter_training import train_adapter
from onea.research.bench.baselines import (
    PlainImages,
    loader,
    plain_epoch,
    plain_inference,
    plain_network,
    plain_transform,
)
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.bench.measure import bench_backbone, make_workload, preprocess_of, synthetic_pixels
from onea.research.bench.results import time_interleaved


def speedups(config: BenchConfig, per_class: int) -> dict[str, float]:
    """The speed-up in training and in inference, best time against best time, on this many images per class.

    The plain loop gets no worker processes here: they would measure how many cores are idle.
    """
    runtime, vit = config.runtime(same_numerics=False), bench_backbone(config.backbone)
    workload = make_workload(config, vit, runtime, (CLASSES,), per_class, per_class, compiled=config.compiles(runtime))
    task, method, device = workload.prepared.task(0), workload.method, runtime.device
    method.learn(task)
    network, preprocess = plain_network(vit.vit, config.rank), preprocess_of(vit)
    pixels = synthetic_pixels(len(task), vit.size)
    train, test = (
        PlainImages(pixels, task.labels, plain_transform(preprocess, training=training)) for training in (True, False)
    )
    rows = torch.arange(len(task))
    contests = {
        "training": (
            lambda: train_adapter(
                method.vit,
                method.learner.new_adapters(task.seed, task.index),
                task,
                method.options,
                runtime,
                method.plan,
            ),
            plain_epoch(network, loader(train, config.batch, 0, shuffle=True), CLASSES, device),
        ),
        "inference": (
            lambda: method.scores(workload.prepared.test.images.test_views(rows)),
            plain_inference(network, test, len(rows), device),
        ),
    }
    found = {}
    for name, actions in contests.items():
        ours, plain = time_interleaved(actions, device, config.seconds, warm_up=1, min_repeats=5)
        found[name] = plain.best / ours.best
    return found
