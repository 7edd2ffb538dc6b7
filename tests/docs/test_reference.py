# SPDX-License-Identifier: Apache-2.0
"""The Python reference: every documented name has an example, which the suite runs as a doctest."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import pytest
from support import ROOT

import onea

LISTED = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text("utf-8"), re.M)
# With a repository of one's own on the Hub, or for those who write the model folder.
NOT_RUN = {"push_to_hub", "from_pretrained", "restore", "state", "is_based_on"}


def thing(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def without_example(*objects: Any) -> list[str]:
    return [each.__name__ for each in objects if ">>> " not in (each.__doc__ or "")]


@pytest.mark.parametrize("name", LISTED)
def test_every_name_of_the_reference_has_an_example(name: str) -> None:
    assert not without_example(thing(name)), f"{name} has no example in its docstring"


def test_what_the_package_exports_is_in_the_reference() -> None:
    listed = {thing(name) for name in LISTED}
    assert all(getattr(onea, name) in listed for name in onea.__all__ if name != "__version__")
    assert {"OneA", "load"} <= {*dir(onea)}


def test_every_question_and_change_of_the_estimator_has_an_example() -> None:
    public = {name for name, _ in inspect.getmembers(onea.OneA) if not name.startswith("_")} - NOT_RUN
    shown = f"{onea.OneA.__doc__}{onea.load.__doc__}"
    shown = "\n".join(line for line in shown.splitlines() if ">>> " in line)
    parameters = {*onea.OneA.defaults(), "defaults"}
    missing = {name for name in public - parameters if not re.search(rf"\b{name}\b", shown)}
    assert not missing


def test_a_missing_example_is_detected() -> None:
    def plain() -> None:
        """A docstring without an example."""

    assert without_example(plain) == ["plain"]
