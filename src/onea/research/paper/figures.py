# SPDX-License-Identifier: Apache-2.0
"""The paper's figures: which runs, or which streams, each one shows. Figure 3 is a drawing of the method."""

from __future__ import annotations

from onea.research.paper.experiment import SHARED, Cell, Experiment
from onea.research.paper.tables import ABLATION, BOTH, COMPONENTS, LAST, MAIN, PAPER_STREAMS, by_method, by_switch

GAMMAS = (0.001, 0.005, 0.01, 0.05)
PIECES = (10, 5, 2)  # classes at most, of the micro-tasks that large tasks are cut into
KAPPAS = (1.0, 2.0, 5.0, 10.0, 20.0)
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
RANKS = (16, 32, 64, 128, 256)

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
        notes=("The paper names neither dataset nor number of tasks; CIFAR100 and 10 unless told otherwise.",),
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
        notes=("The paper does not say T, the number of tasks; 10 unless --tasks says otherwise.", _FIXED),
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
        notes=("The paper names neither dataset nor number of tasks; CIFAR100 and 10 unless told otherwise.", _FIXED),
    ),
    Experiment(
        "figure6b",
        "alignment",
        "Bases of the adapter before and after a merge",
        "fig:rank_b",
        "alignment",
        by_switch({"One-A": {}}, [("cifar100", 10)], "{data} (T={tasks})", LAST),
        per_task=True,
        notes=("The paper names neither dataset nor number of tasks; CIFAR100 and 10 unless told otherwise.", _FIXED),
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
        "Accuracy against time per answer",
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
            "The paper does not say T, the number of tasks; 10 unless --tasks says otherwise.",
        ),
    ),
)
