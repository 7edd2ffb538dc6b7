# SPDX-License-Identifier: Apache-2.0
"""Properties of every merging operator in the registry, and identities of single operators."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onea.errors import OneaError
from onea.merging import OPERATORS, make_operator, operator_class
from onea.merging.operator import Sizes
from onea.merging.spectral import leading_components, orthogonalise, shared_basis
from onea.merging.task_vectors import elect, trim
from onea.tensors import Tensors

SHAPES = {"down.weight": (4, 9), "down.bias": (4,), "up.weight": (9, 4), "up.bias": (9,), "scale": ()}
SIZES = Sizes(accumulated_classes=14, new_classes=6, accumulated_samples=7000, new_samples=1000)
OTHER_SIZES = Sizes(accumulated_classes=2, new_classes=36, accumulated_samples=100, new_samples=9000)


@pytest.fixture(params=sorted(OPERATORS.builtin))
def name(request) -> str:
    return request.param


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def side(seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    return {key: random(shape, 100 * seed + i).to(dtype) for i, (key, shape) in enumerate(SHAPES.items())}


def statistics(tensors: Tensors, seed: int) -> Tensors:
    """Plausible Fisher information and Gram matrices of a side."""
    made = {}
    for i, (key, value) in enumerate(tensors.items()):
        made[f"fisher.{key}"] = random(tuple(value.shape), 7000 + 100 * seed + i).square()
        if value.dim() == 2:
            inputs = random((20, value.shape[1]), 8000 + 100 * seed + i)
            made[f"gram.{key}"] = inputs.T @ inputs
    return made


def new_statistics(tensors: Tensors, seed: int) -> Tensors:
    return {f"new_{key}": value for key, value in statistics(tensors, seed).items()}


def pair_state(old: Tensors, new: Tensors) -> Tensors:
    return statistics(old, 1) | new_statistics(new, 2)


def fold(operator, sides: list[Tensors], classes: list[int], seeds: list[int]) -> Tensors:
    """Merge sides one by one, each with its size and statistics."""
    merged, state = sides[0], statistics(sides[0], seeds[0])
    if not operator.needs:
        state = {}
    for index in range(1, len(sides)):
        next_state = state | (new_statistics(sides[index], seeds[index]) if operator.needs else {})
        before = sum(classes[:index])
        sizes = Sizes(before, classes[index], 100 * before, 100 * classes[index])
        merged, state = operator(merged, sides[index], sizes, next_state)
    return merged


def assert_same(left: Tensors, right: Tensors, **tolerance: float) -> None:
    assert list(left) == list(right)
    for key in left:
        torch.testing.assert_close(left[key], right[key], **tolerance)


# Every operator


def test_merging_keeps_names_shapes_and_types_and_mutates_nothing(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        old, new = side(1, dtype), side(2, dtype)
        state = pair_state(old, new)
        before = [{key: value.clone() for key, value in group.items()} for group in (old, new, state)]
        merged, kept = make_operator(name)(old, new, SIZES, state)
        for group, copy in zip((old, new, state), before, strict=True):
            assert group.keys() == copy.keys()
            assert all(torch.equal(group[key], copy[key]) for key in copy)
        assert list(merged) == list(old)
        for key, value in merged.items():
            assert value.shape == old[key].shape
            assert value.dtype == dtype
            assert torch.isfinite(value).all()
        assert all(isinstance(value, Tensor) for value in kept.values())
        assert not any(key.startswith("new_") for key in kept)


def test_merging_is_deterministic_and_a_second_merge_takes_the_state(name):
    operator = make_operator(name)
    runs = [fold(operator, [side(1), side(2), side(3)], [3, 1, 2], [1, 2, 3]) for _ in range(2)]
    assert_same(runs[0], runs[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda new: new | {"scale": torch.tensor(torch.nan, dtype=torch.float64)}, "NaN"),
        (lambda new: new | {"down.bias": torch.full((4,), torch.inf)}, "infinity"),
        (lambda new: new | {"down.bias": torch.ones(5)}, "shapes"),
        (lambda new: {key: new[key] for key in list(new)[1:]}, "only on the accumulated side"),
    ],
)
def test_unmergeable_sides_are_refused(name, change, words):
    new = change(side(2))
    with pytest.raises(OneaError, match=words):
        make_operator(name)(side(1), new, SIZES, pair_state(side(1), side(2)))


def test_sizes_change_the_result_exactly_where_declared(name):
    operator = make_operator(name)
    old, new = side(1), side(2)
    results = [operator(old, new, sizes, pair_state(old, new)).tensors for sizes in (SIZES, OTHER_SIZES)]
    same = all(torch.equal(results[0][key], results[1][key]) for key in old)
    assert same is not operator.uses_sizes


def test_the_order_matters_exactly_where_declared(name):
    operator = make_operator(name, **({"limit": 2} if name == "acmap" else {}))
    classes = [3, 1, 5, 2]
    results = [
        fold(operator, [side(i + 1) for i in order], [classes[i] for i in order], [i + 1 for i in order])
        for order in itertools.permutations(range(4))
    ]
    if operator.associative:
        for other in results[1:]:
            assert_same(results[0], other, rtol=1e-9, atol=1e-10)
    else:
        assert any(not torch.allclose(results[0][key], results[-1][key]) for key in SHAPES)


def test_missing_statistics_are_refused(name):
    operator = make_operator(name)
    if operator.needs:
        with pytest.raises(OneaError, match=r"needs statistics of the training data, which plain files do not have; "):
            operator(side(1), side(2), SIZES, {})
    else:
        operator(side(1), side(2), SIZES, {})


def test_zero_sides_merge_to_finite_tensors(name):
    zero = {key: torch.zeros_like(value) for key, value in side(1).items()}
    for old, new in ((zero, side(2)), (side(1), zero), (zero, zero)):
        merged, _ = make_operator(name)(old, new, SIZES, pair_state(old, new))
        assert all(torch.isfinite(value).all() for value in merged.values())


@pytest.mark.parametrize("sizes", [(0, 0, 0, 0), (-1, 1, 3, 4)])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(OneaError, match="no number may be negative, and at least one side must have classes"):
        Sizes(*sizes)


def test_every_operator_has_title_and_paper(name):
    kind = operator_class(name)
    assert kind.title
    assert kind.paper.startswith("https://arxiv.org/abs/")
    assert kind.needs in ("", "fisher", "gram")
    assert dataclasses.is_dataclass(kind)
    assert "title" not in kind.__dataclass_fields__


# The registry


def test_options_are_read_as_text_and_unknown_names_get_a_hint():
    assert make_operator("ties", density="0.5", scale="0.6") == operator_class("ties")(density=0.5, scale=0.6)
    with pytest.raises(OneaError, match="Unknown operator 'tie'; did you mean 'ties'"):
        make_operator("tie")
    with pytest.raises(OneaError, match="Unknown option 'densty'; did you mean 'density'"):
        make_operator("ties", densty=1)


def test_the_registry_imports_nothing_heavy():
    code = "import sys, onea.merging, onea.cli.merge; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("ties", {"density": 0}),
        ("ties", {"scale": 0}),
        ("knots-ties", {"density": 2}),
        ("dare", {"drop": 1}),
        ("regmean", {"off_diagonal": 2}),
        ("tsv", {"components": 1}),
        ("iso-c", {"tolerance": 1}),
        ("opcm", {"alpha": -1}),
        ("magmax", {"scale": 0}),
        ("acmap", {"limit": 0}),
    ],
)
def test_options_out_of_range_are_refused(operator, options):
    with pytest.raises(OneaError, match="must"):
        make_operator(operator, **options)


# Means


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=8))
def test_the_weighted_mean_is_exact(classes):
    sides = [side(index) for index in range(len(classes))]
    expected = {
        key: sum(count * part[key] for count, part in zip(classes, sides, strict=True)) / sum(classes) for key in SHAPES
    }
    result = fold(make_operator("weighted-mean"), sides, classes, [0] * len(classes))
    assert_same(result, expected, rtol=1e-12, atol=1e-12)


def test_the_weighted_mean_can_count_samples():
    merged, _ = make_operator("weighted-mean", by="samples")(
        {"w": torch.tensor([0.0])}, {"w": torch.tensor([8.0])}, SIZES, {}
    )
    assert merged["w"].item() == 1.0


def test_acmap_is_the_running_mean_until_its_limit_and_then_stays():
    sides = [side(index) for index in range(5)]
    limited = fold(make_operator("acmap", limit=3), sides, [1] * 5, [0] * 5)
    expected = {key: torch.stack([tensors[key] for tensors in sides[:3]]).mean(0) for key in SHAPES}
    assert_same(limited, expected)


def test_task_arithmetic_scales_all_tasks_equally():
    sides = [side(index) for index in range(4)]
    result = fold(make_operator("task-arithmetic"), sides, [1] * 4, [0] * 4)
    assert_same(result, {key: 0.3 * sum(tensors[key] for tensors in sides) for key in SHAPES})


# TIES, DARE, MagMax


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 9999))
def test_ties_of_two_untrimmed_vectors_is_the_mean_or_the_larger_one(seed):
    old, new = random((50,), seed), random((50,), seed + 10_000)
    merged, _ = make_operator("ties", density=1)({"w": old}, {"w": new}, SIZES, {})
    larger = torch.where(new.abs() > old.abs(), new, old)
    torch.testing.assert_close(merged["w"], torch.where(old * new > 0, (old + new) / 2, larger))


def test_ties_trims_the_new_side_over_all_tensors_together():
    old, new = side(1), side(2)
    merged, _ = make_operator("ties", density=0.2)(old, new, SIZES, {})
    total = sum(value.numel() for value in new.values())
    kept = round(0.2 * total)
    smallest = torch.cat([value.abs().flatten() for value in new.values()]).sort(descending=True).values[kept - 1]
    changed = sum(int((merged[key] != old[key]).sum()) for key in old)
    assert changed <= kept
    for key in old:
        small = new[key].abs() < smallest
        assert torch.equal(merged[key][small], old[key][small]), "what is trimmed has no vote"


def test_ties_does_not_scale_earlier_tasks_twice():
    sides = [side(index) for index in range(3)]
    plain, scaled = (fold(make_operator("ties", scale=scale), sides, [1] * 3, [0] * 3) for scale in (1, 0.6))
    assert_same(scaled, {key: 0.6 * value for key, value in plain.items()})


@pytest.mark.parametrize("name", ["ties", "knots-ties"])
def test_every_task_has_one_vote(name):
    """Untrimmed entries of one sign merge to the mean of all tasks, in which the newest has no larger weight."""
    sides = [{"w": torch.rand(4, 3, dtype=torch.float64) + 1} for _ in range(5)]
    merged = fold(make_operator(name, density=1), sides, [1] * 5, [1] * 5)["w"]
    if name == "ties":
        torch.testing.assert_close(merged, torch.stack([side["w"] for side in sides]).mean(0))
    operator, newest = make_operator(name, density=1), {"w": -torch.ones(4, 3, dtype=torch.float64) * 1.9}
    kept, state = operator({"w": torch.ones(4, 3, dtype=torch.float64)}, newest, SIZES, {"count": torch.tensor(2)})
    assert (kept["w"] > 0).all(), "two tasks outvote one"
    assert int(state["count"]) == 3


def test_votes_by_classes_decide_the_sign():
    old, new = torch.tensor([1.0]), torch.tensor([-2.0])
    assert elect(old, new).item() == -2
    assert elect(old, new, 14, 6).item() == 1
    merged, _ = make_operator("ties", density=1, weights="classes")({"w": old}, {"w": new}, SIZES, {})
    assert merged["w"].item() == 1


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 60), st.floats(0.01, 1))
def test_trimming_keeps_the_requested_share(entries, density):
    trimmed = trim({"a": random((entries,), entries), "b": random((2, entries), 7777)}, density)
    kept = sum(int((value != 0).sum()) for value in trimmed.values())
    assert kept == max(1, round(density * 3 * entries))


def test_dare_keeps_the_new_side_on_average_and_drops_nothing_at_zero():
    old, new = {"w": torch.zeros(40, 50)}, {"w": torch.ones(40, 50)}
    samples = torch.stack(
        [make_operator("dare", drop=0.4, seed=s)(old, new, SIZES, {}).tensors["w"] for s in range(100)]
    )
    values = samples.unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 0.5 / 0.6]))
    assert samples.mean().item() == pytest.approx(0.5, abs=0.005)
    assert (samples.mean(0) - 0.5).abs().max() < 0.25
    assert_same(
        make_operator("dare", drop=0)(side(1), side(2), SIZES, {}).tensors,
        make_operator("running-mean")(side(1), side(2), SIZES, {}).tensors,
    )


def test_dare_has_another_mask_at_every_merge():
    operator = make_operator("dare", drop=0.5)
    zero, one = {"w": torch.zeros(100)}, {"w": torch.ones(100)}
    masks = [operator(zero, one, SIZES, {"count": torch.tensor(count)}).tensors["w"] > 0 for count in (1, 2)]
    assert not torch.equal(masks[0], masks[1])


def test_magmax_keeps_the_largest_change_and_the_newer_of_two_equal_ones():
    sides = [side(index) for index in range(4)]
    result = fold(make_operator("magmax"), sides, [1] * 4, [0] * 4)
    for key in SHAPES:
        stacked = torch.stack([tensors[key] for tensors in sides])
        largest = stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]
        torch.testing.assert_close(result[key], 0.5 * largest)
    tie, _ = make_operator("magmax", scale=1)({"w": torch.tensor([2.0])}, {"w": torch.tensor([-2.0])}, SIZES, {})
    assert tie["w"].item() == -2


# Fisher, RegMean


def test_fisher_running_equals_batch():
    sides = [side(index) for index in range(4)]
    result = fold(make_operator("fisher"), sides, [1] * 4, list(range(4)))
    for key in SHAPES:
        weights = torch.stack([statistics(tensors, i)[f"fisher.{key}"] for i, tensors in enumerate(sides)])
        expected = (weights * torch.stack([tensors[key] for tensors in sides])).sum(0) / weights.sum(0)
        torch.testing.assert_close(result[key], expected)


def test_fisher_ignores_a_side_without_information():
    old, new = {"w": torch.tensor([1.0, 1.0, 1.0])}, {"w": torch.tensor([5.0, 5.0, 5.0])}
    state = {"fisher.w": torch.tensor([2.0, 0.0, 0.0]), "new_fisher.w": torch.tensor([0.0, 3.0, 0.0])}
    merged, kept = make_operator("fisher")(old, new, SIZES, state)
    assert merged["w"].tolist() == [1, 5, 1]
    assert kept["fisher.w"].tolist() == [2, 3, 0]


def test_regmean_solves_the_least_squares_of_all_sides():
    weights = [random((3, 6), i) for i in range(3)]
    inputs = [random((30 * (i + 1), 6), 50 + i) for i in range(3)]
    merged, state = {"w": weights[0]}, {"gram.w": inputs[0].T @ inputs[0]}
    for weight, rows in zip(weights[1:], inputs[1:], strict=True):
        merged, state = make_operator("regmean", off_diagonal=1)(
            merged, {"w": weight}, SIZES, state | {"new_gram.w": rows.T @ rows}
        )
    outputs = torch.cat([rows @ weight.T for rows, weight in zip(inputs, weights, strict=True)])
    expected = torch.linalg.lstsq(torch.cat(inputs), outputs).solution.T
    torch.testing.assert_close(merged["w"], expected)


def test_regmean_without_off_diagonals_weighs_columns_by_their_energy():
    old, new = random((3, 5), 1), random((3, 5), 2)
    state = {"gram.w": random((5, 5), 3).square(), "new_gram.w": random((5, 5), 4).square()}
    merged, _ = make_operator("regmean", off_diagonal=0)({"w": old}, {"w": new}, SIZES, state)
    left, right = state["gram.w"].diagonal(), state["new_gram.w"].diagonal()
    torch.testing.assert_close(merged["w"], (old * left + new * right) / (left + right))


def test_regmean_keeps_the_accumulated_side_in_directions_without_inputs():
    seen = torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)
    gram = torch.outer(seen, seen)
    old, new = random((3, 5), 1), random((3, 5), 2)
    merged, _ = make_operator("regmean")({"w": old}, {"w": new}, SIZES, {"gram.w": gram, "new_gram.w": gram})
    torch.testing.assert_close(merged["w"][:, 1:], old[:, 1:])
    torch.testing.assert_close(merged["w"][:, 0], (old[:, 0] + new[:, 0]) / 2)


def test_statistics_of_the_wrong_shape_are_refused():
    state = {"fisher.w": torch.ones(3), "new_fisher.w": torch.ones(2)}
    with pytest.raises(OneaError, match=r"state\['new_fisher.w'\] has shape \(2,\); it must be \(3,\)"):
        make_operator("fisher")({"w": torch.ones(3)}, {"w": torch.ones(3)}, SIZES, state)


# KnOTS


def test_knots_with_the_mean_is_the_mean():
    sides = [side(index) for index in range(4)]
    result = fold(make_operator("knots"), sides, [1] * 4, [0] * 4)
    assert_same(result, {key: torch.stack([tensors[key] for tensors in sides]).mean(0) for key in SHAPES})
    weighted, _ = make_operator("knots", weights="classes")(side(1), side(2), SIZES, {})
    assert_same(weighted, make_operator("weighted-mean")(side(1), side(2), SIZES, {}).tensors)


def test_the_shared_basis_is_orthonormal_and_holds_both_sides():
    old, new = random((6, 4), 1) @ random((4, 5), 2), random((6, 5), 3)
    basis, left, right = shared_basis(old, new)
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64))
    torch.testing.assert_close(basis @ left, old)
    torch.testing.assert_close(basis @ right, new)
    energy = left @ left.T + right @ right.T
    spectrum = torch.linalg.svdvals(torch.cat([old, new], 1))
    torch.testing.assert_close(energy, torch.diag(spectrum.square()))


def test_knots_ties_merges_codes_and_rotates_with_the_outputs():
    old, new = {"w": random((5, 7), 1)}, {"w": random((5, 7), 2)}
    merged = make_operator("knots-ties", density=0.3)(old, new, SIZES, {}).tensors["w"]
    assert not torch.allclose(merged, make_operator("ties", density=0.3)(old, new, SIZES, {}).tensors["w"])
    basis, left, right = shared_basis(old["w"], new["w"])
    expected = basis @ elect(left, trim({"w": right}, 0.3)["w"])
    torch.testing.assert_close(merged, expected)
    turn = torch.linalg.qr(random((5, 5), 3))[0]
    turned, _ = make_operator("knots-ties", density=0.3)({"w": turn @ old["w"]}, {"w": turn @ new["w"]}, SIZES, {})
    torch.testing.assert_close(turned["w"], turn @ merged)


def test_knots_folds_a_bias_into_its_weight_as_a_column():
    old, new = ({"l.weight": random((5, 6), i), "l.bias": random((5,), 10 + i)} for i in (1, 2))
    apart = make_operator("knots-ties")(old, new, SIZES, {}).tensors
    joined = [{"w": torch.cat([each["l.weight"], each["l.bias"][:, None]], 1)} for each in (old, new)]
    together = make_operator("knots-ties")(*joined, SIZES, {}).tensors["w"]
    torch.testing.assert_close(torch.cat([apart["l.weight"], apart["l.bias"][:, None]], 1), together)


def test_knots_of_two_equal_sides_changes_nothing():
    untrimmed = make_operator("knots-ties", density=1)
    assert_same(untrimmed(side(1), side(1), SIZES, {}).tensors, side(1), rtol=1e-6, atol=1e-5)


# TSV, Iso-C, OPCM


def orthogonal_pair() -> tuple[Tensor, Tensor]:
    left, right = (torch.linalg.qr(random((8, 8), seed))[0] for seed in (1, 2))
    values = torch.tensor([5.0, 4.0, 3.0, 2.0], dtype=torch.float64)
    old = left[:, :2] * values[:2] @ right[:, :2].T
    return old, left[:, 2:4] * values[2:] @ right[:, 2:4].T


def test_tsv_adds_orthogonal_sides_unchanged():
    old, new = orthogonal_pair()
    merged, _ = make_operator("tsv")({"w": old}, {"w": new}, Sizes(3, 3, 3, 3), {})
    torch.testing.assert_close(merged["w"], old + new)


def test_tsv_divides_the_components_by_classes():
    old, new = orthogonal_pair()
    merged, _ = make_operator("tsv", components=3)({"w": old}, {"w": new}, Sizes(20, 1, 20, 1), {})
    first = leading_components(new, 1)
    torch.testing.assert_close(merged["w"], old + first[0] * first[1] @ first[2].T)


def test_tsv_makes_bases_orthonormal_and_repeated_directions_share():
    vectors = random((9, 4), 3)
    polar = orthogonalise(vectors)
    torch.testing.assert_close(polar.T @ polar, torch.eye(4, dtype=torch.float64))
    old = random((6, 6), 4)
    merged, _ = make_operator("tsv")({"w": old}, {"w": old}, Sizes(1, 1, 1, 1), {})
    part = leading_components(old, 3)
    torch.testing.assert_close(merged["w"], part[0] * part[1] @ part[2].T)


def test_iso_c_has_a_flat_spectrum_of_unchanged_rank_and_sum():
    old, new = (random((64, 4), i) @ random((4, 64), 10 + i) for i in (1, 2))
    merged, state = make_operator("iso-c")({"w": old.float()}, {"w": new.float()}, SIZES, {})
    spectrum, raw = torch.linalg.svdvals(merged["w"].double()), torch.linalg.svdvals(old + new)
    torch.testing.assert_close(spectrum[:8], raw[:8].mean().expand(8), rtol=1e-5, atol=1e-5)
    assert spectrum[8] < 1e-4
    torch.testing.assert_close(state["sum.w"].float(), (old + new).float())


def test_iso_c_flattens_the_raw_sum_not_the_deployed_copy():
    sides = [side(index) for index in range(4)]
    result = fold(make_operator("iso-c", scale=1.3), sides, [1] * 4, [0] * 4)
    total = sum(tensors["up.weight"] for tensors in sides)
    left, spectrum, right = torch.linalg.svd(total, full_matrices=False)
    torch.testing.assert_close(result["up.weight"], 1.3 * spectrum.mean() * left @ right)
    torch.testing.assert_close(result["up.bias"], torch.stack([tensors["up.bias"] for tensors in sides]).mean(0))


def norm(tensors: Tensors) -> float:
    return float(torch.cat([value.flatten() for value in tensors.values()]).norm())


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 6), st.floats(0, 1), st.booleans())
def test_opcm_keeps_the_mean_norm_of_the_tasks(count, alpha, keep_diagonal):
    sides = [side(index) for index in range(count)]
    result = fold(make_operator("opcm", alpha=alpha, keep_diagonal=keep_diagonal), sides, [1] * count, [0] * count)
    assert norm(result) == pytest.approx(sum(map(norm, sides)) / count)


def full_opcm(old: Tensor, new: Tensor, alpha: float, keep_diagonal: bool) -> Tensor:
    """The projection as in the paper, with full bases."""
    U, s, Vt = torch.linalg.svd(old, full_matrices=True)
    c = U.T @ new @ Vt.T
    block = next(i for i in range(len(s)) if s[: i + 1].sum() / s.sum() > alpha)
    c[:block, :block] = 0
    if not keep_diagonal:
        for i in range(len(s)):
            c[i, i] = 0
    return U @ c @ Vt


@pytest.mark.parametrize("keep_diagonal", [False, True])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)])
def test_opcm_projects_as_the_full_decomposition_does(shape, keep_diagonal):
    old, new = random(shape, 1), random(shape, 2)
    operator = make_operator("opcm", keep_diagonal=keep_diagonal)
    torch.testing.assert_close(operator.project(old, new), full_opcm(old, new, 0.5, keep_diagonal))
    if not keep_diagonal:
        left, _, right = torch.linalg.svd(old, full_matrices=False)
        assert (left.T @ operator.project(old, new) @ right.T).diagonal().abs().max() < 1e-12


def test_opcm_of_three_tasks_step_by_step():
    a, b, c = (random((5, 4), i) for i in range(3))
    result = fold(make_operator("opcm"), [{"w": a}, {"w": b}, {"w": c}], [1] * 3, [0] * 3)["w"]
    second = a + full_opcm(a, b, 0.5, False)
    factor = second.norm() / ((a.norm() + b.norm()) / 2)
    third = factor * (second / factor) + full_opcm(second / factor, c, 0.5, False)
    torch.testing.assert_close(result, third / third.norm() * (a.norm() + b.norm() + c.norm()) / 3)
