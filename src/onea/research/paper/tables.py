# SPDX-License-Identifier: Apache-2.0
"""The paper's ten tables: which runs fill which cells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onea.research.paper.experiment import SHARED, Cell, Experiment
from onea.research.paper.names import METHODS

LAST, BOTH = (("A_T", "A_T"),), (("A_T", "A_T"), ("mean A", "mean_A"))
PAPER_STREAMS = (("cifar100", 10), ("cub200", 20), ("imagenet-a", 10), ("imagenet-r", 40))

MAIN = ("L2P", "DualPrompt", "CODA-Prompt", "Aper-adapter", "EASE", "InfLoRA", "SEMA", "ACMap", "CL-LoRA", "One-A")
FEW = ("Aper-adapter", "EASE", "SEMA", "ACMap", "CL-LoRA", "One-A")
WITHOUT_INFLORA = tuple(row for row in MAIN if row != "InfLoRA")
LONG_TAIL = ("Aper-adapter", "EASE", "InfLoRA", "SEMA", "ACMap", "CL-LoRA", "One-A")
LONG_TAIL_FACTOR = 0.1

# Without alignment the merge is the (weighted) mean, which is what symmetric alignment gives under any linear rule.
ABLATION: dict[str, dict[str, Any]] = {
    "none": {"alignment": False, "weights": "uniform", "gating": False},
    "ASA": {"alignment": True, "weights": "uniform", "gating": False},
    "GW": {"alignment": False, "weights": "classes", "gating": False},
    "ASA + GW": {"alignment": True, "weights": "classes", "gating": False},
    "ASA + GW + DG": {"alignment": True, "weights": "classes", "gating": True},
}
PROXIES = {"Norm-based": "norm", "SV-based": "spectrum", "Class count-based": "classes"}
TRAINING: dict[str, dict[str, Any]] = {
    "w/o L_ctr": {"contrastive": False},
    "w/o E(t)": {"epoch_growth": 0.0},
    "One-A": {},
}

COMPONENTS = (
    "ASA: asymmetric alignment; GW: global weighting; DG: directional gating. Without any, each merge "
    "takes half of either side; with all three, it is One-A."
)
ONE_SEED = (
    "The paper prints no deviation here and does not say over how many seeds; one by default, --seeds N for more."
)


def by_method(
    rows: Iterable[str],
    streams: Iterable[tuple[str, int]],
    group: str,
    columns: tuple[tuple[str, str], ...] = BOTH,
    **options: Any,
) -> tuple[Cell, ...]:
    """Methods by streams."""
    places = list(streams)
    return tuple(
        Cell(row, group, columns, SHARED | {"method": METHODS[row], "data": data, "tasks": tasks} | options)
        for row in rows
        for data, tasks in places
    )


def by_switch(
    rows: dict[str, dict[str, Any]],
    streams: Iterable[tuple[str, int]],
    group: str = "",
    columns: tuple[tuple[str, str], ...] = (("{data}", "A_T"),),
) -> tuple[Cell, ...]:
    """One-A with switches, by streams."""
    places = list(streams)
    return tuple(
        Cell(row, group, columns, SHARED | {"method": "one-a", "data": data, "tasks": tasks} | switches)
        for row, switches in rows.items()
        for data, tasks in places
    )


TABLES = (
    Experiment(
        "table1",
        "main",
        "Accuracy on four step-imbalanced streams",
        "tab:AA",
        "table",
        by_method(MAIN, PAPER_STREAMS, "{data} (T={tasks})"),
        seeds=5,
    ),
    Experiment(
        "table2",
        "gamma",
        "Imbalance by number of tasks",
        "tab:rho_T",
        "table",
        tuple(
            cell
            for row in FEW
            for gamma in (0.001, 0.05)
            for tasks in (10, 20)
            for cell in by_method([row], [("cifar100", tasks)], "γ={gamma}, T={tasks}", gamma=gamma)
        ),
        notes=("The caption names no dataset; by its values it is CIFAR100.", ONE_SEED),
    ),
    Experiment(
        "table3",
        "ablation",
        "One-A's three components, A_T",
        "tab:ablation",
        "table",
        by_switch(
            ABLATION,
            [(data, tasks) for data in ("cifar100", "imagenet-a") for tasks in (10, 20)],
            "{data}",
            (("T={tasks}", "A_T"),),
        ),
        notes=(COMPONENTS, ONE_SEED),
    ),
    Experiment(
        "table4",
        "merging",
        "Merging strategies: accuracy and cost",
        "tab:ablation_fusion",
        "table",
        by_method(
            ("Per-task adapter", "MOS", "ACMap", "One-A"),
            [("imagenet-r", 40)],
            "",
            (("A_T", "A_T"), ("weighted mean A", "weighted_mean_A"), ("FLOPs", "flops"), ("adapters", "adapters")),
        ),
        notes=("FLOPs: of an answer after the last task, measured, as a multiple of One-A's.", ONE_SEED),
    ),
    Experiment(
        "table5",
        "proxies",
        "Information proxies, A_T",
        "tab:info",
        "table",
        by_switch({row: {"weights": proxy} for row, proxy in PROXIES.items()}, [("cifar100", 10), ("imagenet-a", 10)]),
        notes=(
            "What weighs the two sides of a merge: norms, singular values (SV) or numbers of classes.",
            "The paper does not say T, the number of tasks; 10 unless --tasks says otherwise.",
            ONE_SEED,
        ),
    ),
    Experiment(
        "table6",
        "training",
        "Contrastive loss and size-dependent epochs, A_T",
        "tab:flexe_loss",
        "table",
        by_switch(TRAINING, [("cifar100", 10), ("imagenet-a", 10)]),
        notes=(
            "L_ctr: the contrastive loss; E(t): longer training of larger tasks.",
            "The paper does not say T, the number of tasks; 10 unless --tasks says otherwise.",
            ONE_SEED,
        ),
    ),
    Experiment("table7", "hyperparameters", "One-A's hyper-parameters", "tab:dataset_hyper", "settings"),
    Experiment(
        "table8",
        "descending",
        "A_T when tasks arrive from large to small",
        "tab:descending",
        "table",
        by_method(WITHOUT_INFLORA, PAPER_STREAMS, "", (("{data} (T={tasks})", "A_T"),), order="descending"),
        seeds=5,
    ),
    Experiment(
        "table9",
        "balanced",
        "Accuracy on balanced streams of CUB",
        "tab:balance_cil_summary",
        "table",
        by_method(WITHOUT_INFLORA, [("cub200", tasks) for tasks in (5, 10, 20, 40)], "T={tasks}", stream="balanced"),
        seeds=5,
    ),
    Experiment(
        "table10",
        "long-tailed",
        "Accuracy with uneven tasks and uneven classes",
        "tab:lt",
        "table",
        by_method(LONG_TAIL, [("cifar100", 10), ("cub200", 20)], "{data} (T={tasks})", long_tail=LONG_TAIL_FACTOR),
        seeds=5,
        notes=(
            f"The paper does not say how long the tail is; the rarest class keeps {LONG_TAIL_FACTOR:g} of its images.",
        ),
    ),
)
