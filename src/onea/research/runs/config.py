# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run, from the command line or a YAML file, and its hash."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from onea.errors import OneaError, did_you_mean, import_extra, truncate
from onea.options import LARGEST, MachineOptions, check_threads, make_options
from onea.research.data import data_name
from onea.research.methods.presets import Preset
from onea.research.runs.stream_file import SUFFIX, read_stream_file, stream_options
from onea.vit.network_config import BUNDLED, PLAIN, check_image_size

_PETABYTE = 1_000_000  # in gigabytes
_MAX_NAME_BYTES = 255  # on all common file systems
_MAX_YAML_BYTES = 1_000_000
# Resources of the machine, which do not change the result.
_NOT_IN_IDENTITY = ("root", "device", "threads", "compile", "store", "budget", "cache_gb")
_SET_BY_STREAM_FILE = ("tasks", "gamma", "sizes", "order", "long_tail")
NOT_OPTIONS = ("options", "stream_file")  # fields that other options set
# A field that is added later must not be listed here: it is part of the identity only where it differs from its
# default, so that the hashes of existing records stay the same.
_ALWAYS_IN_IDENTITY = {
    *("method", "data", "backbone", "stream", "tasks", "gamma", "sizes", "order", "long_tail", "seed", "preset"),
    *("normalise", "geometry", "protocol", "precision", "on_bad", "per_class", "holdout", "options"),
}
_INPUTS, _STREAM, _MACHINE = ({"panel": name} for name in ("Images and network", "Stream", "Machine"))  # in --help


