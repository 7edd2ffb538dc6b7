# SPDX-License-Identifier: Apache-2.0
"""OpenMP's waiting threads sleep, no matter whether onea or torch was imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MAKE_RUNTIME = "from onea.runtime import make_runtime; make_runtime('cpu', 'fp32', 2); make_runtime('cpu', 'fp32', 2)"
REPORT = """
import json, os, threading, torch
held = [thread.name for thread in threading.enumerate() if thread.name == "onea-openmp"]
threads = len(os.listdir("/proc/self/task")), torch.get_num_threads()
print(json.dumps([os.environ.get("OMP_WAIT_POLICY"), len(held), *threads]))
"""


def report(first: str, **variables: str) -> list[object]:
    """The policy, the number of oversubscribing threads, and the numbers of all threads and of torch's threads."""
    import json

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    words = [sys.executable, "-c", f"{first}\n{MAKE_RUNTIME}\n{REPORT}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=inherited | variables)
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
def test_threads_are_oversubscribed_if_torch_was_imported_without_a_policy():
    policy, held, threads, computing = report("import torch, onea; onea.OneA")
    assert (policy, held, computing) == (None, 1, 2)
    assert int(str(threads)) > (os.cpu_count() or 1) + 1, "the sleeping threads exist"


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
@pytest.mark.parametrize(
    ("first", "variables", "policy"),
    [
        ("import onea; onea.OneA; import torch", {}, "PASSIVE"),
        ("import onea; onea.OneA", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ],
)
def test_threads_are_not_oversubscribed_with_a_policy(first, variables, policy):
    assert report(first, **variables)[:2] == [policy, 0]
