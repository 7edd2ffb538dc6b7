# SPDX-License-Identifier: Apache-2.0
"""The memory of input directions against the published algorithm written out with singular value decompositions."""

from __future__ import annotations

import math

import pytest
import torch

from onea.research.methods.dual_gpm import Memory, reduction, remember, threshold

WIDTH = 24


def moment(seed: int, decay: float = 0.75, width: int = WIDTH) -> torch.Tensor:
    """A random second moment whose spectrum falls like real attention inputs do."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    return turn @ torch.diag(decay ** torch.arange(width, dtype=torch.float64)) @ turn.T


def projector(basis: torch.Tensor) -> torch.Tensor:
    return basis @ basis.T


def used_projector(memory: Memory) -> torch.Tensor:
    own = projector(memory.basis)
    return torch.eye(len(own), dtype=own.dtype) - own if memory.retain else own


def published_step(basis, mode, matrix, share):
    """One update as the official code does it, with the first task's wrong label put right."""
    width = len(matrix)
    total = (torch.linalg.svdvals(matrix) ** 2).sum()
    if basis is None:
        left, values, _ = torch.linalg.svd(matrix)
        count = max(1, sum(1 for j in range(width) if (values[: j + 1] ** 2).sum() / total < share))
        return (left[:, count:], "retain") if count >= width / 2 else (left[:, :count], "remove")
    inside = projector(basis) @ matrix
    left, values, _ = torch.linalg.svd(matrix - inside if mode == "remove" else inside)
    ratios = values**2 / total
    count = 0
    if mode == "remove":
        captured = 1 - ratios.sum()
        while captured < share:
            captured, count = captured + ratios[count], count + 1
        basis = torch.cat([basis, left[:, :count]], dim=1)
        if basis.shape[1] > width / 2:
            return torch.linalg.svd(basis)[0][:, basis.shape[1] :], "retain"
        return basis, "remove"
    captured = ratios.sum()
    while captured >= 1 - share:
        captured, count = captured - ratios[count], count + 1
    rest = basis - projector(left[:, :count]) @ basis
    return torch.linalg.svd(rest)[0][:, : basis.shape[1] - count], "retain"


@pytest.mark.parametrize("epsilon", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", [0, 100])
def test_a_whole_stream_equals_the_published_algorithm(epsilon, seed):
    memory, basis, mode = None, None, "remove"
    modes, used = [], 0
    for task in range(8):
        new, share = moment(seed + task), threshold(epsilon, task, 8)
        memory = remember(memory, new, share)
        basis, mode = published_step(basis, mode, new, share)
        assert memory.retain == (mode == "retain")
        assert memory.basis.shape == basis.shape
        torch.testing.assert_close(projector(memory.basis), projector(basis), rtol=0, atol=1e-8)
        orthonormal = memory.basis.T @ memory.basis
        torch.testing.assert_close(orthonormal, torch.eye(len(orthonormal), dtype=torch.float64), rtol=0, atol=1e-12)
        assert memory.used >= used, "what old tasks use never shrinks"
        used = memory.used
        modes.append(mode)
    assert modes[0] == "remove"
    assert modes[-1] == "retain"


def test_hand_worked_numbers():
    """Singular values 4, 2, 1, 1 have the published energies 16, 4, 1, 1 of 22 and the textbook's 4, 2, 1, 1 of 8."""
    first = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    memory = remember(None, first, 0.8)
    assert not memory.retain
    torch.testing.assert_close(memory.basis.abs(), torch.eye(4, dtype=torch.float64)[:, :1])
    assert remember(None, first, 0.1).used == 1, "at least one"
    assert remember(None, first, 0.8, "textbook").used == 2
    second = torch.diag(torch.tensor([1.0, 3.0, 0.5, 0.0], dtype=torch.float64))  # energies 1, 9, 0.25 of 10.25
    assert remember(memory, second, 0.09).used == 1, "the old direction holds 0.098 of it"
    grown = remember(memory, second, 0.97)
    assert (grown.used, grown.retain) == (2, False)
    torch.testing.assert_close(used_projector(grown), torch.diag(torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)))
    full = remember(memory, second, 0.98)
    assert (full.used, full.retain) == (3, True)
    torch.testing.assert_close(full.basis.abs()[:, 0], torch.eye(4, dtype=torch.float64)[3])


