# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run, from the command line or a YAML file, and the key that tells two runs apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from onea.errors import OneaError, import_extra, truncate
from onea.options import LARGEST, MachineOptions, check_threads, make_options, upgraded
from onea.research.data import data_name
from onea.research.methods.presets import Preset
from onea.vit.embedded import FAST, full_name
from onea.vit.network_config import PLAIN, check_image_size

_PETABYTE = 1_000_000  # in gigabytes
_LONGEST_NAME = 255  # bytes, on every usual file system
_LONGEST_FILE = 1_000_000  # bytes of a YAML file
# Where a run computes or keeps its images does not make it another run.
_RESOURCES = ("root", "device", "threads", "compile", "store", "budget", "cache_gb")
# What every identity holds, so that the records of today are found. A field that is added later, and is missing here,
# is part of an identity only where it differs from its default.
_ALWAYS = {
    *("method", "data", "backbone", "stream", "tasks", "gamma", "sizes", "order", "long_tail", "seed", "preset"),
    *("normalise", "geometry", "protocol", "precision", "on_bad", "per_class", "holdout", "options"),
}
_INPUTS, _STREAM, _MACHINE = ({"panel": name} for name in ("Images and network", "Stream", "Machine"))  # of the help


@dataclass(frozen=True)
class RunConfig(MachineOptions):
    """Everything that defines a run. Fields are the command line's options and the keys of a YAML file.

    >>> config = RunConfig(method="one-a", data="cifar100", tasks=10, seed=1)
    >>> config.gamma, config.folder().name == f"one-a-cifar100-seed1-{config.key()}"
    (0.01, True)

    Attributes:
        method: a name that ``onea methods`` lists.
        data: a name that ``onea methods --datasets`` lists, ``folder:PATH`` or ``list:TRAIN.txt,TEST.txt``.
        root: folder of downloaded datasets.
        backbone: embedded name (or ``fast``), timm ``architecture.tag`` or ``.safetensors`` file; one that does not say
            what network it holds as ``architecture.tag:file``, or ``plain:file``.
        depth: the number of the network's blocks that are used; features are read after the last of them. 0 is all.
        image_size: side of the network's input in pixels, if not what its weights were made for.
        stream: ``step`` (imbalanced), ``balanced``, ``sizes`` or ``natural``; ``auto`` is ``sizes`` when sizes are
            given, ``natural`` when the data has groups and no number of tasks is asked for, else ``step``.
        tasks: number of tasks.
        gamma: step imbalance; 1 is balanced.
        sizes: classes of each task, such as ``36,1,14``.
        order: of the tasks: ``shuffled``, ``descending`` or ``given``.
        long_tail: also make images per class long-tailed, with this factor, such as 0.1.
        seed: decides class order, task order and every draw.
        preset: hyper-parameters: ``auto`` (computed from the number of images, classes and tasks, the same for all
            methods), ``paper`` or ``paper/NAME`` (as published, for any dataset or one of theirs).
        normalise: ``backbone`` (the mean and deviation the weights expect) or ``none`` (pixels in [0, 1]).
        geometry: ``direct`` (resize to the network's size), ``resize-crop``, or ``backbone`` (crop and interpolation
            that the weights were made with).
        protocol: ``pilot`` is normalise none and geometry resize-crop, as published.
        compile: whether to compile the network: ``yes``, ``no`` or ``auto`` (on a GPU, with enough images to repay it).
        store: where packed images live: ``auto``, ``device``, ``host``, ``disk``; ``exact`` streams the originals.
        budget: gigabytes of memory the images may take.
        cache_gb: gigabytes of host memory for test features of frozen modules, which are then computed only once; 0 is
            none, and by default half of what is free may be used.
        per_class: at most so many training images of each class, chosen by the seed.
        holdout: evaluate on this share of the training images, held out by the seed, instead of the test images.
        open_set: after each task, also judge the test images of classes yet to come, and record how well they are told
            from those of classes seen.
        options: of the method.
    """

    method: str = "one-a"
    data: str = field(default="glyphs-mini", metadata=_INPUTS)
    root: str | None = field(default=None, metadata=_INPUTS)
    backbone: str = field(default=FAST, metadata=_INPUTS)
    depth: int = field(default=0, metadata=_INPUTS)
    image_size: int | None = field(default=None, metadata=_INPUTS)
    stream: Literal["auto", "step", "balanced", "sizes", "natural"] = field(default="auto", metadata=_STREAM)
    tasks: int | None = field(default=None, metadata=_STREAM)
    gamma: float = field(default=0.01, metadata=_STREAM)
    sizes: str | None = field(default=None, metadata=_STREAM)
    order: Literal["shuffled", "descending", "given"] | None = field(default=None, metadata=_STREAM)
    long_tail: float | None = field(default=None, metadata=_STREAM)
    seed: int = 1
    preset: Preset = "auto"
    normalise: Literal["backbone", "none"] = field(default="backbone", metadata=_INPUTS)
    geometry: Literal["direct", "resize-crop", "backbone"] = field(default="direct", metadata=_INPUTS)
    protocol: Literal["pilot"] | None = field(default=None, metadata=_INPUTS)
    precision: Literal["auto", "fp8", "bf16", "fp32"] = field(default=MachineOptions.precision, metadata=_MACHINE)
    device: str = field(default=MachineOptions.device, metadata=_MACHINE)
    threads: int = field(default=MachineOptions.threads, metadata=_MACHINE)
    compile: Literal["auto", "yes", "no"] = field(default="auto", metadata=_MACHINE)
    store: Literal["auto", "device", "host", "disk", "exact"] = field(default="auto", metadata=_MACHINE)
    budget: float | None = field(default=None, metadata=_MACHINE)
    cache_gb: float | None = field(default=None, metadata=_MACHINE)
    on_bad: Literal["fail", "skip"] = field(default=MachineOptions.on_bad, metadata=_INPUTS)
    per_class: int | None = field(default=None, metadata=_INPUTS)
    holdout: float | None = field(default=None, metadata=_INPUTS)
    open_set: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backbone", full_name(self.backbone))  # the same run, whatever it is called
        if self.tasks is not None and self.tasks < 1:
            raise OneaError(f"tasks is {self.tasks}; there must be at least 1.")
        if not 0 <= self.seed <= LARGEST:
            raise OneaError(f"seed is {self.seed}; choose a whole number from 0 to {LARGEST:,}.")
        if self.depth < 0:
            raise OneaError(f"depth is {self.depth}; give the number of blocks to use, or 0 for all.")
        if self.image_size is not None:
            check_image_size(self.image_size)
        check_threads(self.threads)
        if self.budget is not None and not 0 < self.budget <= _PETABYTE:
            raise OneaError(
                f"budget is {self.budget}; give the gigabytes that images may take, above 0 and up to {_PETABYTE:,}."
            )
        if self.cache_gb is not None and not 0 <= self.cache_gb <= _PETABYTE:
            raise OneaError(
                f"cache_gb is {self.cache_gb}; give the gigabytes that features may take, up to {_PETABYTE:,}, or 0 "
                "for none."
            )
        for name in ("data", "root", "backbone"):
            if not _can_be_path(getattr(self, name) or ""):
                raise OneaError(f"{name} holds a character that no path can hold; correct it.")

    def identity(self) -> dict[str, Any]:
        """The values that distinguish this run from another; runs with equal ones give equal results."""
        values = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in _RESOURCES and (name in _ALWAYS or value != self.__dataclass_fields__[name].default)
        }
        # Files had nothing in front of their names when all were taken for plain ones.
        values["backbone"] = self.backbone.removeprefix(f"{PLAIN}:")
        return values | {"store": "exact" if self.store == "exact" else "packed"}

    def key(self) -> str:
        """A short digest of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:12]

    def folder(self) -> Path:
        """The default folder of the run."""
        start, end = f"{self.method}-", f"-seed{self.seed}-{self.key()}"
        room = _LONGEST_NAME - len(f"{start}{end}".encode())
        name = data_name(self.data)
        while len(os.fsencode(name)) > room:
            name = name[:-1]  # a whole character
        return Path("runs") / f"{start}{name}{end}"


def _can_be_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a character
        return False


def make_config(values: dict[str, Any]) -> RunConfig:
    """A checked configuration from loose values: names of ``RunConfig`` and, for the rest, options of the method.

    >>> make_config({"method": "one-a", "tasks": "10", "kappa": "5"}).options
    {'kappa': 5.0}
    """
    from onea.research.methods import method_class

    names = {item.name for item in dataclasses.fields(RunConfig)} - {"options"}
    values = {name.replace("-", "_"): value for name, value in values.items() if value is not None}
    given = dict(values.pop("options", None) or {})
    common = {name: value for name, value in values.items() if name in names}
    given |= {name: value for name, value in values.items() if name not in names}
    if isinstance(common.get("sizes"), list | tuple):
        common["sizes"] = ",".join(str(size) for size in common["sizes"])
    config = make_options(RunConfig, common)
    kind = method_class(config.method).Options
    known = {item.name for item in dataclasses.fields(kind)}
    given = upgraded(kind, given)
    if unknown := next((name for name in given if name not in known), None):
        from onea.errors import did_you_mean

        raise OneaError(f"Unknown option '{unknown}' for {config.method}; {did_you_mean(unknown, names | known)}")
    checked: Any = make_options(kind, given)  # reads text as numbers and refuses what makes no sense
    options = {name: getattr(checked, name) for name in given}
    return dataclasses.replace(config, options=options)


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a YAML file."""
    yaml = import_extra("yaml", "research")

    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)  # not all of it: it may be a device without an end
        if len(content) > _LONGEST_FILE:
            raise OneaError(f"Config file {path} has more than a megabyte; give one with 'option: value' lines.")
        loaded = _loaded(content.decode())
    except OSError as error:
        raise OneaError(f"Config file {path} cannot be read ({error.strerror}); check the path.") from error
    except OneaError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML meets a tag on something else (!!bool x, !!timestamp x) with almost any of them.
        raise OneaError(f"Config file {path} is not valid YAML: {truncate(' '.join(str(error).split()))}.") from error
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise OneaError(f"Config file {path} must hold 'option: value' lines, each option a word.")
    inner = loaded.get("options") or {}
    if not isinstance(inner, dict) or not all(isinstance(key, str) for key in inner):
        raise OneaError(f"'options' in {path} must itself hold 'option: value' lines.")
    return loaded


def _loaded(text: str) -> Any:
    """The value that YAML stands for; of a name that is there twice it would keep one without a word.

    Raises:
        ValueError: a name is there twice, or its aliases stand for more values than it has characters.
    """
    yaml = import_extra("yaml", "research")

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        waiting, left = [node], len(text)
        while waiting:
            inner = waiting.pop()
            if isinstance(inner, yaml.CollectionNode):
                if isinstance(inner, yaml.MappingNode):
                    _check_once([key.value for key, _ in inner.value if isinstance(key, yaml.ScalarNode)])
                parts = [part for each in inner.value for part in (each if isinstance(each, tuple) else (each,))]
                waiting += parts
                left -= len(parts)
            if left < 0:
                raise ValueError("its aliases stand for too many values")
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _check_once(names: list[str]) -> None:
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise ValueError(f"'{twice}' is there twice")
