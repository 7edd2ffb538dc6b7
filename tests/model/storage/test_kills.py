# SPDX-License-Identifier: Apache-2.0
"""A command that is killed at any moment leaves the model as before or as after the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.killing import kill_all, kill_at_every_event

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs fork and /proc")
CASES = (
    *("first teach", "later teach", "rename", "forget", "forget everywhere", "undo", "save", "first save"),
    *("teach with copies", "refresh", "forget copies everywhere"),
)


@pytest.mark.parametrize(("case", "step"), [("rename", 11), ("forget everywhere", 13), ("refresh", 11)])
def test_a_kill_leaves_the_model_as_before_or_as_after(case, step, tiny_vit, tiny_images, tmp_path):
    """A sample; --slow kills at every event."""
    found = kill_all(case, tiny_vit, tiny_images, tmp_path / "kills", step)
    assert not found["problems"], "\n".join(found["problems"])
    assert found["kills"] == len(range(0, found["events"], step)) > 3
    assert found["switched"], "the last events come after the new version is valid"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_kill_leaves_the_model_as_before_or_as_after(case, tiny_vit, tiny_images, tmp_path, tried):
    kill_at_every_event(case, tiny_vit, tiny_images, tmp_path / "kills", tried)
