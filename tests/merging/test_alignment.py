# SPDX-License-Identifier: Apache-2.0
"""When alignment helps and when it hurts, the strength of gates, and the base to which they apply."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onea.merging.analysis import analyse, share_in_subspace, subspace_similarity
from onea.merging.gated_fusion import Gate, effective_gate, fuse
from onea.merging.one_a import OneAMerge
from onea.merging.operator import Sizes

OLD_LARGER, NEW_LARGER = Sizes(50, 10, 1500, 300), Sizes(50, 80, 1500, 2400)
NO_GATES = Gate(gating=False)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotated_sides(angle: float, seed: int, rows: int = 12, rank: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """A base, an align side whose columns are rotated out of the base's by an angle, and the part that stays inside."""
    basis = torch.linalg.qr(random(rows, 2 * rank, seed=seed))[0]
    inner, outer = basis[:, :rank], basis[:, rank:]
    core = torch.linalg.qr(random(rank, rank, seed=seed + 1))[0]
    base = inner @ (torch.linalg.qr(random(rank, rank, seed=seed + 2))[0] * torch.tensor([3.0, 2.0, 1.0]).double())
    inside = math.cos(angle) * inner @ core
    return base, inside + math.sin(angle) * outer @ core, inside


def merged(base: Tensor, align: Tensor, share: float, *, alignment: bool) -> Tensor:
    return fuse(base[None], align[None], share, NO_GATES, alignment=alignment).merged[0]


@settings(deadline=None, max_examples=30)
@given(st.floats(0, math.pi / 2), st.floats(0.05, 0.5), st.integers(0, 999))
def test_alignment_helps_if_it_drops_noise_and_hurts_equally_if_it_drops_knowledge(angle, share, seed):
    """All knowledge is in the column space of the base, as the theory assumes, or all is outside."""
    base, align, inside = rotated_sides(angle, seed)
    aligned, unaligned = (merged(base, align, share, alignment=choice) for choice in (True, False))
    if_noise, if_knowledge = ((1 - share) * base + share * side for side in (inside, align))
    dropped = share * math.sin(angle) * 3**0.5  # the norm of the turned part
    assert float((aligned - if_noise).norm()) == pytest.approx(0, abs=1e-9)
    assert float((unaligned - if_noise).norm()) == pytest.approx(dropped, abs=1e-9)
    assert float((aligned - if_knowledge).norm()) == pytest.approx(dropped, abs=1e-9)
    assert float((unaligned - if_knowledge).norm()) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("rank", [4, 16, 24])
def test_alignment_does_not_change_a_down_projection(rank):
    """With a bottleneck no wider than the network, the base spans the whole space, so nothing is dropped."""
    base, align = random(rank, 24, seed=1), random(rank, 24, seed=2)
    torch.testing.assert_close(merged(base, align, 0.3, alignment=True), merged(base, align, 0.3, alignment=False))
    assert share_in_subspace(fuse(base[None], align[None], 0.3, NO_GATES)).item() == pytest.approx(1)


@pytest.mark.parametrize("rank", [4, 16, 24])
def test_alignment_drops_most_of_a_random_up_projection_of_low_rank(rank):
    base, align = random(8, 24, rank, seed=1), random(8, 24, rank, seed=2)
    fusion = fuse(base, align, 0.3, NO_GATES)
    dropped = 0.3 * (align - fusion.left @ (fusion.left.mT @ align))
    torch.testing.assert_close(fuse(base, align, 0.3, NO_GATES, alignment=False).merged - fusion.merged, dropped)
    assert float(share_in_subspace(fusion).mean()) == pytest.approx(rank / 24, abs=0.08)
    assert float(subspace_similarity(fusion).mean()) == pytest.approx(rank / 24, abs=0.08)


@pytest.mark.parametrize("degrees", [0, 30, 60, 90])
def test_the_measures_of_an_angle_are_its_squared_cosine(degrees):
    base, align, _ = rotated_sides(math.radians(degrees), seed=5)
    fusion = fuse(base[None], align[None], 0.3, NO_GATES)
    expected = pytest.approx(math.cos(math.radians(degrees)) ** 2, abs=1e-9)
    assert share_in_subspace(fusion).item() == expected
    assert subspace_similarity(fusion).item() == expected


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([(4, 9), (9, 4)]), st.integers(0, 999), st.floats(0.05, 1), st.floats(0, 20))
def test_even_gates_move_as_far_as_gates_along_the_ungated_update(shape, seed, share, kappa):
    base, align = random(1, *shape, seed=seed), random(1, *shape, seed=seed + 1)
    gated, even, ungated = (
        fuse(base, align, share, gate) for gate in (Gate(kappa=kappa), Gate(kappa=kappa, even_gates=True), NO_GATES)
    )
    step, even_step, full_step = (fusion.merged - base for fusion in (gated, even, ungated))
    assert float(even_step.norm()) == pytest.approx(float(step.norm()))
    torch.testing.assert_close(even_step, even.gates[0, 0] * full_step)
    assert effective_gate(gated.gates, gated.left.mT @ (align - base)).item() == pytest.approx(even.gates[0, 0].item())


def test_gates_on_a_new_base_hold_back_the_earlier_tasks():
    """Gates pull towards the base. If it is the new side, the old side loses about half of its share."""
    old, new = {"w": torch.zeros(4, 6) + 1e-3 * random(4, 6, seed=1).float()}, {"w": random(4, 6, seed=2).float()}

    def share_of_old(operator: OneAMerge, sizes: Sizes) -> float:
        """The distance of the result from the new side, as a share of the distance between the sides."""
        result = operator(old, new, sizes, {}).tensors["w"]
        return float((result - new["w"]).norm() / (old["w"] - new["w"]).norm())

    ungated, default, old_gated = OneAMerge(gating=False), OneAMerge(), OneAMerge(gated_base="accumulated")
    assert share_of_old(ungated, NEW_LARGER) == pytest.approx(50 / 130)
    assert share_of_old(default, NEW_LARGER) < 0.6 * 50 / 130
    assert share_of_old(old_gated, NEW_LARGER) == pytest.approx(50 / 130)
    assert share_of_old(default, OLD_LARGER) > share_of_old(ungated, OLD_LARGER) == pytest.approx(50 / 60)
    assert share_of_old(old_gated, OLD_LARGER) == share_of_old(default, OLD_LARGER)


def test_the_analysis_of_a_merge_has_the_mean_measures():
    names = ["blocks.0.up.weight", "blocks.1.up.weight"]
    fusion = fuse(random(2, 24, 4, seed=1), random(2, 24, 4, seed=2), 0.3, Gate())
    measures = analyse([(names, fusion)])["up"]
    assert measures["inside"] == pytest.approx(float(share_in_subspace(fusion).mean()), abs=1e-4)
    assert measures["closeness"] == pytest.approx(float(subspace_similarity(fusion).mean()), abs=1e-4)
    assert 0.2 < measures["opening"] < 0.65
