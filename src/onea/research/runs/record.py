# SPDX-License-Identifier: Apache-2.0
"""The record: one JSON file that says everything about a run, and the checkpoint it points to."""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_safetensors

from onea import __version__
from onea.errors import OneaError, short
from onea.files import CHECKSUM, open_plain, read_tensors, write_atomically
from onea.options import completed
from onea.research.methods import method_class
from onea.research.record import Record, read_record, record_path, tidy, write_record
from onea.research.record_shape import can_be_continued
from onea.research.runs.config import RunConfig
from onea.tensors import Tensors

_VOLATILE = ("timings", "memory", "dates", "environment", "stamps", CHECKSUM)  # differ between two equal runs


def comparable_fields(record: Record) -> dict[str, Any]:
    """The fields of a record in which two runs with the same configuration agree, bit for bit."""
    return {key: copy.deepcopy(value) for key, value in record.items() if key not in _VOLATILE}


def read_run(folder: Path) -> Record | None:
    """The record in a run's folder, checked to be whole enough to be shown or continued."""
    record = read_record(folder)
    if record is not None and not can_be_continued(record):
        file = record_path(folder)
        raise OneaError(f"{file} is damaged; restore it from a copy, or delete that folder to run it again.")
    return record


def check_same_run(record: Record, config: RunConfig, folder: Path) -> None:
    """Refuse to continue somebody else's run."""
    mine, theirs = config.identity(), record["config"]
    if names := different(mine, theirs):
        changes = ", ".join(f"{name} {short(theirs.get(name))} instead of {short(mine.get(name))}" for name in names)
        raise OneaError(f"{folder} holds another run ({changes}); choose another --out or delete that folder.")


def check_same_inputs(record: Record, description: Record, folder: Path) -> None:
    """Refuse to continue on images, weights or options that have changed since.

    An older record may not hold every digest or licence, nor the options that came later: it ran with their defaults.
    """
    kind = method_class(record["config"]["method"]).Options
    record = record | {"options": completed(kind, record["options"])}
    data, backbone = ({name: description[what].get(name) for name in record[what]} for what in ("data", "backbone"))
    description = description | {"data": data, "backbone": backbone}
    for what in ("data", "backbone", "preprocess", "stream", "options"):
        if record[what] != description[what]:
            names = ", ".join(different(record[what], description[what]))
            raise OneaError(
                f"The {what} of the run in {folder} changed since it began ({names}); choose another --out."
            )


def different(record: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names under which two parts of records differ."""
    return sorted(name for name in record.keys() | other.keys() if record.get(name) != other.get(name))


def save_checkpoint(folder: Path, record: Record, state: Tensors) -> None:
    """Write the method's state, then the record that points to it; a kill in between leaves the older pair intact."""
    name = f"state-{len(record['correct']):03d}.safetensors"
    content = save_safetensors({key: value.detach().cpu().contiguous() for key, value in state.items()})
    write_atomically(folder / name, content)
    record["checkpoint"] = {"file": name, "sha256": hashlib.sha256(content).hexdigest()}
    write_record(folder, record)
    tidy(folder, record)


def load_checkpoint(folder: Path, record: Record) -> Tensors:
    """The state that the record points to."""
    path = folder / record["checkpoint"]["file"]
    try:
        file, _ = open_plain(path, follow=True)
    except OneaError as error:
        raise OneaError(f"Checkpoint {path} is missing or cannot be read; delete {folder} to start over.") from error
    with file:
        if hashlib.file_digest(file, "sha256").hexdigest() != record["checkpoint"]["sha256"]:
            raise OneaError(f"Checkpoint {path} is damaged (truncated or changed); delete {folder} to start over.")
        file.seek(0)
        return read_tensors(file.read(), f"Checkpoint {path}", f"delete {folder} to start over")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, source and hardware."""
    packages = ("torch", "torchvision", "timm", "safetensors", "numpy", "pillow")
    return {
        "onea": __version__,
        "git": git_hash(Path(__file__).parent),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def peak_memory(device: torch.device) -> dict[str, int]:
    """Largest memory this process has held so far, in bytes: the host's, and the device's where there is one.

    Windows does not tell Python the host's.
    """
    peak = {}
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_reserved(device)  # what recorded graphs keep is not counted as allocated
    return peak


def git_hash(folder: Path) -> str | None:
    """The commit of a checkout of onea that this folder of its code is in; none where onea was installed.

    A repository around an environment is that of something else. Only the place tells: a copy of a checkout may lack
    what git would look the files up in.

    >>> git_hash(Path("nowhere"))
    """
    asked = ["git", "-C", str(folder), "rev-parse", "--show-prefix", "HEAD"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    place, _, commit = found.stdout.strip().partition("\n")
    return commit if found.returncode == 0 and place == "src/onea/runs/" else None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="ignore").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
