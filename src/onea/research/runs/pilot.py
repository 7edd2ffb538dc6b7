# SPDX-License-Identifier: Apache-2.0
"""Configurations of the toolbox LAMDA-PILOT (https://github.com/LAMDA-CL/LAMDA-PILOT) as options of runs.

Its class order is ``numpy.random.RandomState(seed).permutation(classes)``, which is that of ``streams.class_order``. It
numbers the classes of a folder in alphabetical order, so that ``c10`` comes before ``c2``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from onea.errors import OneaError, truncate
from onea.files import DamagedFile, parse_json_object, read_regular
from onea.research.methods import METHODS, method_class
from onea.research.methods.presets import Preset
from onea.research.runs.stream_file import FORMAT
from onea.schema import Count, Range, matches

if TYPE_CHECKING:
    from onea.data.dataset import Dataset

_FIELDS: dict[str, Any] = {
    "model_name": str,
    "dataset": str,
    "init_cls": Annotated[int, Range(ge=0)],
    "increment": Count,
    "seed": list[int] | int,
    "shuffle": bool | None,
}
_DATASETS = {
    "cifar100": "cifar100",
    "cifar224": "cifar100",
    "cub": "cub200",
    "imagenetr": "imagenet-r",
    "imageneta": "imagenet-a",
}
_FINETUNED, _IN21K = "vit_base_patch16_224.augreg_in21k_ft_in1k", "vit_base_patch16_224.augreg_in21k"
_METHODS = {"ranpac": "ranpac-first", "dual-prompt": "dualprompt"}  # whose names differ
# Our names of a hyper-parameter, and theirs; of several in one configuration, the first is used.
_OPTIONS = {
    "epochs": ("tuned_epoch", "later_epochs", "epochs", "init_epochs", "init_epoch"),
    "learning_rate": ("later_lr", "lrate", "init_lr"),
    "weight_decay": ("weight_decay", "init_weight_decay"),
    "batch_size": ("batch_size",),
    "rank": ("ffn_num",),
    "alpha": ("alpha",),
    "random_features": ("M",),
    "pool": ("size",),
    "top_k": ("top_k",),
    "pull": ("pull_constraint_coeff",),
    "prompt_length": ("length", "prompt_token_num"),
    "g_length": ("g_prompt_length",),
    "e_length": ("length",),
    "momentum": ("adapter_momentum",),
    "regulariser": ("reg",),
    "alignment_epochs": ("crct_epochs",),
    "alignment_learning_rate": ("ca_lr",),
}
_BACKBONE_KEYS = ("backbone_type", "convnet_type")
_STREAM_OPTIONS = {"stream", "tasks", "gamma", "sizes", "order"}


@dataclass(frozen=True)
class PilotRuns:
    """What a configuration of PILOT asks for.

    Attributes:
        options: options of the runs, without those of their streams.
        seeds: one run for each.
        init_cls: number of classes of the first task; 0 is that of the others.
        increment: number of classes of each other task, except that the last one has the rest.
        shuffle: whether the seed shuffles the classes.
        own_stream: whether the streams are those of the configuration.
        ignored: one sentence for each setting that is not used.
    """

    options: dict[str, Any]
    seeds: tuple[int, ...]
    init_cls: int
    increment: int
    shuffle: bool
    own_stream: bool
    ignored: tuple[str, ...]

    def stream_options(self, dataset: Dataset, seed: int) -> dict[str, Any]:
        """The options of the stream on a dataset, which are the same as those of a user who lists the task sizes."""
        from onea.research.streams import class_order

        if not self.own_stream:
            return {}
        sizes = pilot_sizes(len(dataset.classes), self.init_cls, self.increment)
        default = class_order(len(dataset.classes), seed)
        # Pixels keep the numbers of their file; PILOT reads folders with torchvision's ImageFolder.
        order = list(dataset.classes) if dataset.train.files is None else sorted(dataset.classes)
        names = [order[index] for index in (default if self.shuffle else range(len(order)))]
        if names == [dataset.classes[index] for index in default]:
            return {"stream": "sizes", "sizes": sizes}
        return {"stream": {"format": FORMAT, "class_order": names, "sizes": list(sizes)}}


def pilot_sizes(classes: int, init_cls: int, increment: int) -> tuple[int, ...]:
    """The task sizes of PILOT: the last task has the classes that are left.

    >>> pilot_sizes(100, 50, 20), pilot_sizes(10, 0, 5)
    ((50, 20, 20, 10), (5, 5))
    """
    first = init_cls or increment
    if first > classes:
        raise OneaError(f"The first task has {first} classes but there are {classes}; correct init_cls or increment.")
    full, rest = divmod(classes - first, increment)
    return (first, *[increment] * full, *([rest] if rest else []))


def read_pilot(path: Path) -> dict[str, Any] | None:
    """The settings in a JSON file of PILOT; None for the file of something else."""
    if path.suffix != ".json":
        return None
    try:
        settings = parse_json_object(read_regular(path, follow=True))
    except DamagedFile as reason:
        raise OneaError(f"Config file {path} cannot be read ({reason}); correct it.") from reason
    return settings if "model_name" in settings else None


def pilot_runs(settings: Mapping[str, Any], given: Mapping[str, Any]) -> PilotRuns:
    """The runs of a configuration of PILOT.

    Args:
        settings: the configuration.
        given: options that replace those of the configuration.

    Raises:
        OneaError: a setting is missing or wrong, or its method, dataset or backbone does not exist here.
    """
    if wrong := next((name for name, hint in _FIELDS.items() if not matches(settings.get(name), hint)), None):
        raise OneaError(f"'{wrong}' is missing or wrong in the configuration of PILOT; correct it.")
    seeds = settings["seed"] if isinstance(settings["seed"], list) else [settings["seed"]]
    if not seeds:
        raise OneaError("The configuration of PILOT has no seed; add one to 'seed'.")
    method = given.get("method") or _method(settings)
    own_method, own_stream = "method" not in given, not _STREAM_OPTIONS & given.keys()
    options: dict[str, Any] = {"method": method, "protocol": "pilot"}
    options |= {"data": given.get("data") or _dataset(settings["dataset"])}
    options |= {"backbone": given.get("backbone") or _backbone(settings), "preset": _preset(options["data"])}
    method_options, unused = _method_options(settings, method) if own_method else ({}, _unused(settings))
    why = f"has no equivalent for {method}" if own_method else "is a setting of another method"
    ignored = [f"'{name}' ({truncate(json.dumps(settings[name]))}) {why} and was ignored." for name in unused]
    if not own_stream:
        ignored.append("'init_cls', 'increment' and 'shuffle' were ignored, because other options set the stream.")
    return PilotRuns(
        options | method_options,
        tuple(dict.fromkeys(seeds)),
        settings["init_cls"],
        settings["increment"],
        settings.get("shuffle") is not False,
        own_stream,
        tuple(ignored),
    )


def _method(settings: Mapping[str, Any]) -> str:
    theirs = str(settings["model_name"]).lower()
    name: str = theirs.replace("_", "-").replace("adam-", "aper-")  # its name before publication
    if name == "aper-vpt":
        name += f"-{str(settings.get('vpt_type', 'deep')).lower()}"
    backbone = str(_backbone_name(settings))
    if name == "ranpac" and "adapter" not in backbone:
        name = "unknown" if any(kind in backbone for kind in ("ssf", "vpt")) else "ranpac"
    else:
        name = _METHODS.get(name, name)
    if name not in METHODS.names:
        raise OneaError(
            f"PILOT's method '{truncate(theirs)}' does not exist here; run another one on its stream, such as "
            "`onea run one-a --config FILE.json` (`onea methods` lists them)."
        )
    return name


def _dataset(theirs: str) -> str:
    if theirs.lower() not in _DATASETS:
        raise OneaError(
            f"PILOT's dataset '{truncate(theirs)}' does not exist here; give its images by --data folder:PATH."
        )
    return _DATASETS[theirs.lower()]


def _backbone_name(settings: Mapping[str, Any]) -> Any:
    return next((settings[key] for key in _BACKBONE_KEYS if key in settings), None)


def _backbone(settings: Mapping[str, Any]) -> str:
    theirs = _backbone_name(settings)
    name = str(theirs).removeprefix("pretrained_")
    if name.startswith(("vit_b16_224", "vit_base_patch16_224")):
        return _IN21K if "_in21k" in name else _FINETUNED
    raise OneaError(f"PILOT's backbone '{truncate(theirs)}' does not exist here; give another one by --backbone.")


def _preset(data: str) -> str:
    return f"paper/{data}" if f"paper/{data}" in get_args(Preset) else "paper"


def _method_options(settings: Mapping[str, Any], method: str) -> tuple[dict[str, Any], list[str]]:
    """Options of the method, and the names of the settings that are not used."""
    known = {field.name for field in fields(method_class(method).Options)}
    options: dict[str, Any] = {}
    used: set[str] = set()
    if "components" in known and matches(settings.get("prompt_param"), list[float]):
        options |= dict(zip(("components", "length", "orthogonality"), settings["prompt_param"], strict=False))
        used.add("prompt_param")
    if "memory" in known and settings.get("fixed_memory"):
        options["memory"] = settings.get("memory_per_class")
        used |= {"memory_size", "memory_per_class", "fixed_memory"}
    for ours, names in _OPTIONS.items():
        if theirs := [name for name in names if name in settings and ours in known]:
            options[ours] = settings[theirs[0]]
            used |= {name for name in theirs if settings[name] == options[ours]}
    return options, [name for name in _unused(settings) if name not in used]


def _unused(settings: Mapping[str, Any]) -> list[str]:
    """The names of all settings but those of the stream and the network, and those that say that there is no memory."""
    used = {*_FIELDS, *_BACKBONE_KEYS}
    if not settings.get("memory_size") and not settings.get("memory_per_class"):
        used |= {"memory_size", "memory_per_class", "fixed_memory"}
    return [name for name in settings if name not in used]
