# SPDX-License-Identifier: Apache-2.0
"""One-A's merge against the paper's sequence of formulas, and its properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onea.errors import OneaError
from onea.merging.gated_fusion import Gate, fuse, gate_values, left_singular
from onea.merging.one_a import OneAMerge
from onea.merging.operator import Sizes

SHAPES = st.sampled_from([(4, 4), (3, 9), (9, 3), (1, 7), (6, 5)])
SIZES = Sizes(accumulated_classes=14, new_classes=6, accumulated_samples=7000, new_samples=3000)
NEW_LARGER = Sizes(accumulated_classes=14, new_classes=36, accumulated_samples=7000, new_samples=18000)


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(random((size, size), seed))[0]


def with_spectrum(shape: tuple[int, int], values: Tensor, seed: int) -> Tensor:
    """A matrix with these singular values, then zeros.

    Whether a direction at the cut-off of 1e-6 counts is a matter of rounding, which differs between processors: no
    value may lie between 1e-8 and 1e-4 of the largest.
    """
    assert not ((values > 1e-8 * values[0]) & (values < 1e-4 * values[0])).any()
    left, right = (orthogonal(side, seed + turn)[:, : len(values)] for turn, side in enumerate(shape))
    return (left * values) @ right.T


def base_of(shape: tuple[int, int], seed: int, rank: int | None = None) -> Tensor:
    """A random base of full or of lower rank; its singular values lie between 0.02 and 1."""
    count = min(*shape, rank or max(shape))
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return with_spectrum(shape, (0.02 + 0.98 * drawn).sort(descending=True).values, seed)


def paper_merge(base: Tensor, align: Tensor, share: float, kappa: float, q: float) -> np.ndarray:
    """Eqs. 5-13 step by step with an explicit pseudo-inverse, in NumPy."""
    B, A = base.numpy(), align.numpy()
    U, s, _ = np.linalg.svd(B, full_matrices=False)
    # A direction the base does not have (s = 0) has no V of its own: there V_b must reproduce B, i.e. be the
    # pseudo-inverse's answer, exactly as for the align side.
    projection = np.linalg.pinv(U * s, rcond=1e-6)
    V_align, V_base = (projection @ A).T, (projection @ B).T
    V_fused = (1 - share) * V_base + share * V_align
    normalised = s / (s[0] + 1e-8)
    gate = 1 / (1 + np.exp(-kappa * (np.quantile(normalised, q) - normalised)))
    V_merged = V_base + gate[None, :] * (V_fused - V_base)
    return (U * s) @ V_merged.T


def merge_one(base: Tensor, align: Tensor, share: float, *, alignment: bool = True, **gate: float) -> Tensor:
    return fuse(base[None], align[None], share, Gate(**gate), alignment=alignment).merged[0]  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(0, 999), st.floats(0, 1), st.floats(0, 20), st.floats(0, 1), st.sampled_from([None, 1, 2]))
def test_equals_the_explicit_pseudo_inverse_form(shape, seed, share, kappa, q, rank):
    base, align = base_of(shape, seed, rank), random(shape, seed + 1)
    ours = merge_one(base, align, share, kappa=kappa, quantile=q)
    reference = paper_merge(base, align, share, kappa, q)
    np.testing.assert_allclose(ours.numpy(), reference, atol=1e-9 * max(1.0, np.abs(reference).max()))


@pytest.mark.parametrize(("shape", "rank"), [((128, 384), None), ((384, 128), None), ((384, 128), 40), ((96, 96), 7)])
def test_equals_the_reference_at_adapter_size(shape, rank):
    base, align = base_of(shape, 1, rank), random(shape, 2)
    reference = paper_merge(base, align, 0.3, 2.0, 0.3)
    np.testing.assert_allclose(merge_one(base, align, 0.3).numpy(), reference, atol=1e-9)


@settings(deadline=None, max_examples=30)
@given(SHAPES, st.integers(0, 999), st.floats(0, 1))
def test_merging_a_side_with_itself_changes_nothing(shape, seed, share):
    base = base_of(shape, seed)
    torch.testing.assert_close(merge_one(base, base, share), base)


@settings(deadline=None, max_examples=30)
@given(SHAPES, st.integers(0, 999))
def test_no_align_share_leaves_the_base(shape, seed):
    base = base_of(shape, seed)
    torch.testing.assert_close(merge_one(base, random(shape, seed + 1), 0.0), base)


def test_gates_are_one_half_at_zero_sharpness_and_a_step_at_infinite_sharpness():
    spectrum = torch.linspace(1, 0.01, 100, dtype=torch.float64)[None]
    assert torch.equal(gate_values(spectrum, 0.0, 0.3), torch.full_like(spectrum, 0.5))
    sharp = gate_values(spectrum, 1e9, 0.3)[0]
    assert set(sharp.tolist()) == {0.0, 1.0}
    assert sharp.sum() == pytest.approx(30, abs=1)
    assert sharp[:70].sum() == 0, "the head stays closed; the tail opens"


def test_gates_by_hand():
    # s = 4, 2, 1: normalised 1, .5, .25; the median is .5, so the gates are sigmoid(2 * (-.5, 0, .25)).
    expected = 1 / (1 + np.exp(-2 * np.array([-0.5, 0, 0.25])))
    found = gate_values(torch.tensor([[4.0, 2.0, 1.0]], dtype=torch.float64), 2.0, 0.5)[0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-7)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([(4, 4), (3, 9)]), st.integers(0, 999), st.floats(0, 1))
def test_open_gates_on_a_full_basis_are_the_weighted_mean(shape, seed, share):
    base, align = base_of(shape, seed), random(shape, seed + 1)
    mean = (1 - share) * base + share * align
    torch.testing.assert_close(merge_one(base, align, share, gating=False), mean)
    torch.testing.assert_close(merge_one(base, align, share, alignment=False), mean)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.sampled_from([None, 2]))
def test_the_result_stays_in_the_columns_of_the_base(seed, rank):
    base, align = base_of((9, 4), seed, rank), random((9, 4), seed + 1)
    merged = merge_one(base, align, 0.4)
    basis = torch.linalg.svd(base, full_matrices=False)[0][:, : rank or 4]
    torch.testing.assert_close(basis @ (basis.T @ merged), merged)


@settings(deadline=None, max_examples=30)
@given(SHAPES, st.integers(0, 999))
def test_rotating_both_sides_rotates_the_result(shape, seed):
    base, align = base_of(shape, seed), random(shape, seed + 1)
    Q, R = orthogonal(shape[0], seed + 2), orthogonal(shape[1], seed + 3)
    torch.testing.assert_close(merge_one(Q @ base @ R, Q @ align @ R, 0.3), Q @ merge_one(base, align, 0.3) @ R)


def test_a_vector_is_a_matrix_of_one_row_and_a_zero_base_is_replaced():
    base, align = {"bias": torch.tensor([1.0, -2.0])}, {"bias": torch.tensor([3.0, 0.0])}
    share = 6 / 20
    merged, _ = OneAMerge()(base, align, SIZES, {})
    torch.testing.assert_close(merged["bias"], (1 - share / 2) * base["bias"] + share / 2 * align["bias"])
    merged, _ = OneAMerge()({"bias": torch.zeros(2)}, align, SIZES, {})
    assert torch.equal(merged["bias"], align["bias"])


def test_the_larger_side_is_the_base_and_a_tie_goes_to_the_new_one():
    assert not OneAMerge().new_is_base(SIZES)
    assert OneAMerge().new_is_base(NEW_LARGER)
    assert OneAMerge().new_is_base(Sizes(9, 1, 100, 100))
    samples_and_classes_differ = Sizes(accumulated_classes=3, new_classes=2, accumulated_samples=10, new_samples=50)
    assert OneAMerge().new_is_base(samples_and_classes_differ)
    assert not OneAMerge(base_by="classes").new_is_base(samples_and_classes_differ)


def test_class_shares_and_the_official_swap():
    """The seed-1 CIFAR stream: 14 + 1 + 3 + 6 = 24 classes meet 36; the old adapter's share is 0.4, officially 0.6."""
    sizes = Sizes(24, 36, 24 * 500, 36 * 500)
    old, new = {"w": random((3, 5), 1)}, {"w": random((3, 5), 2)}
    (_, fusion), *_ = OneAMerge().fusions(old, new, sizes)
    assert fusion.align_share.tolist() == pytest.approx([0.4])
    (_, swapped), *_ = OneAMerge(swapped_weights=True).fusions(old, new, sizes)
    assert swapped.align_share.tolist() == pytest.approx([0.6])
    (_, small), *_ = OneAMerge(swapped_weights=True).fusions(old, new, SIZES)
    assert small.align_share.tolist() == pytest.approx([0.3]), "the swap only concerns a new base"


