# SPDX-License-Identifier: Apache-2.0
"""The runs of every table and figure: valid, shared, scaled, on other data, and rendered with gaps."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from onea.errors import OneaError
from onea.metrics import summarise
from onea.options import make_options
from onea.presentation.tables import Value
from onea.research.cli.paper import paper
from onea.research.data import data_name
from onea.research.methods import METHODS, method_class
from onea.research.paper.experiment import BACKBONE, DATASETS, Experiment, PaperData, reported_tables
from onea.research.paper.experiment import METHODS as PAPER_METHODS
from onea.research.paper.experiments import experiments, find_experiment
from onea.research.paper.page import detailed_records, grid_table, pictures, write_experiment
from onea.research.paper.plan import (
    Changes,
    ExperimentPlan,
    ImageCounts,
    count_images,
    estimate,
    make_plan,
    split_sizes,
    stream_of,
)
from onea.research.record_metrics import METRICS, forgetting_curve
from onea.research.runs.config import RunConfig, make_config

COUNTS = {
    "table1": 200, "table2": 24, "table3": 20, "table4": 4, "table5": 6, "table6": 6, "table7": 0, "table8": 180,
    "table9": 180, "table10": 70, "figure1": 4, "figure2": 100, "figure4": 40, "figure5": 10, "figure6a": 1,
    "figure6b": 1, "figure7": 50, "figure8": 0, "figure9": 0, "figure10": 0, "figure11": 5, "figure12": 10,
}  # fmt: skip
ALIASES = (
    "main gamma ablation merging proxies training hyperparameters descending balanced long-tailed "
    "necessity balance gammas forgetting directions alignment sensitivity "
    "generation long-tail-comparison descending-distribution rank efficiency"
)


def published(data: str) -> ImageCounts:
    """Counts without loading data: published ones for the paper's datasets, twenty classes for others."""
    known = DATASETS.get(data_name(data), PaperData("", 20, 200, 40))
    classes = known.classes
    return ImageCounts((known.train // classes,) * classes, (known.test // classes,) * classes, False)


def plan(name: str, **changes: Any) -> ExperimentPlan:
    return make_plan(find_experiment(name), Changes(**changes), published)


def record(config: RunConfig, share: float = 0.8, **extra: Any) -> dict[str, Any]:
    """A finished record of a run with about this accuracy on ten test images of every class."""
    facts = published(config.data)
    sizes = stream_of(config, facts).sizes
    total = [10] * facts.classes
    correct = [
        [round(10 * share - (step - t) % 3) for t in range(sum(sizes[: step + 1]))] for step in range(len(sizes))
    ]
    return {
        "status": "finished",
        "config": config.identity(),
        "options": dataclasses.asdict(make_options(method_class(config.method).Options, config.options)),
        "data": {"name": config.data},
        "backbone": {"name": config.backbone},
        "stream": {"sizes": list(sizes), "names": [], "samples": None},
        "total": total,
        "metrics": summarise(correct, total, sizes),
        "cost": [{"flops_per_image": 2e9, "passes_per_image": 1, "state_bytes": 3e6}],
        "timings": {"evaluate_s": [1.0] * len(sizes), "learn_s": [1.0] * len(sizes)},
    } | extra


def records(made: ExperimentPlan) -> dict[str, Any]:
    return {run.key(): record(run, 0.5 + 0.05 * run.seed) for run in made.configs}


# ---- definitions ----------------------------------------------------------------------------------------------------


def test_experiments_are_found_by_name_alias_and_label() -> None:
    assert list(experiments()) == list(COUNTS)
    assert [find_experiment(alias).name for alias in ALIASES.split()] == list(COUNTS)
    assert find_experiment("tab:AA").name == "table1"
    with pytest.raises(OneaError, match="a drawing"):
        find_experiment("figure3")
    with pytest.raises(OneaError, match="did you mean 'ablation'"):
        find_experiment("abblation")


@pytest.mark.parametrize("name", COUNTS)
def test_every_experiment_has_valid_runs(name: str) -> None:
    experiment = find_experiment(name)
    for cell in experiment.cells:
        config = make_config(dict(cell.options))
        assert config.backbone == "vit_base_patch16_224.augreg_in21k"
        assert config.protocol == "pilot"
        assert all(metric in METRICS.names for _, metric in cell.columns)
    made = plan(name)
    assert len(made.configs) == COUNTS[name]
    assert {run.seed for run in made.configs} == set(range(1, experiment.seeds + 1 if experiment.cells else 1))
    assert len(plan(name, scale=0.1).configs) == COUNTS[name]


def test_the_papers_methods_are_ours() -> None:
    assert set(PAPER_METHODS.values()) <= set(METHODS.names)
    for name in ("table1", "table2", "table4", "table8", "table9", "table10"):
        for cell in find_experiment(name).cells:
            assert cell.options["method"] == PAPER_METHODS[cell.row]


@pytest.mark.parametrize("name", [f"table{i}" for i in range(1, 11)])
def test_every_reported_cell_has_its_place(name: str) -> None:
    printed = [value for values in reported_tables()[name].rows.values() for value in values]
    table = grid_table(plan(name), {})
    shown = [value.reported for value in table.values.values()]
    assert shown == printed


def test_experiments_have_five_seeds_where_the_paper_reports_deviations() -> None:
    for name, table in reported_tables().items():
        spread = any("±" in value for values in table.rows.values() for value in values)
        assert find_experiment(name).seeds == (5 if spread else 1)


def test_switches_streams_and_factors() -> None:
    def options(name: str) -> list[dict[str, Any]]:
        return [dict(cell.options) for cell in find_experiment(name).cells]

    switches = [(o["alignment"], o["weights"], o["gating"]) for o in options("ablation")[::4]]
    assert switches == [
        (False, "uniform", False),
        (True, "uniform", False),
        (False, "classes", False),
        (True, "classes", False),
        (True, "classes", True),
    ]
    assert {(o["gamma"], o["tasks"]) for o in options("gamma")} == {(0.001, 10), (0.001, 20), (0.05, 10), (0.05, 20)}
    assert [o["weights"] for o in options("proxies")[::2]] == ["norm", "spectrum", "classes"]
    assert [(o.get("contrastive"), o.get("epoch_growth")) for o in options("training")[::2]] == [
        (False, None),
        (None, 0.0),
        (None, None),
    ]
    assert all(o["order"] == "descending" for o in options("descending"))
    assert all(o["stream"] == "balanced" and o["data"] == "cub200" for o in options("balanced"))
    assert all(o["long_tail"] == 0.1 for o in options("long-tailed"))
    assert {o["gamma"] for o in options("gammas")} == {0.001, 0.005, 0.01, 0.05}
    assert {(o["kappa"], o["quantile"]) for o in options("sensitivity")} == {
        (k, q) for k in (1, 2, 5, 10, 20) for q in (0.1, 0.3, 0.5, 0.7, 0.9)
    }
    assert [o["rank"] for o in options("rank")] == [16, 32, 64, 128, 256]


def test_runs_are_shared_between_tables() -> None:
    published_run = {"backbone": BACKBONE, "protocol": "pilot", "preset": "paper/cifar100"}
    ours = make_config({"data": "cifar100", "tasks": 10, "stream": "step"} | published_run).key()
    for name in ("main", "ablation", "proxies", "training", "balance", "forgetting", "sensitivity", "efficiency"):
        assert ours in {run.key() for run in plan(name).configs}, name
    # rank 128 is the preset's on ImageNet-A, so the curve of that rank is the main table's run
    assert {run.key() for run in plan("rank").configs} & {run.key() for run in plan("main").configs}


def test_the_split_streams_bring_the_same_classes_in_smaller_steps() -> None:
    whole, *cut = plan("necessity").configs
    order, sizes = stream_of(whole, published("cifar100")).class_order, stream_of(whole, published("cifar100")).sizes
    for run, most in zip(cut, (10, 5, 2), strict=True):
        stream = stream_of(run, published("cifar100"))
        assert stream.class_order == order
        assert max(stream.sizes) <= most
        assert stream.tasks == sum(-(-size // most) for size in sizes)
    assert split_sizes((7, 1), 3) == (3, 2, 2, 1)


# ---- scale and substitution -----------------------------------------------------------------------------------------


def run_of(made: ExperimentPlan, method: str, data: str = "cifar100") -> RunConfig:
    return next(run for run in made.configs if run.method == method and data_name(run.data) == data)


def test_scale_changes_only_images_and_epochs() -> None:
    full, small = plan("main"), plan("main", scale=0.2)
    assert all(run.per_class is None and run.options == {} for run in full.configs)
    ours = run_of(small, "one-a")
    assert ours.per_class == 100
    assert ours.options == {"epochs": 5, "min_epochs": 4, "max_epochs": 8}
    assert run_of(small, "one-a", "cub200").options == {"epochs": 2, "min_epochs": 1, "max_epochs": 4}
    assert run_of(small, "sema").options == {"epochs": 1, "descriptor_epochs": 4}
    assert run_of(plan("merging", scale=0.2), "mos", "imagenet-r").options == {"epochs": 2, "alignment_epochs": 6}
    for before, after in zip(full.configs, small.configs, strict=True):
        assert dataclasses.replace(after, per_class=None, options={}) == before


def test_scale_leaves_two_images_and_one_epoch() -> None:
    tiny = plan("main", scale=0.001)
    assert {run.per_class for run in tiny.configs} == {2}
    assert all(set(run.options.values()) == {1} for run in tiny.configs)


@pytest.mark.parametrize(("changes", "message"), [
    ({"scale": 0.0}, "scale is 0"),
    ({"scale": 1.5}, "at most 1"),
    ({"seeds": 0}, "at least one"),
    ({"tasks": 0}, "at least one"),
    ({"data": ("folder:a", "folder:b")}, "2 datasets were given for the 4 of table1"),
    ({"data": ("folder:shop",)}, r"shop has 20 classes, too few for the 40 tasks of table1; give --tasks 20 or fewer"),
    ({"data": ("folder:a/x", "folder:b/x", "folder:c/x", "folder:d/x"), "tasks": 5}, "rename"),
])  # fmt: skip
def test_invalid_changes_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OneaError, match=message):
        plan("main", **changes)


def test_a_figure_of_one_stream_refuses_more_seeds() -> None:
    with pytest.raises(OneaError, match="share one seed"):
        plan("gammas", seeds=2)
    assert len(plan("gammas", seeds=1).configs) == 40


def test_data_selects_or_replaces() -> None:
    some = grid_table(plan("main", data=("folder:/images/cub200", "cifar100")), {})
    assert [column.group for column in some.columns[::2]] == ["CIFAR100 (T=10)", "CUB (T=20)"]
    assert not any("Not the paper's" in note for note in some.notes)
    one = plan("main", data=("folder:/shop/hats",), tasks=5)
    assert len(one.configs) == 50
    assert {column.group for column in grid_table(one, {}).columns} == {"hats (T=5)"}
    each = plan("long-tailed", data=("folder:hats", "folder:ties"), tasks=5)
    assert {run.data for run in each.configs} == {"folder:hats", "folder:ties"}


def test_another_backbone_gets_its_own_preprocessing_and_preset(tiny_vit: str) -> None:
    runs = plan("main", backbone=tiny_vit, scale=0.5).configs
    assert {(run.backbone, run.protocol) for run in runs} == {(tiny_vit, None)}
    ours = next(run for run in runs if run.method == "one-a" and run.data == "cifar100")
    assert {run.preset for run in runs} == {"auto"}
    # Half of the full experiment's epochs, and its batches, although half of the images alone would ask for others.
    assert ours.options == {"epochs": 5, "min_epochs": 2, "max_epochs": 8}


def test_presets_are_those_of_the_dataset_or_of_the_paper() -> None:
    assert {(run.data, run.preset) for run in plan("long-tailed").configs} == {
        (data, f"paper/{data}") for data in ("cifar100", "cub200")
    }
    other = plan("main", data=("folder:/shop/hats",), tasks=5).configs
    assert {run.preset for run in other} == {"paper"}, "other data on the paper's backbone"


def test_images_are_counted_if_the_data_is_available(tiny_images: Path, tmp_path: Path) -> None:
    assert count_images(f"folder:{tiny_images}", None) == ImageCounts((6,) * 6, (3,) * 6, True)
    absent = count_images("cub200", str(tmp_path))
    assert (absent.classes, sum(absent.train), absent.loaded) == (200, 5994, False)
    with pytest.raises(OneaError):
        count_images(f"folder:{tmp_path / 'none'}", None)


def test_cost_counts_images_times_epochs() -> None:
    facts = published("cifar100")
    ours, aper = run_of(plan("main"), "one-a"), run_of(plan("main"), "aper-adapter")
    sizes = stream_of(ours, facts).sizes
    epochs = [min(40, max(20, round(25 * (size / 10) ** 0.5))) for size in sizes]
    assert estimate(ours, facts).training == pytest.approx(sum(500 * n * e for n, e in zip(sizes, epochs, strict=True)))
    assert estimate(aper, facts).training == 20 * 500 * sizes[0]
    seen = [sum(sizes[: t + 1]) for t in range(10)]
    assert estimate(ours, facts).evaluation == 100 * sum(seen)
    ease = run_of(plan("main"), "ease")
    assert estimate(ease, facts).evaluation > 3 * estimate(ours, facts).evaluation
    small = run_of(plan("main", scale=0.2), "one-a")
    assert estimate(small, facts).training < estimate(ours, facts).training / 20


# ---- rendering ------------------------------------------------------------------------------------------------------


def test_cells_are_means_and_deviations_over_seeds_with_gaps_marked() -> None:
    made = plan("main")
    ours = [run for run in made.configs if run.method == "one-a" and run.data == "cifar100"]
    known = {run.key(): record(run, 0.5 + 0.1 * run.seed) for run in ours[:3]}
    known[ours[3].key()] = record(ours[3]) | {"status": "running"}
    table = grid_table(made, known)
    numbers = [known[run.key()]["metrics"]["A_T"] for run in ours[:3]]
    expected = Value(statistics.fmean(numbers), statistics.stdev(numbers), 3, 5, "88.23 ± 0.48")
    assert table.values["One-A", 0] == expected
    assert table.values["EASE", 0] == Value(None, None, 0, 5, "86.90 ± 0.73")
    assert table.notes == ()
    one = grid_table(made, {ours[0].key(): record(ours[0])}).values["One-A", 0]
    assert (one.std, one.seeds) == (None, 1)


def test_differences_from_the_paper_are_the_first_note() -> None:
    notes = grid_table(plan("main", backbone="vit_small_patch14_dinov2", data=("folder:hats",), tasks=5), {}).notes
    assert notes[0].startswith("Not the paper's setting: backbone vit_small_patch14_dinov2")
    assert "folder:hats" in notes[0]
    assert "context" in notes[0]
    assert "The reported numbers beside hats (T=5) are the paper's for CIFAR100 (T=10)." in notes
    ablation = grid_table(plan("ablation", data=("folder:hats",), tasks=5), {})
    assert "The reported numbers beside hats T=5 are the paper's for CIFAR100 T=10." in ablation.notes
    table = grid_table(plan("main", data=("folder:hats",), tasks=5), {})
    assert table.values["One-A", 0].reported == "88.23 ± 0.48"
    assert any("Scale 0.5" in note for note in grid_table(plan("main", scale=0.5), {}).notes)


def test_flops_are_multiples_of_one_as_and_adapters_are_counted() -> None:
    made = plan("merging")
    known = records(made)
    mos = next(run for run in made.configs if run.method == "mos")
    known[mos.key()]["cost"] = [{"flops_per_image": 81.2e9}]
    table = grid_table(made, known)
    assert table.values["MOS", 2].mean == pytest.approx(40.6)
    assert table.values["One-A", 2].mean == 1.0
    assert [table.values[row.name, 3].mean for row in table.rows] == [40, 40, 1, 1]
    assert not table.columns[2].higher_is_better
    ours = next(run for run in made.configs if run.method == "one-a")
    del known[ours.key()]
    assert grid_table(made, known).values["MOS", 2].mean is None, "nothing to be a multiple of"


def test_hyper_parameters_are_the_presets() -> None:
    table = grid_table(plan("hyperparameters"), {})
    assert all(value.mean is None for value in table.values.values()), "only what differs is shown as ours"
    assert table.values["CUB", 0].reported == "0.07"
    assert "equal these" in table.notes[0]


def test_forgetting_after_every_task() -> None:
    run = plan("forgetting").configs[0]
    made = record(run)
    curve = forgetting_curve(made)
    assert len(curve) == 9
    assert curve[-1] == pytest.approx(made["metrics"]["F"])


@pytest.mark.parametrize("name", ["necessity", "balance", "gammas", "forgetting", "sensitivity", "rank", "efficiency"])
def test_figures_are_drawn_from_finished_runs(name: str) -> None:
    made = plan(name)
    known = records(made)
    drawn = pictures(made, grid_table(made, known), known)
    panels = {"gammas": 4, "sensitivity": 2}
    assert len(drawn) == panels.get(name, 1)
    for width in (4.2, 8.6):
        assert drawn[0].draw(width=width).get_size_inches()[0] == width
    assert pictures(made, grid_table(made, {}), {}) == []


def test_one_a_leads_the_curves() -> None:
    made = plan("gammas")
    known = records(made)
    figure = pictures(made, grid_table(made, known), known)[0].draw()
    first = next(line for line in figure.axes[0].lines if line.get_gid() == "method-0")
    ours = next(run for run in made.configs if run.method == "one-a" and run.gamma == 0.001)
    assert list(first.get_ydata()) == known[ours.key()]["metrics"]["A"]


def test_a_page_shows_every_finished_run_under_its_row_and_one_a_first() -> None:
    made = plan("ablation", seeds=2)
    known = records(made)
    unfinished = made.planned_cells[0].runs[1].key()
    known[unfinished] |= {"status": "running"}
    shown = detailed_records(made, known)
    assert len(shown) == len(made.configs) - 1
    assert shown[0]["title"] == "ASA + GW + DG"
    assert {record["group"] for record in shown} == {"CIFAR100", "ImageNet-A"}


def test_heat_maps_show_the_best_and_worst_run_of_each_panel_in_detail() -> None:
    made = plan("sensitivity")
    known = {run.key(): record(run, 0.5 + 0.01 * number) for number, run in enumerate(made.configs)}
    shown = [(one["group"], one["metrics"]["A_T"]) for one in detailed_records(made, known)]
    for group in ("CIFAR100 (T=10)", "ImageNet-A (T=10)"):
        every = [
            known[planned.runs[0].key()]["metrics"]["A_T"]
            for planned in made.planned_cells
            if planned.cell.headings()[0][0] == group
        ]
        assert [accuracy for shown_group, accuracy in shown if shown_group == group] == [max(every), min(every)]
    assert len(detailed_records(made, {made.configs[0].key(): known[made.configs[0].key()]})) == 1


def test_points_of_the_scatter_chart_are_distinguishable() -> None:
    made = plan("efficiency")
    known = records(made)
    figure = pictures(made, grid_table(made, known), known)[0].draw()
    looks = {(line.get_color(), line.get_marker(), line.get_fillstyle()) for line in figure.axes[0].lines}
    assert len(looks) == len(figure.axes[0].lines) == 10


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("generation", {"generation.png", "figure8.html"}),
        ("long-tail-comparison", {"long-tail-comparison.png", "figure9.html"}),
        ("hyperparameters", {"table7.md", "table7.tex", "table7.csv", "table7.html"}),
        ("ablation", {"table3.md", "table3.tex", "table3.csv", "table3.html"}),
    ],
)
def test_files_are_written_without_runs(name: str, files: set[str], tmp_path: Path) -> None:
    _, written = write_experiment(plan(name), {}, tmp_path)
    assert {path.name for path in written} == files == {path.name for path in tmp_path.iterdir()}
    page = next(path for path in written if path.suffix == ".html").read_text("utf-8")
    assert find_experiment(name).title.replace("'", "&#x27;") in page
    if name == "ablation":
        assert page.count("not run") == 20
        assert "[paper: 88.39]" in (tmp_path / "table3.md").read_text("utf-8")


# ---- the command ----------------------------------------------------------------------------------------------------


def call(*arguments: str, columns: int = 200) -> Any:
    app = typer.Typer()
    app.command()(paper)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def test_the_command_lists_everything() -> None:
    listed = call().stdout
    for experiment in experiments().values():
        assert experiment.name in listed
        assert experiment.alias in listed
    narrow = call(columns=80).stdout.splitlines()
    assert max(map(len, narrow)) <= 80
    assert len(narrow) <= 2 * len(experiments()) + 6, "at most two lines each"
    assert not any("…" in line for line in narrow)


def test_lines_of_a_dry_run_are_unique(tmp_path: Path) -> None:
    for name in ("ablation", "sensitivity"):
        lines = call(name, "--data", "cifar100", "--dry-run", "--out", str(tmp_path)).stdout.splitlines()
        cells = [line for line in lines if "CIFAR100" in line]
        assert (
            len(cells)
            == len(set(cells))
            == len([c for c in find_experiment(name).cells if c.options["data"] == "cifar100"])
        )


@pytest.mark.parametrize("experiment", experiments().values(), ids=lambda one: one.name)
def test_a_dry_run_of_everything(experiment: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEA_DATA", str(tmp_path))
    done = call(experiment.alias, "--dry-run", "--scale", "0.1", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    count = COUNTS[experiment.name]
    assert (f"{count} run{'s' * (count > 1)}, 0 done" if count else "Nothing to run") in done.stdout
    away = any(name != "cifar100" for name in experiment.datasets)
    assert ("has not been downloaded" in done.stdout) == away
    assert not (tmp_path / "out").exists()


def test_unknown_executor_is_an_error(tmp_path: Path) -> None:
    failed = call("ablation", "--on", "moon", "--out", str(tmp_path))
    assert isinstance(failed.exception, OneaError)
    assert "choose local, ray" in str(failed.exception)


def test_the_command_imports_no_heavy_libraries() -> None:
    code = (
        "import sys, onea.research.cli.paper; "
        "print([m for m in ('numpy', 'matplotlib', 'torch', 'yaml', 'rich.live') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
