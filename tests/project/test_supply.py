# SPDX-License-Identifier: Apache-2.0
"""The supply chain: pinned versions of dependencies, the base of the container image, licences, the size of a clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib

import pytest
from support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SAFE = {  # the first version without published holes that a photo or a request could use, and what was mended by then
    "h11": ("0.16", "CVE-2025-43859: chunked bodies with broken ends smuggle requests"),
    "pillow": (
        "12.3",
        "CVE-2026-55379 and PYSEC-2026-2253 to 2257 in decoders; before it 12.2: CVE-2026-40192, 12.1.1: "
        "CVE-2026-25990, 11.3: CVE-2025-48379",
    ),
    "pillow-heif": (
        "1.8.1",
        "brings libheif 1.23.6; 1.23.2 to 1.23.5 mended writes beyond memory (CVE-2026-84383 and others), "
        "pillow-heif 1.3 itself CVE-2026-28231",
    ),
    "python-multipart": (
        "0.0.31",
        "CVE-2026-53540: memory for a whole body; before it 0.0.30: CVE-2026-53537 to 53539, 0.0.27: CVE-2026-42561, "
        "0.0.26: CVE-2026-40347, 0.0.22: CVE-2026-24486, 0.0.18: CVE-2024-53981",
    ),
    "starlette": (
        "1.3.1",
        "CVE-2026-54283: forms without limits; before it 1.3: CVE-2026-54282, 1.1: CVE-2026-48818, 1.0.1: "
        "CVE-2026-48710, 0.49.1: CVE-2025-62727, 0.47.2: CVE-2025-54121, 0.40: CVE-2024-47874",
    ),
}


def normal(requirement: str) -> str:
    """The normalised name of a package."""
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return {normal(line): line.partition("==")[2] for line in lines}


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_every_requirement_has_a_pinned_version(extra):
    wanted = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    missing = {normal(each) for each in wanted} - {"onea"} - pins().keys()
    assert not missing


def test_the_lowest_tested_versions_are_the_lowest_allowed_ones():
    lowest = pins("constraints-lowest.txt")
    allowed = {
        normal(each): each.partition(">=")[2]
        for each in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["research"])
    }
    assert lowest.keys() == allowed.keys()
    for name, version in allowed.items():
        assert re.sub(r"(\.0)+$", "", lowest[name]) == re.sub(r"(\.0)+$", "", version), name


@pytest.mark.parametrize("package", SAFE)
def test_no_version_with_a_published_vulnerability_is_allowed(package):
    version, reason = SAFE[package]
    extras = PROJECT["optional-dependencies"].values()
    asked = [each for group in (PROJECT["dependencies"], *extras) for each in group if normal(each) == package]
    assert asked, f"{package} is a dependency of ours, so its lowest version is ours to choose"
    for requirement in asked:
        assert numbers(requirement.partition(">=")[2]) >= numbers(version), reason
    assert numbers(pins()[package]) >= numbers(version), reason


def numbers(version: str) -> tuple[int, ...]:
    """A version as comparable numbers; an empty version is lower than all others."""
    return tuple(int(part) for part in version.split(".") if part)


def test_the_image_can_be_built_on_a_digest_and_uses_one_package_index():
    """With two indexes, pip installs the higher version of a package, which an attacker could publish."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert not [line for line in lines if re.search(r"extra.index|find.links", line, re.IGNORECASE)]
    assert "FROM ${BASE}" in lines
    assert [line for line in lines if re.fullmatch(r"ARG BASE=python:3\.\d+-slim@sha256:[0-9a-f]{64}", line)]
    assert any("RepoDigests" in line for line in lines), "how to get a newer digest is said"


def test_every_file_names_its_licence():
    files = [file for folder in ("src", "tests", "tools", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    missing = [
        file for file in files if file.stat().st_size and "SPDX-License-Identifier" not in file.read_text("utf-8")[:200]
    ]
    assert not missing


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a clone")
def test_a_clone_is_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 45e6
