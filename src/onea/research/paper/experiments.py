# SPDX-License-Identifier: Apache-2.0
"""The tables and figures of the paper and their runs. Figure 3 is a drawing of the method."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from onea.errors import OneaError, did_you_mean
from onea.research.paper.experiment import METHODS, SHARED, Cell, Experiment

Columns = tuple[tuple[str, str], ...]
LAST_ACCURACY: Columns = (("A_T", "A_T"),)
LAST_AND_MEAN: Columns = (("A_T", "A_T"), ("mean A", "mean_A"))
LAST_BY_DATASET: Columns = (("{data}", "A_T"),)
PAPER_STREAMS = (("cifar100", 10), ("cub200", 20), ("imagenet-a", 10), ("imagenet-r", 40))

Rows = dict[str, dict[str, Any]]


def methods(*names: str) -> Rows:
    """A row for each method of the paper."""
    return {name: {"method": METHODS[name]} for name in names}


MAIN = methods(
    "L2P", "DualPrompt", "CODA-Prompt", "Aper-adapter", "EASE", "InfLoRA", "SEMA", "ACMap", "CL-LoRA", "One-A"
)
GAMMA_METHODS = methods("Aper-adapter", "EASE", "SEMA", "ACMap", "CL-LoRA", "One-A")
WITHOUT_INFLORA = {row: options for row, options in MAIN.items() if row != "InfLoRA"}
LONG_TAIL = methods("Aper-adapter", "EASE", "InfLoRA", "SEMA", "ACMap", "CL-LoRA", "One-A")
LONG_TAIL_FACTOR = 0.1

# Without alignment, the merge is the (weighted) mean: any linear rule with symmetric alignment gives this, too.
ABLATION: Rows = {
    "none": {"alignment": False, "weights": "uniform", "gating": False},
    "ASA": {"alignment": True, "weights": "uniform", "gating": False},
    "GW": {"alignment": False, "weights": "classes", "gating": False},
    "ASA + GW": {"alignment": True, "weights": "classes", "gating": False},
    "ASA + GW + DG": {"alignment": True, "weights": "classes", "gating": True},
}
PROXIES: Rows = {
    "Norm-based": {"weights": "norm"},
    "SV-based": {"weights": "spectrum"},
    "Class count-based": {"weights": "classes"},
}
TRAINING: Rows = {
    "w/o L_ctr": {"contrastive": False},
    "w/o E(t)": {"epoch_growth": 0.0},
    "One-A": {},
}

COMPONENTS = (
    "ASA: asymmetric alignment; GW: global weighting; DG: directional gating. Without them, a merge "
    "is the mean of both sides; with all three, it is One-A."
)
NO_TASKS = "The paper does not give T, the number of tasks; 10 unless --tasks is given."
ONE_SEED = "The paper reports no deviation and no number of seeds here; one seed by default, --seeds N for more."


def cells(
    rows: Rows,
    streams: Sequence[tuple[str, int]],
    columns: Columns = LAST_AND_MEAN,
    group: str = "{data} (T={tasks})",
    **options: Any,
) -> tuple[Cell, ...]:
    """A cell for each row and stream; the method is One-A unless the options of the row name another one."""
    return tuple(
        Cell(row, group, columns, SHARED | {"method": "one-a", "data": data, "tasks": tasks} | options | row_options)
        for row, row_options in rows.items()
        for data, tasks in streams
    )


TABLES = (
    Experiment(
        "table1",
        "main",
        "Accuracy on four step-imbalanced streams",
        "tab:AA",
        "table",
        cells(MAIN, PAPER_STREAMS),
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
            for row in GAMMA_METHODS
            for gamma in (0.001, 0.05)
            for tasks in (10, 20)
            for cell in cells(methods(row), [("cifar100", tasks)], group="γ={gamma}, T={tasks}", gamma=gamma)
        ),
        notes=("The caption names no dataset; the values are those of CIFAR100.", ONE_SEED),
    ),
    Experiment(
        "table3",
        "ablation",
        "One-A's three components, A_T",
        "tab:ablation",
        "table",
        cells(
            ABLATION,
            [(data, tasks) for data in ("cifar100", "imagenet-a") for tasks in (10, 20)],
            (("T={tasks}", "A_T"),),
            "{data}",
        ),
        notes=(COMPONENTS, ONE_SEED),
    ),
    Experiment(
        "table4",
        "merging",
        "Merging strategies: accuracy and cost",
        "tab:ablation_fusion",
        "table",
        cells(
            methods("Per-task adapter", "MOS", "ACMap", "One-A"),
            [("imagenet-r", 40)],
            (("A_T", "A_T"), ("weighted mean A", "weighted_mean_A"), ("FLOPs", "flops"), ("adapters", "adapters")),
            "",
        ),
        notes=("FLOPs: of a prediction after the last task, measured, as a multiple of One-A's.", ONE_SEED),
    ),
    Experiment(
        "table5",
        "proxies",
        "Information proxies, A_T",
        "tab:info",
        "table",
        cells(PROXIES, [("cifar100", 10), ("imagenet-a", 10)], LAST_BY_DATASET, ""),
        notes=("Weights of the two sides of a merge: norms, singular values (SV) or class counts.", NO_TASKS, ONE_SEED),
    ),
    Experiment(
        "table6",
        "training",
        "Contrastive loss and size-dependent epochs, A_T",
        "tab:flexe_loss",
        "table",
        cells(TRAINING, [("cifar100", 10), ("imagenet-a", 10)], LAST_BY_DATASET, ""),
        notes=("L_ctr: the contrastive loss; E(t): longer training of larger tasks.", NO_TASKS, ONE_SEED),
    ),
    Experiment("table7", "hyperparameters", "One-A's hyper-parameters", "tab:dataset_hyper", "settings"),
    Experiment(
        "table8",
        "descending",
        "A_T when tasks arrive from large to small",
        "tab:descending",
        "table",
        cells(WITHOUT_INFLORA, PAPER_STREAMS, (("{data} (T={tasks})", "A_T"),), "", order="descending"),
        seeds=5,
    ),
    Experiment(
        "table9",
        "balanced",
        "Accuracy on balanced streams of CUB",
        "tab:balance_cil_summary",
        "table",
        cells(WITHOUT_INFLORA, [("cub200", tasks) for tasks in (5, 10, 20, 40)], group="T={tasks}", stream="balanced"),
        seeds=5,
    ),
    Experiment(
        "table10",
        "long-tailed",
        "Accuracy with uneven tasks and uneven classes",
        "tab:lt",
        "table",
        cells(LONG_TAIL, [("cifar100", 10), ("cub200", 20)], long_tail=LONG_TAIL_FACTOR),
        seeds=5,
        notes=(
            f"The paper gives no length of the tail; here, the rarest class keeps {LONG_TAIL_FACTOR:g} of its images.",
        ),
    ),
)

GAMMAS = (0.001, 0.005, 0.01, 0.05)
_SPLITS = {"as it arrives": None} | {f"at most {limit} classes a task": limit for limit in (10, 5, 2)}
KAPPAS = (1.0, 2.0, 5.0, 10.0, 20.0)
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
RANKS = (16, 32, 64, 128, 256)

_NO_STREAM = "The paper names neither dataset nor number of tasks; by default CIFAR100 and 10."
_FIXED = "One seed for all rows, as in the paper."
_SPLIT_COLUMNS = (("tasks", "tasks"), *LAST_AND_MEAN, ("passes per image", "passes"), ("state MB", "state_mb"))


FIGURES = (
    Experiment(
        "figure1",
        "necessity",
        "Splitting large tasks into small ones, EASE",
        "fig:intro",
        "bars",
        tuple(
            dataclasses.replace(cell, split=split)
            for row, split in _SPLITS.items()
            for cell in cells({row: {"method": "ease"}}, [("cifar100", 10)], _SPLIT_COLUMNS)
        ),
        per_task=True,
        notes=(
            "The paper does not describe the split of large tasks; ours gives tasks of at most 10, 5 or 2 classes.",
            _FIXED,
        ),
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
            for cell in cells(methods(row), [("cifar100", 10)], LAST_ACCURACY, group, stream=stream)
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
            for cell in cells(methods(row), [("imagenet-a", 10)], group="{data}, γ={gamma}", gamma=gamma)
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
        cells(ABLATION, [("cifar100", 10), ("imagenet-a", 20)], (("F", "F"), ("mean A", "mean_A"))),
        per_task=True,
        notes=(COMPONENTS, _FIXED),
    ),
    Experiment(
        "figure6a",
        "directions",
        "How strongly merges update each singular direction",
        "fig:rank_a",
        "directions",
        cells({"One-A": {}}, [("cifar100", 10)], LAST_ACCURACY),
        per_task=True,
        notes=(_NO_STREAM, _FIXED),
    ),
    Experiment(
        "figure6b",
        "alignment",
        "Bases of the adapter before and after a merge",
        "fig:rank_b",
        "alignment",
        cells({"One-A": {}}, [("cifar100", 10)], LAST_ACCURACY),
        per_task=True,
        notes=(_NO_STREAM, _FIXED),
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
            for cell in cells(
                {f"κ = {kappa:g}": {"kappa": kappa, "quantile": q}}, [(data, 10)], ((f"q = {q:g}", "A_T"),)
            )
        ),
        notes=("The paper does not give its grid of κ and q; the values here are ours.",),
    ),
    Experiment(
        "figure8", "generation", "How a step-imbalanced stream is generated", "fig:step_imbalance_generation", "streams"
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
        cells({f"rank {rank}": {"rank": rank} for rank in RANKS}, [("imagenet-a", 10)]),
        per_task=True,
        notes=(_FIXED,),
    ),
    Experiment(
        "figure12",
        "efficiency",
        "Accuracy against inference time",
        "fig:inference_time",
        "scatter",
        cells(
            MAIN,
            PAPER_STREAMS[:1],
            (("A_T", "A_T"), ("ms per image", "inference_ms"), ("GFLOPs per image", "gflops")),
        ),
        notes=(
            "Time: evaluation after the last task, including image loading; compare only runs on the same machine.",
            NO_TASKS,
        ),
    ),
)


@cache
def experiments() -> dict[str, Experiment]:
    """All tables and figures by name, in the order of the paper."""
    return {experiment.name: experiment for experiment in (*TABLES, *FIGURES)}


def find_experiment(name: str) -> Experiment:
    """The experiment with this name, alias or LaTeX label."""
    if name.lower() in ("figure3", "fig:framework"):
        raise OneaError("Figure 3 is a drawing of the method, not a result; `onea paper` lists the experiments.")
    by_name = {key: experiment for experiment in experiments().values() for key in (experiment.name, experiment.alias)}
    by_label = {experiment.label: experiment for experiment in experiments().values()}
    if match := (by_name | by_label).get(name):
        return match
    hint = did_you_mean(name, by_name)
    if not hint.startswith("did you mean"):
        hint = "`onea paper` lists them all."
    raise OneaError(f"There is no experiment '{name}'; {hint}")
