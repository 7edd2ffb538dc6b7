# SPDX-License-Identifier: Apache-2.0
"""The frozen network of a model and its device."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onea import seeds
from onea.data.dataset import Pixels
from onea.data.transforms import VIEW_AREA, Preprocess
from onea.errors import OneaError, is_out_of_memory
from onea.model.state import State
from onea.runtime import NO_PROGRESS, Progress, Runtime, make_runtime
from onea.tensors import Tensors
from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone, remember_file, remembered_file, short_digest
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks
from onea.vit.weight_files import split_file_name

_CROP_MARGIN = 256 / 224  # images are a little larger than the input, to leave room for training crops


class Engine:
    """A frozen network on its device. Predictions are computed in float32, training in the requested precision.

    Attributes:
        vit: the network, in float32.
        preprocess: computes the input of the network from square images.
        side: side length of these images, in pixels.
        backbone: the description of the network in a model folder; ``depth`` only if not all blocks are used.
    """

    def __init__(
        self,
        backbone: str,
        device: str,
        precision: str,
        threads: int,
        mirror: bool,
        preprocess: Mapping[str, Any] | None = None,
        image_size: int | None = None,
        config: Mapping[str, Any] | None = None,
        depth: int = 0,
    ):
        self._training = make_runtime(device, precision, threads)
        self.runtime = dataclasses.replace(self._training, precision="fp32")
        size = image_size if preprocess is None else preprocess["size"]
        file_config = json.dumps(config, sort_keys=True) if config and split_file_name(backbone) else None
        self.vit = load_backbone(backbone, size, file_config, depth).to(self.runtime.device)
        if preprocess is None:
            self.preprocess = Preprocess(self.vit.size, self.vit.mean, self.vit.std, mirror=mirror)
            self.side = round(self.vit.size * _CROP_MARGIN)
        else:
            values = {name: value for name, value in preprocess.items() if name != "side"}
            values |= {name: tuple(values[name]) for name in ("mean", "std")}
            self.preprocess, self.side = Preprocess(**values), preprocess["side"]
        self.backbone: dict[str, Any] = {"name": self.vit.name, "sha256": self.vit.digest}
        if depth:
            self.backbone["depth"] = depth
        if self.vit.config.licence:
            self.backbone["licence"] = self.vit.config.licence
        if parts := split_file_name(backbone):  # to find the file again, and to need no config.json beside it
            remember_file(self.vit.digest, parts[1])
            self.backbone["config"] = self.vit.config.to_json()

    @property
    def preprocess_values(self) -> dict[str, Any]:
        """The parameters of the preprocessing, as stored in a model folder."""
        return {**dataclasses.asdict(self.preprocess), "side": self.side}

    def check_backbone(self, backbone: Mapping[str, Any]) -> None:
        """Raise an error if a model was taught with another network."""
        if self.vit.digest != backbone["sha256"]:
            raise OneaError(
                f"The model was taught with backbone '{backbone['name']}' (sha256 {short_digest(backbone['sha256'])}), "
                f"but '{self.vit.name}' has other weights ({short_digest(self.vit.digest)}); pass the original file as "
                'backbone="...".'
            )

    def adapters(self, state: State) -> Adapters:
        """The adapter of a state as a module on the engine's device, for inference."""
        if not state.options["train"]:
            return Adapters.none(self.vit.depth, self.vit.width)
        return self.adapters_from(state.adapter, float(state.options["scale"]))

    def adapters_from(self, tensors: Tensors, scale: float) -> Adapters:
        """An adapter as a module on the engine's device, for inference."""
        try:
            adapters = Adapters.from_tensors(tensors, scale)
            if adapters.shape != (self.vit.depth, self.vit.width):
                raise ValueError("made for another network")
        except (KeyError, RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise OneaError(
                f"The model's adapter does not fit its backbone '{self.vit.name}'; restore it from a backup."
            ) from error
        return adapters.to(self.runtime.device)

    def for_training(self, progress: Progress | None) -> tuple[FrozenViT, Runtime]:
        """The network and the runtime to train with; in low precision, the network is a copy."""
        runtime = dataclasses.replace(self._training, progress=progress or Progress())
        if runtime.dtype == torch.float32:
            return self.vit, runtime
        return copy.deepcopy(self.vit).cast_matrices(runtime.dtype, runtime.fp8), runtime

    def features(
        self,
        pixels: Pixels,
        hooks: BlockHooks,
        crops: Tensor | None = None,
        progress: Progress = NO_PROGRESS,
        network: tuple[FrozenViT, Runtime] | None = None,
    ) -> Tensor:
        """Features of square images, or of crops of them, ``[N, width]``, on the CPU.

        ``network`` is the result of ``for_training``, to compute in another precision.
        """
        vit, runtime = network or (self.vit, self.runtime)
        parts = [torch.empty(0, self.vit.width)]
        progress.start_images("computing features", len(pixels))
        with torch.no_grad():
            for start in range(0, len(pixels), EVALUATION_BATCH):
                part = slice(start, start + EVALUATION_BATCH)
                images = torch.from_numpy(pixels[part]).to(self.runtime.device)
                if crops is None:
                    images = self.preprocess.test_views(images)
                else:
                    images = self.preprocess.train_views(images, crops[part].to(self.runtime.device))
                with runtime.autocast():
                    parts.append(vit(images, hooks).cpu())
                progress.step(len(parts[-1]))
        return torch.cat(parts)

    def sample_crops(self, labels: Sequence[str], seed: int, view: int, area: float = VIEW_AREA) -> Tensor:
        """Random crops of images with these labels, ``[N, 5]``; the crops of a class do not depend on other classes.

        ``area`` is the smallest share of an image that a crop contains.
        """
        crops = torch.empty(len(labels), 5, dtype=torch.int64)
        for name in set(labels):
            rows = torch.tensor([row for row, label in enumerate(labels) if label == name])
            generator = seeds.generator(seed, view, f"view/{name}")
            crops[rows] = self.preprocess.sample_crops(len(rows), (self.side, self.side), area, generator)
        return crops


def locate_backbone(backbone: Mapping[str, Any], folder: Path) -> str:
    """The name of a model's network or, if the network is a file, its path on this machine.

    Raises:
        OneaError: the network does not exist, or its file is neither where it was last used nor beside the folder.
    """
    name: str = backbone["name"]
    if split_file_name(name) is None:
        return name
    beside = folder.absolute().parent / name
    path = remembered_file(backbone["sha256"]) or (beside if beside.is_file() else None)
    if path is None:
        raise OneaError(
            f"{folder} needs the backbone file {name} (sha256 {short_digest(backbone['sha256'])}), which is not where "
            'it was last used on this machine; put it next to the model folder, or pass its path as backbone="...".'
        )
    return str(path)
