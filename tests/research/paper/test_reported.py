# SPDX-License-Identifier: Apache-2.0
"""Every reported number against a second transcription of the paper, by columns instead of rows."""

from __future__ import annotations

import hashlib

import pytest

from onea.research.paper.experiment import number, reported_tables

# Means and, where they are printed, deviations: one pair of lines a column, from the first method to the last.
TYPED: dict[str, list[tuple[str, str]]] = {
    "table1": [
        ("64.63 71.43 81.40 86.47 86.90 83.78 86.53 84.61 80.06 88.23", "1.33 1.35 .61 1.87 .73 1.01 .94 .19 3.20 .48"),
        ("76.69 81.12 87.55 91.04 91.71 89.24 90.96 90.27 88.83 92.22", "1.02 .46 .34 2.41 .88 .64 .64 .50 1.44 .81"),
        ("53.04 53.76 66.02 87.31 83.12 56.09 71.83 87.34 65.48 88.31", "1.35 .72 1.70 .22 .23 1.05 1.36 .27 3.66 .40"),
        ("69.00 70.28 77.08 91.38 87.05 77.22 82.61 91.45 79.71 92.63", "1.08 1.41 .76 .82 2.75 .82 1.90 .51 2.75 .76"),
        (
            "34.52 32.08 44.37 50.74 56.11 46.39 41.16 50.47 56.27 58.28",
            "2.40 2.29 .90 1.84 .54 1.75 6.99 .12 2.29 1.04",
        ),
        (
            "46.51 42.59 53.46 61.31 64.52 58.40 55.27 61.61 66.46 69.05",
            "3.08 2.64 1.41 3.04 1.03 1.95 4.39 .54 2.45 .57",
        ),
        (
            "45.79 45.13 53.18 54.61 67.02 60.91 57.56 60.54 69.32 69.94",
            "1.48 1.42 1.75 .14 .31 1.63 6.05 1.45 1.12 .84",
        ),
        (
            "58.26 55.25 62.13 63.36 72.98 70.03 67.16 69.13 76.12 76.97",
            "1.48 1.19 .79 1.58 .83 1.82 5.13 1.77 1.61 .95",
        ),
    ],
    "table2": [
        ("84.91 87.52 84.70 83.43 82.34 88.32", ""),
        ("90.31 91.98 88.58 90.15 89.98 92.54", ""),
        ("82.41 84.79 74.85 83.80 80.43 86.27", ""),
        ("87.68 90.42 81.86 88.84 89.44 90.78", ""),
        ("86.32 87.02 85.63 85.81 83.96 86.83", ""),
        ("90.34 91.74 91.18 91.21 89.79 91.46", ""),
        ("83.05 84.42 81.48 84.25 76.76 84.68", ""),
        ("88.32 89.23 87.85 89.08 84.39 89.58", ""),
    ],
    "table3": [
        ("72.43 75.82 82.46 84.31 88.39", ""),
        ("78.34 81.27 80.74 82.76 85.32", ""),
        ("45.82 48.02 51.32 53.65 59.25", ""),
        ("47.60 48.39 49.24 52.01 56.62", ""),
    ],
    "table4": [
        ("43.15 67.73 61.32 70.55", ""),
        ("55.67 74.04 68.56 76.95", ""),
        ("39.19 40.60 0.99 1", ""),
        ("40 40 1 1", ""),
    ],
    "table5": [("86.23 85.83 88.58", ""), ("55.17 53.65 59.64", "")],
    "table6": [("88.34 88.26 88.58", ""), ("59.38 58.99 59.64", "")],
    "table7": [
        ("0.01 0.07 0.08 0.03", ""),
        ("5e-4 0.0005 0.003 0.005", ""),
        ("128 16 64 24", ""),
        ("25 10 40 30", ""),
        ("128 128 128 64", ""),
    ],
    "table8": [
        ("76.16 71.38 80.01 88.24 86.56 88.31 83.25 80.08 89.61", "1.76 .54 .48 .72 1.16 .74 .18 1.59 .06"),
        ("53.47 55.19 64.83 87.67 84.31 67.88 86.57 49.22 88.55", "2.39 .98 .95 .19 .45 1.97 .41 4.39 .05"),
        ("36.71 33.16 45.93 53.63 56.16 43.95 48.96 53.79 61.27", "1.29 2.12 .37 .60 .28 1.98 .71 1.95 .12"),
        ("46.43 46.28 54.73 62.79 65.00 64.92 67.62 67.85 73.35", "1.01 .60 .22 .34 .77 1.02 .34 .84 2.44"),
    ],
    "table9": [
        ("62.05 63.07 78.50 87.67 84.34 80.17 87.05 84.45 88.06", "1.81 .49 .42 .19 .33 .17 .35 .31 .35"),
        ("74.68 75.41 86.14 91.29 89.51 87.43 91.06 89.67 91.67", "1.62 .75 .35 .74 .73 .42 .51 .53 .48"),
        ("59.22 57.51 74.26 87.28 86.01 75.72 83.11 74.32 87.14", "1.14 .96 .15 .14 .23 .40 .35 1.04 .24"),
        ("73.24 72.52 83.30 91.79 90.83 84.60 90.03 85.07 91.28", ".38 1.70 .64 .63 .61 .08 .69 1.01 .71"),
        ("57.28 65.09 70.96 86.89 87.11 74.32 86.92 66.54 87.31", ".87 1.12 1.43 .32 .13 1.14 .35 1.72 .15"),
        ("70.04 77.32 81.85 91.76 91.79 83.57 91.58 77.94 92.32", ".27 .45 .29 .57 .52 .36 .56 1.70 .53"),
        ("55.19 56.25 65.60 87.19 86.79 64.67 87.47 58.64 87.52", ".95 1.89 1.18 .01 .39 .39 .13 1.03 .13"),
        ("66.77 71.15 77.53 91.93 91.88 77.42 92.10 69.19 92.01", "1.03 1.80 .14 .63 .43 .85 .75 .89 .29"),
    ],
    "table10": [
        ("78.91 81.20 71.69 64.41 80.50 76.17 81.05", ".63 1.53 1.55 .85 .13 3.49 .40"),
        ("85.24 88.50 79.81 74.98 87.11 86.02 86.65", "2.02 .95 2.42 2.15 .83 2.29 .86"),
        ("79.30 79.40 49.32 49.06 79.47 67.90 81.10", ".02 .27 1.93 .16 .04 .97 .42"),
        ("85.78 86.59 62.52 62.00 85.90 81.41 87.58", ".59 .73 2.99 1.53 .63 1.65 1.06"),
    ],
}
LABELS = [
    "tab:AA",
    "tab:rho_T",
    "tab:ablation",
    "tab:ablation_fusion",
    "tab:info",
    "tab:flexe_loss",
    "tab:dataset_hyper",
    "tab:descending",
    "tab:balance_cil_summary",
    "tab:lt",
]
MAIN = ["L2P", "DualPrompt", "CODA-Prompt", "Aper-adapter", "EASE", "InfLoRA", "SEMA", "ACMap", "CL-LoRA", "One-A"]
ROWS = {
    "table1": MAIN,
    "table2": ["Aper-adapter", "EASE", "SEMA", "ACMap", "CL-LoRA", "One-A"],
    "table3": ["none", "ASA", "GW", "ASA + GW", "ASA + GW + DG"],
    "table4": ["Per-task adapter", "MOS", "ACMap", "One-A"],
    "table5": ["Norm-based", "SV-based", "Class count-based"],
    "table6": ["w/o L_ctr", "w/o E(t)", "One-A"],
    "table7": ["CIFAR100", "CUB", "ImageNet-A", "ImageNet-R"],
    "table8": [row for row in MAIN if row != "InfLoRA"],
    "table9": [row for row in MAIN if row != "InfLoRA"],
    "table10": ["Aper-adapter", "EASE", "InfLoRA", "SEMA", "ACMap", "CL-LoRA", "One-A"],
}