@pytest.mark.parametrize(("proxy", "expected"), [("uniform", 0.5), ("norm", 0.25), ("spectrum", 0.1)])
def test_other_information_proxies(proxy, expected):
    base = {"w": 3 * torch.eye(3), "v": 6 * torch.eye(4)}
    align = {"w": torch.eye(3), "v": 2 * torch.eye(4)}
    for _, fusion in OneAMerge(weights=proxy).fusions(base, align, SIZES):
        assert fusion.align_share.tolist() == pytest.approx([expected])
    singular = torch.linalg.svdvals(random((4, 6), 3))
    assert float((singular**2).sum()) == pytest.approx(float(random((4, 6), 3).norm() ** 2))


def test_stacked_layers_merge_like_single_ones_and_nothing_is_mutated():
    old = {f"block{i}": random((4, 7), i).float() for i in range(5)} | {"bias": random((7,), 9).float()}
    new = {name: random(tuple(value.shape), 100 + i).float() for i, (name, value) in enumerate(old.items())}
    before = {name: value.clone() for name, value in old.items()}
    together, _ = OneAMerge()(old, new, SIZES, {})
    assert list(together) == list(old)
    for name in old:
        alone, _ = OneAMerge()({name: old[name]}, {name: new[name]}, SIZES, {})
        torch.testing.assert_close(together[name], alone[name], rtol=1e-6, atol=1e-7)
        assert together[name].dtype == torch.float32
        assert torch.equal(old[name], before[name])


