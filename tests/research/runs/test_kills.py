# SPDX-License-Identifier: Apache-2.0
"""A run that is killed at any moment has the same final record when the command is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.killing import kill_all, kill_at_every_event

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs fork and /proc")
CASES = ("first run", "resumed run", "first pack", "later pack", "copied pack")


@pytest.mark.parametrize(("case", "step"), [("first run", 17)])
def test_a_kill_does_not_change_the_final_record(case, step, tiny_vit, tiny_images, tmp_path):
    """A sample; --slow kills at every event."""
    outcome = kill_all(case, tiny_vit, tiny_images, tmp_path / "kills", step)
    assert not outcome["problems"], "\n".join(outcome["problems"])
    assert outcome["kills"] == len(range(0, outcome["events"], step)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_kill_at_any_event_does_not_change_the_final_record(case, tiny_vit, tiny_images, tmp_path, tried):
    fewest = 5 if case == "copied pack" else 20
    outcome = kill_at_every_event(case, tiny_vit, tiny_images, tmp_path / "kills", tried, fewest)
    assert outcome["switched"] or case.endswith("pack"), "the last events come after the new files are valid"


def test_repeating_a_finished_run_writes_nothing(tiny_vit, tiny_images, tmp_path):
    outcome = kill_all("finished run", tiny_vit, tiny_images, tmp_path / "kills", 1)
    assert (outcome["events"], outcome["changed"], outcome["problems"]) == (0, False, [])
