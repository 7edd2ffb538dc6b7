# SPDX-License-Identifier: Apache-2.0
"""What to know about the results, in sentences that follow the records: who leads, and which rows to read with care."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import evidence
from evidence import ONE_A, PLUS, Runs, main_runs


def presets(docs: str = "") -> str:
    """Which runs are of an earlier preset, in words; nothing once there is none.

    Args:
        docs: the way from the page to docs/.
    """
    before, rows = _earlier_rows()
    if not before:
        return ""
    which = f"{before} of the {rows} results, marked †," if before < rows else "The runs of all methods"
    return (
        f"{which} were made with earlier presets (`small/cifar100` and `small/cub200`, whose rates were tuned on one "
        "dataset each) and with the network in half precision. Runs of the "
        f"[present preset]({docs}methods.md#hyper-parameters) replace them, method by method, once all five seeds have "
        "been run."
    )


def most_accurate() -> str:
    """Who is above whom, in words that follow the records."""
    told = ["[One-A+](one-a-plus.md) takes one pass and sees no old image."]
    for data, name in evidence.DATA.items():
        runs = main_runs(data)
        right = {each: found.of("A_T").value for each, found in runs.items()}
        first = [runs[each].title for each in runs if right[each] > right[PLUS]]
        then = [runs[each].title for each in runs if right[ONE_A] < right[each] < right[PLUS]]
        told.append(f"On {name}, {listed(first)} above One-A+; {listed(then)} between it and the paper's One-A.")
    return " ".join(told)


def listed(names: Sequence[str]) -> str:
    """
    >>> listed([]), listed(["A"]), listed(["A", "B", "C"])
    ('nothing is', 'only A is', 'A, B and C are')
    """
    if len(names) < 2:
        return f"only {names[0]} is" if names else "nothing is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"


def single_seeds() -> str:
    """A warning about rows of one seed beside those of five; nothing once all have five."""
    every = [runs for data in evidence.DATA for runs in main_runs(data).values()]
    if all(len(runs.records) >= len(evidence.SEEDS) for runs in every):
        return ""
    example = main_runs("cub200")["aper-adapter"]
    first, mean = example.seeds[1]["metrics"]["A_T"], example.of("A_T").value
    return (
        "Rows with n = 1 are of seed 1 alone. Its stream is kind to methods that build on their first task, which has "
        f"{example.seeds[1]['stream']['sizes'][0]} classes on CUB-200: APER-Adapter reaches {first:.1f} % there with "
        f"seed 1 and {mean:.1f} % over {len(example.records)} seeds. Compare such rows with each other, not with those "
        "of five seeds."
    )


def marked(*runs: Runs) -> str:
    """The sign of earlier runs beside those of today."""
    before, rows = _earlier_rows()
    return " †" if before < rows and any(each.earlier for each in runs) else ""


@cache
def _earlier_rows() -> tuple[int, int]:
    """How many rows of both tables are of an earlier preset, and how many there are."""
    every = [runs.earlier for data in evidence.DATA for runs in main_runs(data).values()]
    return sum(every), len(every)