def test_a_first_task_that_uses_half_or_more_keeps_the_complement():
    """The official code stores the used directions and calls them free."""
    matrix = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    memory = remember(None, matrix, 0.95)
    assert (memory.retain, memory.used) == (True, 2)
    torch.testing.assert_close(
        projector(memory.basis), torch.diag(torch.tensor([0.0, 0, 1, 1], dtype=torch.float64)), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(reduction(matrix, memory, 2)[:, :2], torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("used", [4, 15])
def test_both_forms_of_one_memory_mean_the_same(used):
    basis = torch.linalg.svd(moment(3))[0]
    removing, retaining = Memory(basis[:, :used], retain=False), Memory(basis[:, used:], retain=True)
    assert removing.used == retaining.used == used
    for energy in ("published", "textbook"):
        one, other = (remember(memory, moment(4), 0.99, energy) for memory in (removing, retaining))
        torch.testing.assert_close(used_projector(one), used_projector(other), rtol=0, atol=1e-10)
    rows = [reduction(moment(4), memory, 3) for memory in (removing, retaining)]
    torch.testing.assert_close(rows[0].T @ rows[0], rows[1].T @ rows[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("retain", [None, False, True])
def test_reduction_reads_the_leading_free_directions_and_nothing_that_is_used(retain):
    basis = torch.linalg.svd(moment(5))[0][:, :7]
    memory = None if retain is None else Memory(basis, retain)
    matrix, rank = moment(6), 5
    down = reduction(matrix, memory, rank)
    torch.testing.assert_close(down @ down.T, torch.eye(rank, dtype=torch.float64) / 3)
    hat = {None: matrix, False: matrix - projector(basis) @ matrix, True: projector(basis) @ matrix}[retain]
    expected = torch.linalg.svd(hat)[0][:, :rank]
    torch.testing.assert_close(3 * down.T @ down, projector(expected), rtol=0, atol=1e-8)
    if memory is not None:
        up = torch.randn(WIDTH, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert (up @ down @ used_projector(memory)).abs().max() < 1e-12


def test_the_row_norm_is_that_of_a_kaiming_uniform_row():
    rows = torch.empty(2000, 768)
    torch.nn.init.kaiming_uniform_(rows, a=math.sqrt(5))
    assert float(rows.norm(dim=1).mean()) == pytest.approx(1 / math.sqrt(3), rel=1e-2)


def test_textbook_energy_is_gradient_projection_memory_on_the_inputs_themselves():
    generator = torch.Generator().manual_seed(2)
    inputs = [moment(seed) @ torch.randn(WIDTH, 200, generator=generator, dtype=torch.float64) for seed in (7, 8)]
    moments = [one @ one.T / 200 for one in inputs]
    first = remember(None, moments[0], 0.7, "textbook")
    left, values, _ = torch.linalg.svd(inputs[0], full_matrices=False)
    count = int((values.square().cumsum(0) / values.square().sum() < 0.7).sum())
    torch.testing.assert_close(used_projector(first), projector(left[:, :count]), rtol=0, atol=1e-8)
    second = remember(first, moments[1], 0.8, "textbook")
    rest = inputs[1] - used_projector(first) @ inputs[1]
    left, values, _ = torch.linalg.svd(rest, full_matrices=False)
    total = inputs[1].square().sum()
    captured, added = 1 - values.square().sum() / total, 0
    while captured < 0.8:
        captured, added = captured + values[added] ** 2 / total, added + 1
    expected = used_projector(first) + projector(left[:, :added])
    torch.testing.assert_close(used_projector(second), expected, rtol=0, atol=1e-8)
    assert remember(None, moments[0], 0.9, "textbook").used > remember(None, moments[0], 0.9).used


def test_reduction_returns_what_is_left_when_little_is_free():
    basis = torch.linalg.svd(moment(9))[0]
    assert reduction(moment(1), Memory(basis[:, :2], retain=True), 5).shape == (2, WIDTH)
    nothing = Memory(basis[:, :0], retain=True)
    assert reduction(moment(1), nothing, 5).shape == (0, WIDTH)
    assert remember(nothing, moment(1), 0.99).used == WIDTH


def test_the_threshold_stays_below_one_whatever_comes():
    assert threshold(0.95, 12, 10) == threshold(0.95, 9, 10) < 1
    assert threshold(0.9, 7, None) == 0.9
