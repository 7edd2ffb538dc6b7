# SPDX-License-Identifier: Apache-2.0
"""Merge adapter files: safetensors with plain matrices, states of research runs, and PEFT's LoRA folders."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from onea import __version__
from onea.errors import OneaError, truncate
from onea.files import check_path, read_regular, read_tensors, write_atomically, write_error, write_json
from onea.merging import make_operator, operator_class
from onea.merging.lora import CONFIG, WEIGHTS, Lora, check_compatible, read_lora, write_lora
from onea.merging.operator import Sizes, check_mergeable, check_no_overflow
from onea.options import LARGEST
from onea.schema import MAX_NUMBER
from onea.tensors import Tensors, select_prefix
from onea.text import utc_timestamp

_ADAPTER_PREFIX = "adapter."  # of the adapter's tensors in the state of a run
CARD = "merge.json"


@dataclass(frozen=True)
class Source:
    """One input.

    Attributes:
        tensors: the tensors to merge.
        description: path, kind and digests, for the card.
        lora: the adapter, if it is a LoRA folder.
        counts: classes and samples, if the file has them.
    """

    tensors: Tensors
    description: dict[str, Any]
    lora: Lora | None = None
    counts: tuple[int, int] | None = None


def merge_files(
    inputs: Sequence[Path | str],
    out: Path | str,
    *,
    operator: str = "one-a",
    options: Mapping[str, Any] | None = None,
    classes: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
    rank: int | None = None,
) -> dict[str, Any]:
    """Merge two or more adapters from left to right, write the result and its card (JSON), and return the card.

    >>> import tempfile, torch
    >>> from safetensors.torch import load_file, save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, value in (("a", 0.0), ("b", 1.0)):
    ...     save_file({"up": torch.full((2, 2), value)}, folder / f"{name}.safetensors")
    >>> inputs, out = [folder / "a.safetensors", folder / "b.safetensors"], folder / "merged.safetensors"
    >>> merge_files(inputs, out, operator="weighted-mean", classes=[3, 1])["operator"]
    'weighted-mean'
    >>> load_file(out)["up"][0]
    tensor([0.2500, 0.2500])

    Args:
        inputs: ``.safetensors`` files, or PEFT LoRA folders.
        out: a ``.safetensors`` file or, for LoRA, a folder; must not exist. The card is ``OUT.merge.json`` or, for
            LoRA, ``merge.json`` inside the folder.
        operator: a name in ``OPERATORS``.
        options: options of the operator.
        classes: number of classes of each input; states of research runs include it.
        samples: number of samples that each input was trained on; by default the same as the classes.
        rank: rank of a LoRA result; by default the rank of the merged updates.
    """
    kind = operator_class(operator)
    if getattr(kind, "needs", ""):
        raise OneaError(
            f"{kind.title} needs statistics of the training data, which plain files do not have; choose another "
            f"operator or train with `onea run adapter --merge {operator}`."
        )
    merge = make_operator(operator, **(options or {}))
    paths, out = [Path(path) for path in inputs], Path(out)
    _check_request(paths, out, classes, samples, rank)
    first = read_source(paths[0])
    _check_result(first, out, rank)
    counts = [_class_and_sample_counts(0, first, classes, samples)]
    descriptions, merged = [first.description], first.tensors
    state: Tensors = {}
    for index, path in enumerate(paths[1:], 1):
        source = read_source(path)
        _check_same_kind(first, source)
        merged_classes, merged_samples = map(sum, zip(*counts, strict=True))
        counts.append(_class_and_sample_counts(index, source, classes, samples))
        try:
            sizes = Sizes(merged_classes, counts[-1][0], merged_samples, counts[-1][1])
            check_mergeable(merged, source.tensors)  # a third-party operator may not check this
            merged, state = merge(merged, source.tensors, sizes, state)
        except OneaError as error:
            raise OneaError(f"{path}: {error}") from error
        descriptions.append(source.description)
    card = {
        "operator": operator,
        "options": dataclasses.asdict(merge) if dataclasses.is_dataclass(merge) else {},
        "inputs": [
            description | {"classes": count[0], "samples": count[1]}
            for description, count in zip(descriptions, counts, strict=True)
        ],
        "samples_are": "given" if samples else "as in the files" if not classes else "taken equal to classes",
        "onea": __version__,
        "date": utc_timestamp(),
    }
    return _write(out, first, merged, rank, card)


def parse_counts(name: str, text: str) -> list[int]:
    """Whole numbers separated by commas.

    >>> parse_counts("classes", "40,5")
    [40, 5]
    """
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise OneaError(
            f"--{name} is '{truncate(text)}'; write whole numbers separated by commas, such as 40,5."
        ) from None
    if max(counts) > LARGEST:
        raise OneaError(f"--{name} is {truncate(text)}; no number may be larger than {LARGEST:,}.")
    return counts


def read_source(path: Path) -> Source:
    """Read an input file or folder."""
    if path.is_dir():
        return _read_lora_folder(path)
    if path.suffix != ".safetensors":
        raise OneaError(f"{path} is not a .safetensors file or a LoRA folder; other formats are not supported.")
    tensors, digest = _read_tensors(path)
    description: dict[str, Any] = {"path": str(path), "kind": "matrices", "sha256": digest}
    if "prototypes" in tensors and "merged" in tensors and (adapter := select_prefix(_ADAPTER_PREFIX, tensors)):
        left_out = sorted(name for name in tensors if not name.startswith(_ADAPTER_PREFIX))
        description |= {"kind": "state of a run", "left_out": left_out}
        return Source(adapter, description, counts=_state_counts(tensors["merged"]))
    for name, value in tensors.items():
        if ".lora_" in name:
            raise OneaError(f"{path} has LoRA factors without their scale; give the folder with its {CONFIG}.")
        if not value.is_floating_point():
            raise OneaError(
                f"{path}: '{name}' has dtype {value.dtype}, so it is not a weight; remove it from the file."
            )
    if not tensors:
        raise OneaError(f"{path} has no tensors; there is nothing to merge.")
    return Source(tensors, description)


def _state_counts(merged: Tensor) -> tuple[int, int] | None:
    """The numbers of classes and samples in the state of a run; None if they are invalid."""
    counts = merged.flatten().tolist()
    if merged.shape != (2,) or not all(type(count) is int and 0 < count < MAX_NUMBER for count in counts):
        return None
    return counts[0], counts[1]


def _read_lora_folder(folder: Path) -> Source:
    if not (folder / CONFIG).exists():
        raise OneaError(f"{folder} has no {CONFIG}; give a PEFT LoRA folder or a .safetensors file.")
    if not (folder / WEIGHTS).exists():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        if pickled:
            raise OneaError(
                f"{folder} has {pickled[0]}, a pickle, which could run code and is never opened; load it in PEFT and "
                "save it as safetensors."
            )
        raise OneaError(f"{folder} has no {WEIGHTS}; download it again.")
    tensors, digest = _read_tensors(folder / WEIGHTS)
    lora = read_lora(folder, tensors)
    description = {
        "path": str(folder),
        "kind": "LoRA",
        "sha256": digest,
        "config_sha256": hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest(),
        "base_model": lora.config.get("base_model_name_or_path"),
    }
    return Source(lora.deltas, description, lora)


def _read_tensors(path: Path) -> tuple[Tensors, str]:
    content = read_regular(path, sys.maxsize, follow=True)  # refuses pipes, which could block for ever
    return read_tensors(content, str(path), "download it again"), hashlib.sha256(content).hexdigest()


def _check_request(
    inputs: Sequence[Path], out: Path, classes: Sequence[int] | None, samples: Sequence[int] | None, rank: int | None
) -> None:
    if len(inputs) < 2:
        raise OneaError(f"Merging needs at least two inputs; got {len(inputs)}.")
    for name, counts in (("classes", classes), ("samples", samples)):
        if counts is not None and (len(counts) != len(inputs) or min(counts) < 1):
            raise OneaError(
                f"--{name} is {','.join(map(str, counts))}; it needs a positive number for each of the "
                f"{len(inputs)} inputs, such as 40,5."
            )
    if rank is not None and rank < 1:
        raise OneaError(f"rank is {rank}; it must be at least 1.")
    if not out.name:
        raise OneaError("The output needs a name; add -o merged.safetensors.")
    for path in (*inputs, out, _card_path(out)):
        check_path(path)
    for path in (out, _card_path(out)):
        if path.exists():
            raise OneaError(f"{path} already exists; delete it or choose another name.")


def _check_result(first: Source, out: Path, rank: int | None) -> None:
    if first.lora is not None:
        if out.suffix == ".safetensors":
            raise OneaError(
                f"{out} has the name of a file, but LoRA folders are merged into a folder; name it {out.stem}."
            )
        return
    if rank is not None:
        raise OneaError("--rank is for LoRA folders only; plain matrices keep their shape.")
    if out.suffix != ".safetensors":
        raise OneaError(f"{out} must end in .safetensors; name it {out.name}.safetensors.")


def _class_and_sample_counts(
    index: int, source: Source, classes: Sequence[int] | None, samples: Sequence[int] | None
) -> tuple[int, int]:
    if classes is not None:
        counts = classes[index], classes[index]
    elif source.counts is not None:
        counts = source.counts
    else:
        path = source.description["path"]
        raise OneaError(f"{path} does not include its number of classes; give --classes, such as 40,5.")
    return counts[0], samples[index] if samples else counts[1]


def _check_same_kind(first: Source, other: Source) -> None:
    names = first.description["path"], other.description["path"]
    if first.lora is None and other.lora is None:
        return
    if first.lora is None or other.lora is None:
        raise OneaError(f"{names[0]} and {names[1]} are of different kinds; merge LoRA folders only with LoRA folders.")
    check_compatible(first.lora, other.lora, names)


def _write(out: Path, first: Source, merged: Tensors, rank: int | None, card: dict[str, Any]) -> dict[str, Any]:
    if first.lora is not None:
        files, result = write_lora(first.lora, merged, rank)
        card |= result
        _write_folder(out, files | {CARD: (json.dumps(card, indent=1, allow_nan=False) + "\n").encode()})
        return card
    card["truncation_error"] = None  # only LoRA factors are truncated
    tensors = {name: value.contiguous() for name, value in merged.items()}
    check_no_overflow(tensors)
    write_json(_card_path(out), card)
    try:
        write_atomically(out, save(tensors, {"format": "pt"}))
    except BaseException:  # also Ctrl-C: a card without a result would block the next attempt
        _card_path(out).unlink(missing_ok=True)
        raise
    return card


def _card_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.{CARD}")


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files or none: into a hidden folder, which is renamed at the end."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        for name, content in files.items():
            write_atomically(partial / name, content)
        partial.replace(folder)
    except OSError as error:
        raise write_error(folder.parent, sum(map(len, files.values())), error, "choose another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