def floats(line: str) -> list[float]:
    return [float(word) for word in line.split()]


@pytest.mark.parametrize("name", TYPED)
def test_reported_numbers_equal_those_of_the_paper(name: str) -> None:
    table = reported_tables()[name]
    assert list(table.rows) == ROWS[name]
    assert len(table.columns) == len(TYPED[name])
    for index, (means, deviations) in enumerate(TYPED[name]):
        printed = [number(values[index]) for values in table.rows.values()]
        assert [cell.value for cell in printed] == floats(means), table.columns[index]
        assert [cell.std for cell in printed if cell.std is not None] == floats(deviations), table.columns[index]


def test_all_tables_are_present_in_order() -> None:
    assert [table.label for table in reported_tables().values()] == LABELS
    assert list(reported_tables()) == [f"table{i}" for i in range(1, 11)]
    assert sum(len(t.rows) * len(t.columns) for t in reported_tables().values()) == 332


def test_numbers_are_kept_as_printed() -> None:
    tables = reported_tables()
    assert tables["table1"].cell("L2P", "CUB (T=20) / mean A") == "69.00 ± 1.08"
    last = [printed.split()[-1] for printed in tables["table8"].rows["One-A"]]
    assert last == ["(+1.30)", "(+0.88)", "(+5.11)", "(+5.50)"]
    assert tables["table4"].rows["MOS"] == ("67.73", "74.04", "40.60×", "40 (T)")
    assert tables["table4"].cell("One-A", "FLOPs") == "1.×"
    assert tables["table2"].cell("SEMA", "γ=0.001, T=10 / A_T") == "84.70"
    assert tables["table1"].cell("MOS", "CUB (T=20) / A_T") is None


def test_no_digit_has_changed_since_it_was_checked() -> None:
    every = "\n".join(" ".join(values) for table in reported_tables().values() for values in table.rows.values())
    assert hashlib.sha256(every.encode()).hexdigest()[:16] == "ae544621f2b01885"
