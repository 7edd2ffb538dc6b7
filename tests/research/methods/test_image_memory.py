# SPDX-License-Identifier: Apache-2.0
"""Methods with memory: which images are kept, when they are trained on, and that runs resume."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.methods import learn_all, prepared, shown_images

from onea.errors import OneaError
from onea.learner.memory import PENDING, Waiting, parse_memory, select_evenly
from onea.research.methods.image_memory import ImageMemory

SIZES = "3,1,1,1"


def with_memory(tiny_run, memory, method="one-a-plus", **options):
    values = tiny_run["options"] | {"memory": memory, "trigger": 0.3} | options
    return prepared(tiny_run, method, options=values, sizes=SIZES)


def reports(ready):
    return [ready.method.learn(ready.task(index)) for index in range(4)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 99))
def test_images_are_selected_evenly_from_all_groups(groups, count, seed):
    numbers = torch.tensor(groups)
    kept = select_evenly(numbers, count, torch.Generator().manual_seed(seed))
    assert len(kept) == min(count, len(groups)) == len(kept.unique())
    assert kept.tolist() == sorted(kept.tolist())
    available = torch.bincount(numbers)
    taken = torch.bincount(numbers[kept], minlength=len(available))
    not_all = taken < available
    assert not bool(not_all.any()) or int(taken[not_all].min()) >= int(taken.max()) - 1


@pytest.mark.parametrize("value", ["-1", "ten", 2.5, True, None, "", "12345"])
def test_an_invalid_memory_is_refused(value):
    with pytest.raises(OneaError, match="give the number of images of each class to keep"):
        parse_memory(value)


def test_a_single_class_is_never_due():
    assert not Waiting(1, 1).is_due(0.2)
    assert not Waiting(0, 9).is_due(0.2)


def test_classes_wait_until_they_are_numerous_enough(tiny_run):
    """Tasks of 3, 1, 1 and 1 classes: one of four classes is too few, two of five are enough."""
    ready = with_memory(tiny_run, "2")
    learned = reports(ready)
    assert [report["trained"] for report in learned] == [True, False, True, False]
    assert [report["memory"]["replayed"] for report in learned] == [0, 0, 8, 0]
    assert learned[-1]["memory"]["images"] == 2 * 6
    assert ready.method.memory.trained.gt(0).tolist() == [True] * 5 + [False]


def test_pending_images_are_deleted_by_the_next_training(tiny_run):
    ready = with_memory(tiny_run, PENDING)
    learned = reports(ready)
    images = [len(ready.task(index)) for index in range(4)]
    assert [report["memory"]["images"] for report in learned] == [0, images[1], 0, images[3]]
    assert [report["memory"]["replayed"] for report in learned] == [0, 0, images[1], 0]


def test_without_memory_only_the_first_task_trains(tiny_run):
    assert [report["trained"] for report in reports(with_memory(tiny_run, "0"))] == [True, False, False, False]


@pytest.mark.parametrize("memory", ["2", PENDING])
@pytest.mark.parametrize("method", ["one-a-plus", "one-a"])
def test_a_run_with_memory_resumes_bit_for_bit(memory, method, tiny_run):
    whole = learn_all(with_memory(tiny_run, memory, method), range(4))
    first, second = with_memory(tiny_run, memory, method), with_memory(tiny_run, memory, method)
    learn_all(first, [0, 1])
    second.method.load_state_dict({name: value.clone() for name, value in first.method.state_dict().items()})
    learn_all(second, [2, 3])
    expected, resumed = whole.state_dict(), second.method.state_dict()
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert torch.isfinite(whole.scores(shown_images(second))).all()


def test_images_of_the_memory_count_in_no_statistics(tiny_run):
    """Each class has the number of its own task's images, however often they were trained on."""
    ready = with_memory(tiny_run, "2")
    learn_all(ready, range(4))
    (statistics,) = ready.method.statistics.values()
    expected = torch.cat([torch.bincount(ready.task(i).labels - ready.task(i).classes.start) for i in range(4)])
    assert torch.equal(statistics.counts, expected * ready.method.options.views)


def test_the_merge_splits_a_class_by_its_images_on_both_sides(tiny_run):
    ready = with_memory(tiny_run, "2")
    learn_all(ready, [0, 1])
    task, memory = ready.task(2), ready.method.memory
    trained = torch.ones(len(memory.extend(task)), dtype=torch.bool)
    sizes = memory.sizes(task, trained)
    per_class = int(memory.trained[0])
    old = 3 * per_class / (per_class + 2)
    assert sizes.accumulated_classes == pytest.approx(old)
    assert sizes.new_classes == pytest.approx(5 - old)


def test_images_of_trained_classes_are_not_counted_again(tiny_run):
    ready = with_memory(tiny_run, "2")
    learn_all(ready, [0])
    before = ready.method.memory.trained.clone()
    learn_all(ready, [1, 2])
    assert torch.equal(ready.method.memory.trained[:3], before)


def test_an_empty_memory_changes_nothing(tiny_run):
    task = with_memory(tiny_run, "2").task(0)
    assert ImageMemory(policy=2).extend(task) is task
