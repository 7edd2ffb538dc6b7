# SPDX-License-Identifier: Apache-2.0
"""Loading records of runs, and naming them in tables and legends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onea.errors import OneaError
from onea.files import check_path
from onea.options import with_defaults
from onea.research.record import FILES, NAME, Record, find_record_files, is_reportable, read_record_file


def load_records(source: str | Path) -> list[Record]:
    """The records of a file, of a folder and its subfolders, or of all matches of a pattern such as ``runs/one-a-*``.

    Raises:
        OneaError: if there is none, or one of them cannot be read.
    """
    path = Path(source)
    check_path(path)
    roots = [path] if path.exists() else _matching(path)
    if not roots:
        raise OneaError(f"{source} does not exist; give a run's folder, a folder of runs or a pattern in quotes.")
    files = [file for root in roots for file in ([root] if root.is_file() else find_record_files(root))]
    if not files:
        raise OneaError(f"There is no {NAME} in or below {source}; `onea run` writes one after its first task.")
    return [_read(file) for file in dict.fromkeys(files)]


def split_by_classifier(record: Record) -> list[Record]:
    """A record, and a copy of it for each further classifier that was scored in the same run."""
    from onea.metrics import summarise  # numpy takes a while

    records = [record]
    for name, correct in (record.get("classifiers") or {}).items():
        options = {"classifier": name, "classifier_options": "", "compare_classifiers": ""}
        changes: Record = {
            "config": record["config"] | {"options": (record["config"].get("options") or {}) | options},
            "options": (record.get("options") or {}) | options,
            "correct": correct,
            "classifiers": {},
            "metrics": summarise(correct, record["total"], record["stream"]["sizes"]),
            "cost": [],  # cost and open-set scores were measured for the run's own classifier only
            "open_set": [],
        }
        records.append(record | changes)
    return records


def with_default_options(records: Sequence[Record]) -> list[Record]:
    """Records with the defaults of options that were added to a method after their runs.

    Records of methods that are not installed are not changed.
    """
    from onea.research.methods import method_class

    completed = []
    for record in records:
        try:
            kind = method_class(record["config"]["method"]).Options
        except OneaError:
            completed.append(record)
        else:
            completed.append(record | {"options": with_defaults(kind, record.get("options") or {})})
    return completed


def _matching(pattern: Path) -> list[Path]:
    """The matching folders and records; other files (``runs/*`` may match a report) only if nothing else matches."""
    if not pattern.parts:
        return []
    paths = sorted(Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor))))
    return [path for path in paths if path.is_dir() or path.name in FILES] or paths


def _read(file: Path) -> Record:
    record = read_record_file(file)
    if not is_reportable(record):
        raise OneaError(f"{file} is damaged; restore it from a backup, or move it elsewhere.")
    return record


def run_title(record: Record) -> str:
    """The title that a caller added to a record, else its method."""
    return str(record.get("title") or record["config"]["method"])


def labels(records: Sequence[Record]) -> list[str]:
    """A unique name for each record: its title, with the seed where two titles are equal.

    >>> labels([{"config": {"method": "one-a", "seed": 1}}, {"config": {"method": "one-a", "seed": 2}}])
    ['one-a (seed 1)', 'one-a (seed 2)']
    """
    titles = [run_title(record) for record in records]
    names = [
        f"{title} (seed {record['config']['seed']})" if titles.count(title) > 1 else title
        for title, record in zip(titles, records, strict=True)
    ]
    repeats = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name} #{repeat + 1}" if repeat else name for name, repeat in zip(names, repeats, strict=True)]


def finished(record: Record) -> bool:
    """Whether a run has finished its last task."""
    return bool(record["status"] == "finished")


def count_shared_adapters(record: Record) -> int:
    """Number of tasks whose adapter was trained by another run; its time is not in the record."""
    return sum(bool(task.get("training_shared")) for task in record["tasks"])


def shared_adapters_note(record: Record) -> str:
    """The note on the training time of a run with adapters of another run."""
    return (
        f"{count_shared_adapters(record)} of {len(record['tasks'])} adapters were trained by another run; "
        "their training time is not counted"
    )
