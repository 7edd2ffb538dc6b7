# SPDX-License-Identifier: Apache-2.0
"""Streams: published orders, properties of any stream, and error messages."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onea.data.dataset import Group
from onea.errors import OneaError
from onea.research.streams import (
    Stream,
    balanced_sizes,
    class_order,
    group_tasks,
    long_tail_counts,
    make_stream,
    order_sizes,
    parse_sizes,
    step_sizes,
)

SIZES_OF_100 = (36, 23, 14, 9, 6, 4, 3, 2, 2, 1)

gammas = st.floats(1e-6, 1.0)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int]:
    classes = draw(st.integers(1, 300))
    return classes, draw(st.integers(1, classes))


# ---- the published configurations -------------------------------------------------------------------------------


def test_published_sizes_of_100_classes_in_10_tasks() -> None:
    assert step_sizes(100, 10, 0.01) == SIZES_OF_100
    assert order_sizes(SIZES_OF_100, "shuffled", 1) == (14, 1, 3, 6, 36, 9, 23, 2, 2, 4)


def test_published_sizes_of_200_classes_in_20_tasks() -> None:
    stream = make_stream(classes=200, tasks=20, seed=1)
    assert " ".join(map(str, stream.sizes)) == "20 2 10 4 25 2 16 2 8 32 3 40 1 1 5 2 7 3 4 13"


def test_published_sizes_of_200_classes_in_40_tasks() -> None:
    sizes = step_sizes(200, 40, 0.01)
    assert sum(sizes) == 200
    assert sizes.count(1) == 9
    assert sizes[:5] == (20, 17, 15, 14, 12)


@pytest.mark.parametrize("gamma", [0.001, 0.005, 0.01, 0.05])
@pytest.mark.parametrize(("classes", "tasks"), [(100, 10), (100, 20), (200, 20), (200, 40)])
def test_the_correction_after_rounding_preserves_the_order_in_the_papers_settings(
    classes: int, tasks: int, gamma: float
) -> None:
    """The final sort, needed for almost balanced streams, changes no published stream."""
    ratio = [gamma ** (k / (tasks - 1)) for k in range(tasks)]
    sizes = [1 + int(np.round(r / sum(ratio) * (classes - tasks))) for r in ratio]
    residual = classes - sum(sizes)
    for i in range(abs(residual)):
        sizes[i] += 1 if residual > 0 else -1
    assert step_sizes(classes, tasks, gamma) == tuple(sizes)


def test_class_order_is_legacy_numpy() -> None:
    assert class_order(100, 1993)[:6] == (68, 56, 78, 8, 23, 84)  # the CIL literature's order for CIFAR-100
    assert class_order(7, 3) == tuple(np.random.RandomState(3).permutation(7))


# ---- properties ---------------------------------------------------------------------------------------------------


@given(counts(), gammas)
def test_step_sizes_descend_and_add_up(counts_: tuple[int, int], gamma: float) -> None:
    classes, tasks = counts_
    sizes = step_sizes(classes, tasks, gamma)
    assert len(sizes) == tasks
    assert sum(sizes) == classes
    assert min(sizes) >= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(1, 300), gammas)
def test_step_sizes_of_one_task_and_of_as_many_tasks_as_classes(classes: int, gamma: float) -> None:
    assert step_sizes(classes, 1, gamma) == (classes,)
    assert step_sizes(classes, classes, gamma) == (1,) * classes


@given(counts())
def test_balanced_sizes_differ_by_at_most_one(counts_: tuple[int, int]) -> None:
    classes, tasks = counts_
    sizes = balanced_sizes(classes, tasks)
    assert sum(sizes) == classes
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert step_sizes(classes, tasks, 1.0) == sizes


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), seeds)
def test_order_sizes_only_permutes(sizes: list[int], seed: int) -> None:
    shuffled = list(sizes)
    np.random.RandomState(seed).shuffle(shuffled)
    assert order_sizes(sizes, "shuffled", seed) == tuple(shuffled)
    assert order_sizes(sizes, "descending", seed) == tuple(sorted(sizes, reverse=True))
    assert order_sizes(sizes, "given", seed) == tuple(sizes)


@given(st.integers(1, 1000), st.integers(1, 200), st.floats(1e-6, 1.0))
def test_long_tail_counts_decrease_from_n_max_to_at_least_two(n_max: int, classes: int, mu: float) -> None:
    samples = long_tail_counts(n_max, classes, mu)
    assert len(samples) == classes
    assert samples[0] == max(2, n_max)
    assert list(samples) == sorted(samples, reverse=True)
    assert samples[-1] == (max(2, round(n_max * mu)) if classes > 1 else max(2, n_max))


@given(counts(), gammas, seeds, st.sampled_from([None, 0.1, 1.0]), st.sampled_from(["shuffled", "descending", None]))
def test_streams_convert_to_json(counts_: tuple[int, int], gamma: float, seed: int, mu: float | None, order) -> None:
    classes, tasks = counts_
    stream = make_stream(classes=classes, tasks=tasks, gamma=gamma, seed=seed, order=order, long_tail=mu, n_max=100)
    fields = {name: values and tuple(values) for name, values in json.loads(json.dumps(stream.to_json())).items()}
    assert Stream(**(fields | {"names": ()})) == stream
    assert sorted(stream.class_order) == list(range(classes))


@given(counts(), seeds)
def test_tasks_partition_the_positions(counts_: tuple[int, int], seed: int) -> None:
    classes, tasks = counts_
    stream = make_stream(classes=classes, tasks=tasks, seed=seed)
    assert stream.offsets[0] == 0
    assert stream.offsets[-1] == stream.classes == classes
    assert len(stream.offsets) == stream.tasks + 1 == tasks + 1
    for task in range(tasks):
        assert stream.range_of(task) == range(stream.offsets[task], stream.offsets[task + 1])
    assert [p for task in range(tasks) for p in stream.range_of(task)] == list(range(classes))


# ---- kinds --------------------------------------------------------------------------------------------------------


def test_default_orders() -> None:
    assert make_stream(classes=100, tasks=10).sizes == (14, 1, 3, 6, 36, 9, 23, 2, 2, 4)
    assert make_stream(classes=100, tasks=10, order="given").sizes == SIZES_OF_100
    assert make_stream(classes=10, tasks=3, kind="balanced").sizes == (4, 3, 3)
    assert make_stream(classes=6, kind="sizes", sizes=(1, 3, 2)).sizes == (1, 3, 2)
    assert make_stream(classes=6, kind="sizes", sizes=(1, 3, 2), order="descending").sizes == (3, 2, 1)


def test_the_class_order_is_the_same_for_every_kind() -> None:
    kinds = [make_stream(classes=100, tasks=10, kind=kind, seed=5) for kind in ("step", "balanced")]
    assert {stream.class_order for stream in kinds} == {class_order(100, 5)}


GROUPS = (Group("greek", (0, 1, 2)), Group("runes", (3,)), Group("latin", (7, 4, 6, 5)))


def test_natural_groups_are_the_tasks() -> None:
    stream = make_stream(classes=8, kind="natural", groups=GROUPS, seed=2)
    assert stream.names == ("greek", "runes", "latin")
    assert stream.sizes == (3, 1, 4)
    expected_order = class_order(8, 2)
    for task, group in enumerate(GROUPS):
        ids = [stream.class_order[p] for p in stream.range_of(task)]
        assert ids == [c for c in expected_order if c in group.classes]


def test_natural_groups_are_reordered_as_a_whole() -> None:
    stream = make_stream(classes=8, kind="natural", groups=GROUPS, order="descending")
    assert stream.names == ("latin", "greek", "runes")
    shuffled = make_stream(classes=8, kind="natural", groups=GROUPS, order="shuffled", seed=1)
    assert shuffled.sizes == order_sizes((3, 1, 4), "shuffled", 1)
    of = {g.name: set(g.classes) for g in GROUPS}
    for task, name in enumerate(shuffled.names):
        assert {shuffled.class_order[p] for p in shuffled.range_of(task)} == of[name]


def test_long_tail_of_a_stream() -> None:
    stream = make_stream(classes=5, tasks=2, long_tail=0.1, n_max=500)
    assert stream.samples == (500, 281, 158, 89, 50)
    assert make_stream(classes=5, tasks=2, n_max=500).samples is None
    assert long_tail_counts(500, 1) == (500,)


def test_sizes_are_parsed_from_text() -> None:
    assert parse_sizes("36, 1 ,14", 51) == (36, 1, 14)
    assert parse_sizes("5") == (5,)


# ---- error messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step_sizes(5, 6, 0.1), "5 classes cannot fill 6 tasks"),
        (lambda: balanced_sizes(5, 6), "5 classes cannot fill 6 tasks"),
        (lambda: step_sizes(5, 2, 0.0), "gamma .* cannot be 0"),
        (lambda: step_sizes(5, 2, 1.5), "gamma .* cannot be 1.5"),
        (lambda: step_sizes(5, 2, float("nan")), "gamma .* cannot be nan"),
        (lambda: step_sizes(0, 1, 0.1), "classes must be at least 1, not 0"),
        (lambda: step_sizes(5, 0, 0.1), "tasks must be at least 1, not 0"),
        (lambda: balanced_sizes(-3, 1), "classes must be at least 1, not -3"),
        (lambda: class_order(5, -1), "seed cannot be -1"),
        (lambda: order_sizes((1, 2), "shufled", 1), "no order 'shufled'; did you mean 'shuffled'"),
        (lambda: parse_sizes("3,x"), "Cannot read '3,x'"),
        (lambda: parse_sizes(""), "at least one task"),
        (lambda: parse_sizes("3,0,2"), "cannot have 0 classes"),
        (lambda: parse_sizes("3,2", 6), "add up to 5 but there are 6 classes; add 1"),
        (lambda: parse_sizes("3,2", 4), "add up to 5 but there are 4 classes; remove 1"),
        (lambda: long_tail_counts(500, 10, 0), "mu .* cannot be 0"),
        (lambda: long_tail_counts(500, 10, 2), "mu .* cannot be 2"),
        (lambda: long_tail_counts(0, 10), "n_max must be at least 1"),
        (lambda: make_stream(classes=5), "needs a number of tasks"),
        (lambda: make_stream(classes=5, tasks=2, kind="stepp"), "no kind 'stepp'; did you mean 'step'"),
        (lambda: make_stream(classes=5, tasks=2, sizes=(3, 2)), "kind 'step'"),
        (lambda: make_stream(classes=5, tasks=3, kind="sizes", sizes=(3, 2)), "3 tasks were asked for but there are 2"),
        (lambda: make_stream(classes=5, tasks=2, long_tail=0.1), "give n_max"),
        (lambda: make_stream(classes=5, kind="natural"), "no natural groups"),
        (lambda: make_stream(classes=8, tasks=2, kind="natural", groups=GROUPS), "2 tasks were asked"),
        (lambda: make_stream(classes=9, kind="natural", groups=GROUPS), "Class 8 is in no group"),
        (lambda: make_stream(classes=7, kind="natural", groups=GROUPS), "contain class 7, but"),
        (lambda: group_tasks((Group("a", (0, 1)), Group("b", (1,))), 2, "given", 1), "Class 1 .* 'a' and 'b'"),
        (lambda: group_tasks((Group("a", (0, 1)), Group("b", ())), 2, "given", 1), "group 'b' has no classes"),
        (lambda: Stream((0, 0), (2,)), "exactly once"),
        (lambda: Stream((0, 1), (1,)), "add up to 1"),
        (lambda: Stream((0, 1), (1, 1), ("a",)), "1 task names for 2 tasks"),
        (lambda: Stream((0, 1), (2,), (), (5,)), "1 sample counts for 2 classes"),
        (lambda: Stream((0, 1), (2,), (), (5, 0)), "0 images"),
    ],
)
def test_error_messages(call, message: str) -> None:
    with pytest.raises(OneaError, match=message) as caught:
        call()
    assert re.fullmatch(r"[^\n]+; [^\n]+[.?]", str(caught.value)), "reason; remedy"


def test_a_task_outside_the_stream_is_refused() -> None:
    stream = Stream((0, 1), (2,))
    for task in (-1, 1):
        with pytest.raises(IndexError, match="outside"):
            stream.range_of(task)