@dataclass(frozen=True)
class RunConfig(MachineOptions):
    """Everything that defines a run. The fields are options of the command line and keys of a YAML file.

    >>> config = RunConfig(method="one-a", data="cifar100", tasks=10, seed=1)
    >>> config.gamma, config.folder().name == f"one-a-cifar100-seed1-{config.key()}"
    (0.01, True)

    Attributes:
        method: name of a method; ``onea methods`` lists them.
        data: name of a dataset (``onea methods --datasets`` lists them), ``folder:PATH`` or
            ``list:TRAIN.txt,TEST.txt``.
        root: folder of downloaded datasets.
        backbone: the bundled network, timm ``architecture.tag`` or ``.safetensors`` file; for a file without
            metadata of its architecture ``architecture.tag:file``, or ``plain:file``.
        depth: number of transformer blocks to use; features are the output of the last of them. 0 uses all.
        image_size: input size of the network in pixels; by default that of its weights (of the bundled one: 168).
        stream: task sizes: ``step`` (imbalanced), ``balanced``, ``sizes`` (as listed by ``--sizes``), ``natural`` (the
            dataset's groups), ``auto`` (``sizes`` with ``--sizes``, ``natural`` for a dataset with groups and
            without ``--tasks``, else ``step``), or the path of a JSON file that ``onea stream --json`` wrote.
        tasks: number of tasks.
        gamma: step imbalance: size of the smallest task relative to the largest; 1 is balanced.
        sizes: number of classes of each task, such as ``36,1,14``.
        order: task order: ``shuffled``, ``descending`` (largest first) or ``given`` (not shuffled).
        long_tail: also make the number of images per class long-tailed: ratio of the images of the
            rarest class to those of the most frequent one, such as 0.1.
        seed: random seed of the class order, the task order, the initial weights and the sampling.
        preset: hyper-parameters: ``auto`` (computed from the number of images, classes and tasks, the same for all
            methods), ``paper`` or ``paper/NAME`` (as published, in general or for the dataset NAME).
        normalise: ``backbone`` (mean and standard deviation of the pretrained weights) or ``none`` (pixels in [0, 1]).
        geometry: how test images are resized: ``direct`` (to the input size), ``resize-crop`` (resize, then center
            crop) or ``backbone`` (crop and interpolation of the pretrained weights).
        protocol: ``pilot`` sets normalise none and geometry resize-crop, as in the published protocol.
        compile: compile the network: ``yes``, ``no`` or ``auto`` (on a GPU and with many images).
        store: where decoded images are stored: ``auto``, ``device``, ``host`` or ``disk``; ``exact`` reads the original
            files in every epoch.
        budget: memory for images in gigabytes.
        cache_gb: host memory in gigabytes for cached test features of frozen modules; 0 disables the cache. The default
            is half of the free memory.
        per_class: maximum number of training images per class, sampled with the seed.
        holdout: evaluate on this fraction of the training images, held out at random, instead of on the test images.
        open_set: after each task, also score the test images of future classes and record the AUROC of seen against
            unseen classes.
        options: options of the method.
        stream_file: content of the file of the stream.
    """

    method: str = "one-a"
    data: str = field(default="glyphs-mini", metadata=_INPUTS)
    root: str | None = field(default=None, metadata=_INPUTS)
    backbone: str = field(default=BUNDLED, metadata=_INPUTS)
    depth: int = field(default=0, metadata=_INPUTS)
    image_size: int | None = field(default=None, metadata=_INPUTS)
    stream: Literal["auto", "step", "balanced", "sizes", "natural", "file"] = field(default="auto", metadata=_STREAM)
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
    stream_file: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.stream == "file") != (self.stream_file is not None):
            raise OneaError("stream 'file' needs the file; give its path, which ends with .json, as the stream.")
        if self.tasks is not None and self.tasks < 1:
            raise OneaError(f"tasks is {self.tasks}; there must be at least 1.")
        if not 0 <= self.seed <= LARGEST:
            raise OneaError(f"seed is {self.seed}; choose a whole number from 0 to {LARGEST:,}.")
        if self.depth < 0:
            raise OneaError(f"depth is {self.depth}; choose the number of transformer blocks to use, or 0 for all.")
        if self.image_size is not None:
            check_image_size(self.image_size)
        check_threads(self.threads)
        if self.budget is not None and not 0 < self.budget <= _PETABYTE:
            raise OneaError(
                f"budget is {self.budget}; choose the memory for images in gigabytes, above 0 and up to {_PETABYTE:,}."
            )
        if self.cache_gb is not None and not 0 <= self.cache_gb <= _PETABYTE:
            raise OneaError(
                f"cache_gb is {self.cache_gb}; choose the memory for features in gigabytes, up to {_PETABYTE:,}, or 0 "
                "for no cache."
            )
        for name in ("data", "root", "backbone"):
            if not _is_valid_path(getattr(self, name) or ""):
                raise OneaError(f"{name} has a character that is not allowed in a path; correct it.")

    def identity(self) -> dict[str, Any]:
        """The values that determine the result; runs with equal values have equal results."""
        values = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in _NOT_IN_IDENTITY
            and (name in _ALWAYS_IN_IDENTITY or value != self.__dataclass_fields__[name].default)
        }
        values["backbone"] = self.backbone.removeprefix(f"{PLAIN}:")  # the prefix is not hashed
        return values | {"store": "exact" if self.store == "exact" else "packed"}

    def key(self) -> str:
        """A short hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:12]

    def folder(self) -> Path:
        """The default folder of the run."""
        start, end = f"{self.method}-", f"-seed{self.seed}-{self.key()}"
        max_bytes = _MAX_NAME_BYTES - len(f"{start}{end}".encode())
        name = data_name(self.data)
        while len(os.fsencode(name)) > max_bytes:
            name = name[:-1]
        return Path("runs") / f"{start}{name}{end}"


def _is_valid_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate
        return False


def make_config(values: dict[str, Any]) -> RunConfig:
    """A validated configuration; names that are not fields of ``RunConfig`` are options of the method.

    >>> make_config({"method": "one-a", "tasks": "10", "kappa": "5"}).options
    {'kappa': 5.0}
    """
    from onea.research.methods import method_class

    run_names = {item.name for item in dataclasses.fields(RunConfig)} - {*NOT_OPTIONS}
    values = {name.replace("-", "_"): value for name, value in values.items() if value is not None}
    method_values = {name.replace("-", "_"): value for name, value in (values.pop("options", None) or {}).items()}
    run_values = {name: value for name, value in values.items() if name in run_names}
    method_values |= {name: value for name, value in values.items() if name not in run_names}
    if isinstance(run_values.get("sizes"), list | tuple):
        run_values["sizes"] = ",".join(str(size) for size in run_values["sizes"])
    stream = run_values.get("stream")
    if isinstance(stream, dict) or (isinstance(stream, str) and stream.endswith(SUFFIX)):
        run_values = _with_stream_file(run_values)
    config = make_options(RunConfig, run_values)
    options_class = method_class(config.method).Options
    method_names = {item.name for item in dataclasses.fields(options_class)}
    if unknown := next((name for name in method_values if name not in method_names), None):
        raise OneaError(
            f"Unknown option '{unknown}' for {config.method}; {did_you_mean(unknown, run_names | method_names)}"
        )
    options: Any = make_options(options_class, method_values)  # converts text to numbers and validates them
    return dataclasses.replace(config, options={name: getattr(options, name) for name in method_values})


def _with_stream_file(values: dict[str, Any]) -> dict[str, Any]:
    """Values with those of the file that ``stream`` names, or whose content it is."""
    source = values["stream"]
    content = source if isinstance(source, dict) else read_stream_file(Path(source))
    from_file = stream_options(content, "'stream'" if source is content else source)
    if clash := next((name for name in _SET_BY_STREAM_FILE if name in values), None):
        raise OneaError(f"{clash} has no effect on a stream from a file; leave it out.")
    if from_file["stream_file"]["samples"] and values.get("seed", from_file.get("seed")) != from_file.get("seed"):
        raise OneaError("The images of a long-tailed stream from a file depend on its seed; leave out the seed.")
    return from_file | {name: value for name, value in values.items() if name != "stream"}


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a YAML file."""
    yaml = import_extra("yaml", "research")

    try:
        with path.open("rb") as file:
            content = file.read(_MAX_YAML_BYTES + 1)  # limited, because the path may be an endless device
        if len(content) > _MAX_YAML_BYTES:
            raise OneaError(f"Config file {path} is larger than a megabyte; give a file with 'option: value' lines.")
        values = _parse_yaml(content.decode())
    except OSError as error:
        raise OneaError(f"Config file {path} cannot be read ({error.strerror}); check the path.") from error
    except OneaError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML raises any of these for a tag on a value of another type (!!bool x, !!timestamp x).
        raise OneaError(f"Config file {path} is not valid YAML: {truncate(' '.join(str(error).split()))}.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise OneaError(f"Config file {path} must consist of 'option: value' lines.")
    options = values.get("options") or {}
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise OneaError(f"'options' in {path} must consist of indented 'option: value' lines.")
    return values


def _parse_yaml(text: str) -> Any:
    """The value of a YAML document; PyYAML alone would silently keep the last of duplicate keys.

    Raises:
        ValueError: a key is duplicate, or aliases expand to more values than the document has characters.
    """
    yaml = import_extra("yaml", "research")

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        stack, max_values = [node], len(text)
        while stack:
            parent = stack.pop()
            if isinstance(parent, yaml.CollectionNode):
                if isinstance(parent, yaml.MappingNode):
                    keys = Counter(key.value for key, _ in parent.value if isinstance(key, yaml.ScalarNode))
                    if duplicate := next((key for key, count in keys.items() if count > 1), None):
                        raise ValueError(f"duplicate key '{duplicate}'")
                children = [node for item in parent.value for node in (item if isinstance(item, tuple) else (item,))]
                stack += children
                max_values -= len(children)
            if max_values < 0:
                raise ValueError("its aliases expand to too many values")
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()