def test_a_permutation_of_hidden_units_on_one_side_matters():
    """Adapters start from independent weights, so their hidden units do not correspond."""
    base, align = random((4, 9), 1), random((4, 9), 2)
    shuffled = align[[1, 0, 3, 2]]
    assert not torch.allclose(merge_one(base, align, 0.3), merge_one(base, shuffled, 0.3))


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"w": torch.full((2, 2), torch.nan)}, "NaN"),
        ({"w": torch.ones(3, 2)}, "shapes"),
        ({"v": torch.ones(2, 2)}, "only on"),
        ({"w": torch.ones(2, 2), "v": torch.ones(1)}, "only on the new side"),
    ],
)
def test_unmergeable_sides_are_refused(new, words):
    with pytest.raises(OneaError, match=words):
        OneAMerge()({"w": torch.ones(2, 2)}, new, SIZES, {})


@pytest.mark.parametrize("switches", [{"quantile": 1.5}, {"kappa": -1}])
def test_invalid_switches_are_refused(switches):
    with pytest.raises(OneaError, match="must"):
        OneAMerge(**switches)


@pytest.mark.parametrize("shape", [(16, 60), (60, 16), (16, 16)])
@pytest.mark.parametrize("decades", [0, 1, 3, 3.9])
@pytest.mark.parametrize("rest", [0.0, 1e-9, 1e-13])
def test_the_short_decomposition_moves_directions_as_the_full_one_does(shape, decades, rest):
    """Against torch's SVD, for spectra that fall by several powers of ten to almost zero."""
    values = torch.cat([torch.logspace(0, -decades, 12), torch.full((4,), rest)]).double()
    matrices = torch.stack([with_spectrum(shape, values, 7), torch.zeros(shape, dtype=torch.float64)])
    mine, spectrum = left_singular(matrices)
    full, expected, _ = torch.linalg.svd(matrices, full_matrices=False)
    torch.testing.assert_close(spectrum, expected, rtol=0, atol=1e-8)
    kept = expected > 1e-6 * expected[:, :1]
    assert kept.sum(1).tolist() == [12, 0]

    def moved(vectors, singular):
        return (vectors * (gate_values(singular, 2.0, 0.3) * kept)[:, None, :]) @ vectors.mT

    torch.testing.assert_close(moved(mine, spectrum), moved(full, expected), rtol=0, atol=1e-6)
