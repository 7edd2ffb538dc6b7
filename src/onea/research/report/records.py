# SPDX-License-Identifier: Apache-2.0
"""Records of runs: loaded from disk, named for tables and legends, finished or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from onea.errors import OneaError
from onea.files import check_path
from onea.options import with_defaults
from onea.research.record import FILES, NAME, Record, find_record_files, is_reportable, read_record_file


def load_records(place: str | Path) -> list[Record]:
    """All records at or below a folder, in a file, or at or below whatever a pattern such as ``runs/one-a-*`` matches.

    Raises:
        OneaError: if there is none, or one of them cannot be read.
    """
    given = Path(place)
    check_path(given)
    roots = [given] if given.exists() else _matching(given)
    if not roots:
        raise OneaError(f"{place} does not exist; give a run's folder, a folder of runs or a pattern in quotes.")
    files = [file for root in roots for file in ([root] if root.is_file() else find_record_files(root))]
    if not files:
        raise OneaError(f"There is no {NAME} in or below {place}; `onea run` writes one after its first task.")
    return [_read(file) for file in dict.fromkeys(files)]


def split_by_classifier(record: Record) -> list[Record]:
    """A record, and another one for every further classifier that was scored in the same run."""
    from onea.metrics import summarise  # numpy takes a while

    found = [record]
    for name, correct in (record.get("classifiers") or {}).items():
        options = {"classifier": name, "classifier_options": "", "compare_classifiers": ""}
        changes: Record = {
            "config": record["config"] | {"options": (record["config"].get("options") or {}) | options},
            "options": (record.get("options") or {}) | options,
            "correct": correct,
            "classifiers": {},
            "metrics": summarise(correct, record["total"], record["stream"]["sizes"]),
            "cost": [],  # measured for the classifier that answered
            "open_set": [],  # likewise
        }
        found.append(record | changes)
    return found


def with_default_options(records: Sequence[Record]) -> list[Record]:
    """Records with the defaults of options that were added to a method after their runs.

    Records of methods that are not installed here stay as they are.
    """
    from onea.research.methods import method_class

    found = []
    for record in records:
        try:
            kind = method_class(record["config"]["method"]).Options
        except OneaError:
            found.append(record)
        else:
            found.append(record | {"options": with_defaults(kind, record.get("options") or {})})
    return found


def _matching(pattern: Path) -> list[Path]:
    """What a pattern names: folders and records, or other files where it names only such.

    A report lies beside the runs it is about, and ``runs/*`` means the runs.
    """
    if not pattern.parts:
        return []
    found = sorted(Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor))))
    return [place for place in found if place.is_dir() or place.name in FILES] or found


def _read(file: Path) -> Record:
    record = read_record_file(file)
    if not is_reportable(record):
        raise OneaError(f"{file} is damaged; restore it from a copy, or move it out of the way.")
    return record


def labels(records: Sequence[Record]) -> list[str]:
    """A name for each record: its title where a caller gave one, else its method; with the seed where two agree.

    >>> labels([{"config": {"method": "one-a", "seed": 1}}, {"config": {"method": "one-a", "seed": 2}}])
    ['one-a (seed 1)', 'one-a (seed 2)']
    """
    plain = [_name(record) for record in records]
    names = [
        f"{name} (seed {record['config']['seed']})" if plain.count(name) > 1 else name
        for name, record in zip(plain, records, strict=True)
    ]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name} #{seen[name]}"
    return names


def finished(record: Record) -> bool:
    """Whether a run has reached its last task."""
    return bool(record["status"] == "finished")


def _name(record: Record) -> str:
    return str(record.get("title") or record["config"]["method"])


def count_shared_adapters(record: Record) -> int:
    """How many tasks of a run use an adapter that another run trained, whose time is not counted."""
    return sum(bool(task.get("training_shared")) for task in record["tasks"])


def shared_adapters_note(record: Record) -> str:
    """The sentence beside the seconds of a run that used adapters of another run."""
    return (
        f"{count_shared_adapters(record)} of {len(record['tasks'])} adapters were trained by another run here, "
        "their training is not counted"
    )
