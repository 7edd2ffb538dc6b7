# SPDX-License-Identifier: Apache-2.0
"""The analysis of merges by singular direction, and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.records import SIZES, analysed, record, side

from onea.errors import OneaError
from onea.merging.analysis import analyse, basis_overlap, block_overlap, update_norms
from onea.merging.gated_fusion import Gate, fuse
from onea.merging.one_a import OneAMerge
from onea.research.report.aggregate import settings
from onea.research.report.curves import cost_points, cost_scatter
from onea.research.report.heat_maps import (
    accuracy_by_options,
    analysed_merge,
    basis_alignment,
    gate_heat_map,
    has_analysis,
    parse_matrix,
    parse_numbers,
    spectra_and_gates,
    update_strength,
)
from onea.research.runs.config import make_config
from onea.research.runs.runner import run

Record = dict[str, Any]


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gating", [True, False])
def test_update_norms_are_mask_times_gate_times_share_times_projection(gating: bool) -> None:
    base, align = (side(seed)["blocks.0.up.weight"].double()[None] for seed in (0, 1))
    base[0, :, -1] = base[0, :, 0]  # one direction carries nothing and must not move
    fusion = fuse(base, align, 0.3, Gate(gating=gating, kappa=5.0))
    left, spectrum, _ = np.linalg.svd(base[0].numpy(), full_matrices=False)
    open_ = spectrum > 1e-6 * spectrum[0]
    relative = spectrum / spectrum[0]
    gate = 1 / (1 + np.exp(-5.0 * (np.quantile(relative, 0.3) - relative))) if gating else np.ones_like(relative)
    expected = open_ * gate * 0.3 * np.linalg.norm(left.T @ (align - base)[0].numpy(), axis=1)
    assert update_norms(fusion)[0].numpy() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert update_norms(fusion)[0, -1] < 1e-9


def test_unchanged_basis_overlaps_only_with_itself() -> None:
    base = side(0)["blocks.0.up.weight"].double()[None]
    same = basis_overlap(fuse(base, base, 0.5, Gate()))[0]
    assert torch.allclose(same, torch.eye(6, dtype=torch.float64), atol=1e-6)
    for blocks in (1, 2, 4, 6, 9):
        summary = block_overlap(same, blocks)
        assert torch.allclose(summary, torch.eye(min(blocks, 6), dtype=torch.float64), atol=1e-6)


def test_block_overlap_is_the_fraction_of_the_span_in_another_block() -> None:
    swapped = torch.eye(4)[[1, 0, 3, 2]]  # a rotation within a block does not change the block
    assert torch.equal(block_overlap(swapped, 2), torch.eye(2))
    crossed = torch.eye(4)[[2, 1, 0, 3]]  # one of two directions changes its block
    assert block_overlap(crossed, 2) == pytest.approx(np.full((2, 2), 0.5**0.5))


def test_descriptions_are_by_kind_and_layer_and_leave_out_vectors() -> None:
    fusions = OneAMerge(kappa=5.0).fusions(side(0, 3), side(1, 3), SIZES)
    found = analyse(fusions)
    assert list(found) == ["down", "up"]
    for kind in ("down", "up"):
        entry = found[kind]
        assert entry["directions"] == 6
        assert [layer["layer"] for layer in entry["layers"]] == [0, 1, 2]
        (fusion,) = [f for names, f in fusions if f"blocks.0.{kind}.weight" in names]
        for index, layer in enumerate(entry["layers"]):
            assert parse_numbers(layer["gate"]) == pytest.approx(fusion.gates[index].tolist(), rel=1e-3)
            assert parse_numbers(layer["update"]) == pytest.approx(update_norms(fusion)[index].tolist(), rel=1e-3)
            assert parse_numbers(layer["value"])[0] == pytest.approx(1.0, abs=1e-4)
        assert parse_matrix(entry["overlap"]) == pytest.approx(basis_overlap(fusion).mean(0).numpy(), abs=6e-4)


def test_matrices_of_equal_shape_are_distinguished() -> None:
    found = analyse(OneAMerge().fusions(side(0, 2, 8, 8), side(1, 2, 8, 8), SIZES))
    assert [len(found[kind]["layers"]) for kind in ("down", "up")] == [2, 2]
    assert found["down"]["overlap"] != found["up"]["overlap"]


def test_a_record_of_ten_tasks_and_twelve_layers_stays_small() -> None:
    merge = analyse(OneAMerge().fusions(side(0, 12, 128, 768), side(1, 12, 128, 768), SIZES))
    made = record(sizes=(10,) * 10, names=())
    for task in made["tasks"][1:]:
        task["merge"] = {"analysis": merge}
    assert len(json.dumps(made, indent=1)) < 200_000  # as runs write it


def test_runs_keep_the_analysis_of_every_merge(tiny_run: Record, tmp_path: Path) -> None:
    made = run(make_config(tiny_run), tmp_path)
    assert "analysis" not in made["tasks"][0]["merge"]
    for task in made["tasks"][1:]:
        assert {kind: len(entry["layers"]) for kind, entry in task["merge"]["analysis"].items()} == {"down": 2, "up": 2}
        gates = [parse_numbers(layer["gate"]) for e in task["merge"]["analysis"].values() for layer in e["layers"]]
        assert min(map(min, gates)) == pytest.approx(task["merge"]["gate_min"], rel=1e-3)
        assert max(map(max, gates)) == pytest.approx(task["merge"]["gate_max"], rel=1e-3)


# ---- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [4.2, 8.6])
def test_pictures_of_a_merge_show_its_numbers(width: float) -> None:
    made = analysed()
    _, merge = analysed_merge(made)
    lines = np.array([parse_numbers(layer["update"]) for layer in merge["up"]["layers"]])
    figure = update_strength(made, width)
    (mean,) = [line for axes in figure.axes for line in axes.lines if line.get_gid() == "mean-up"]
    assert mean.get_ydata() == pytest.approx(lines.mean(0))
    heat = basis_alignment(made, width)
    assert np.asarray(heat.axes[1].images[0].get_array()) == pytest.approx(
        np.array(parse_matrix(merge["up"]["overlap"]))
    )
    spectra = spectra_and_gates(made, width)
    assert [len(axes.lines) for axes in spectra.axes[:4]] == [2, 2, 2, 2]
    for drawn in (figure, heat, spectra):
        drawn.draw_without_rendering()


def test_the_last_merge_is_shown_by_default() -> None:
    made = analysed()
    assert analysed_merge(made)[0] == "task 3"
    assert analysed_merge(made, 1) == ("task 2", made["tasks"][1]["merge"]["analysis"])
    assert has_analysis(made)
    assert not has_analysis(record())
    with pytest.raises(OneaError, match="no merge analysis for task 1"):
        analysed_merge(made, 0)
    with pytest.raises(OneaError, match="no merge analysis;"):
        update_strength(record())


def grid() -> list[Record]:
    made = [
        record(seed=seed, options={"kappa": kappa, "quantile": q})
        for seed in (1, 2)
        for kappa in (1.0, 2.0, 5.0)
        for q in (0.1, 0.3)
        if (kappa, q) != (5.0, 0.1)
    ]
    return [*made, record(options={"kappa": 9.0, "quantile": 0.3}, done=3)]


def test_the_heat_map_writes_means_over_seeds_and_marks_gaps() -> None:
    cells = accuracy_by_options(grid(), ("kappa", "quantile"))
    assert list(cells) == [(1.0, 0.1), (1.0, 0.3), (2.0, 0.1), (2.0, 0.3), (5.0, 0.3)], "unfinished runs do not count"
    values = [made["metrics"]["A_T"] for made in grid() if made["options"] == {"kappa": 2.0, "quantile": 0.3}]
    assert cells[2.0, 0.3].mean == pytest.approx(np.mean(values))
    figure = gate_heat_map(grid())
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 6
    assert texts.count("not run") == 1
    assert f"{np.mean(values):.2f}\n± {np.std(values, ddof=1):.2f}" in texts
    with pytest.raises(OneaError, match="kappa"):
        gate_heat_map([record()])


@pytest.mark.parametrize("width", [4.2, 7.4])
def test_the_scatter_places_methods_by_cost(width: float) -> None:
    cost = [{"tasks": 9, "flops_per_image": 2_000_000_000}]
    (setting,) = settings([record("a", cost=cost), record("b", share=0.5, cost=[cost[0] | {"flops_per_image": 6e10}])])
    points = cost_points(setting)
    assert [point.cost for point in points] == [2.0, 60.0]
    figure = cost_scatter(points, "GFLOPs", width)
    figure.draw_without_rendering()
    places = {(line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines if len(line.get_xdata()) == 1}
    expected = {(2.0, record("a")["metrics"]["A_T"]), (60.0, record("b", share=0.5)["metrics"]["A_T"])}
    assert expected <= places
    assert figure.axes[0].get_xscale() == "log"
    assert cost_points(settings([record()])[0]) == []
    with pytest.raises(OneaError, match="No finished run"):
        cost_scatter([], "GFLOPs")
