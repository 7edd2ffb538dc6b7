# SPDX-License-Identifier: Apache-2.0
"""Every table and figure of the paper by name, and which runs fill it. Figure 3 is a drawing of the method."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from onea.errors import OneaError, did_you_mean
from onea.research.paper.experiment import METHODS, SHARED, Cell, Experiment

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
NO_TASKS = "The paper does not say T, the number of tasks; 10 unless --tasks gives another number."
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
        notes=("FLOPs: of a prediction after the last task, measured, as a multiple of One-A's.", ONE_SEED),
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
            NO_TASKS,
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
            NO_TASKS,
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

GAMMAS = (0.001, 0.005, 0.01, 0.05)
PIECES = (10, 5, 2)  # classes at most, of the micro-tasks that large tasks are cut into
KAPPAS = (1.0, 2.0, 5.0, 10.0, 20.0)
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
RANKS = (16, 32, 64, 128, 256)

_NO_STREAM = "The paper names neither dataset nor number of tasks; by default CIFAR100 and 10."
_FIXED = "One fixed seed that all rows share, as in the paper."
_SPLIT_COLUMNS = (
    ("tasks", "tasks"),
    ("A_T", "A_T"),
    ("mean A", "mean_A"),
    ("passes per image", "passes"),
    ("state MB", "state_mb"),
)


def _ease(row: str, split: int | None) -> Cell:
    options = SHARED | {"method": "ease", "data": "cifar100", "tasks": 10}
    return Cell(row, "{data} (T={tasks})", _SPLIT_COLUMNS, options, split)


FIGURES = (
    Experiment(
        "figure1",
        "necessity",
        "Cutting large tasks into small ones, EASE",
        "fig:intro",
        "bars",
        (_ease("as it arrives", None), *(_ease(f"at most {most} classes a task", most) for most in PIECES)),
        per_task=True,
        notes=("How large tasks are cut is not given; here into parts of at most 10, 5 or 2 classes.", _FIXED),
    ),
    Experiment(
        "figure2",
        "balance",
        "Balanced against step-imbalanced streams",
        "fig:balance_imb",
        "bars",
        tuple(
            cell
            for row in MAIN
            for group, stream in (("balanced", "balanced"), ("step-imbalanced", "step"))
            for cell in by_method([row], [("cifar100", 10)], group, LAST, stream=stream)
        ),
        seeds=5,
        notes=(_NO_STREAM,),
    ),
    Experiment(
        "figure4",
        "gammas",
        "Accuracy after every task for four imbalance factors",
        "fig:imbalance_rho",
        "curves",
        tuple(
            cell
            for row in MAIN
            for gamma in GAMMAS
            for cell in by_method([row], [("imagenet-a", 10)], "{data}, γ={gamma}", gamma=gamma)
        ),
        per_task=True,
        notes=(NO_TASKS, _FIXED),
    ),
    Experiment(
        "figure5",
        "forgetting",
        "Forgetting with One-A's components switched on one by one",
        "fig:forgetting",
        "forgetting",
        by_switch(
            ABLATION,
            [("cifar100", 10), ("imagenet-a", 20)],
            "{data} (T={tasks})",
            (("F", "F"), ("mean A", "mean_A")),
        ),
        per_task=True,
        notes=(COMPONENTS, _FIXED),
    ),
    Experiment(
        "figure6a",
        "directions",
        "How strongly merges update each singular direction",
        "fig:rank_a",
        "directions",
        by_switch({"One-A": {}}, [("cifar100", 10)], "{data} (T={tasks})", LAST),
        per_task=True,
        notes=(
            _NO_STREAM,
            _FIXED,
        ),
    ),
    Experiment(
        "figure6b",
        "alignment",
        "Bases of the adapter before and after a merge",
        "fig:rank_b",
        "alignment",
        by_switch({"One-A": {}}, [("cifar100", 10)], "{data} (T={tasks})", LAST),
        per_task=True,
        notes=(
            _NO_STREAM,
            _FIXED,
        ),
    ),
    Experiment(
        "figure7",
        "sensitivity",
        "A_T by sharpness and quantile of the gate",
        "fig:gating_sensitivity_reduced",
        "heatmap",
        tuple(
            cell
            for kappa in KAPPAS
            for data in ("cifar100", "imagenet-a")
            for q in QUANTILES
            for cell in by_switch(
                {f"κ = {kappa:g}": {"kappa": kappa, "quantile": q}},
                [(data, 10)],
                "{data} (T={tasks})",
                ((f"q = {q:g}", "A_T"),),
            )
        ),
        notes=("The values of κ and q are ours; the paper does not give its grid.",),
    ),
    Experiment(
        "figure8", "generation", "How a step-imbalanced stream is made", "fig:step_imbalance_generation", "streams"
    ),
    Experiment(
        "figure9",
        "long-tail-comparison",
        "Uneven tasks against long-tailed classes",
        "fig:sicil_vs_longtail",
        "streams",
    ),
    Experiment(
        "figure10",
        "descending-distribution",
        "Classes per task, largest first",
        "fig:descending_distribution",
        "streams",
    ),
    Experiment(
        "figure11",
        "rank",
        "Accuracy after every task for five adapter ranks",
        "fig:rank_compare",
        "curves",
        by_switch({f"rank {rank}": {"rank": rank} for rank in RANKS}, [("imagenet-a", 10)], "{data} (T={tasks})", BOTH),
        per_task=True,
        notes=(_FIXED,),
    ),
    Experiment(
        "figure12",
        "efficiency",
        "Accuracy against time per prediction",
        "fig:inference_time",
        "scatter",
        by_method(
            MAIN,
            PAPER_STREAMS[:1],
            "{data} (T={tasks})",
            (("A_T", "A_T"), ("ms per image", "inference_ms"), ("GFLOPs per image", "gflops")),
        ),
        notes=(
            "Time: evaluation after the last task, image loading included; compare runs of one machine only.",
            NO_TASKS,
        ),
    ),
)


@cache
def experiments() -> dict[str, Experiment]:
    """Every table and figure by name, in the paper's order."""
    return {experiment.name: experiment for experiment in (*TABLES, *FIGURES)}


def find_experiment(name: str) -> Experiment:
    """An experiment by its name, its alias or the paper's label."""
    known = experiments()
    names = {key: one for one in known.values() for key in (one.name, one.alias, one.label)}
    if name.lower() in ("figure3", "fig:framework"):
        raise OneaError("Figure 3 is a drawing of the method, not a result; `onea paper` lists what can be made.")
    if name not in names:
        hint = did_you_mean(name, {key for one in known.values() for key in (one.name, one.alias)})
        if not hint.startswith("did you mean"):
            hint = "`onea paper` lists them all."
        raise OneaError(f"There is no experiment '{name}'; {hint}")
    return names[name]
