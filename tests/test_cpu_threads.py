# SPDX-License-Identifier: Apache-2.0
"""OpenMP's threads wait asleep, whether onea or torch was imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MAKE = "from onea.runtime import make_runtime; make_runtime('cpu', 'fp32', 2); make_runtime('cpu', 'fp32', 2)"
TELL = """
import json, os, threading, torch
held = [each.name for each in threading.enumerate() if each.name == "onea-openmp"]
threads = len(os.listdir("/proc/self/task")), torch.get_num_threads()
print(json.dumps([os.environ.get("OMP_WAIT_POLICY"), len(held), *threads]))
"""


def told(first: str, **given: str) -> list[object]:
    """The policy, whether threads are held, the number of all threads, and of those that torch computes with."""
    import json

    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    words = [sys.executable, "-c", f"{first}\n{MAKE}\n{TELL}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=kept | given)
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
def test_threads_outnumber_the_cores_where_torch_was_loaded_without_a_policy():
    policy, held, threads, computing = told("import torch, onea; onea.OneA")
    assert (policy, held, computing) == (None, 1, 2)
    assert int(str(threads)) > (os.cpu_count() or 1) + 1, "they sleep, and are there"


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
@pytest.mark.parametrize(
    ("first", "given", "policy"),
    [
        ("import onea; onea.OneA; import torch", {}, "PASSIVE"),
        ("import onea; onea.OneA", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ],
)
def test_nothing_is_held_where_a_policy_was_set_in_time(first, given, policy):
    assert told(first, **given)[:2] == [policy, 0]
