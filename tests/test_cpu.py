# SPDX-License-Identifier: Apache-2.0
"""Whether a CPU computes in bf16: its flags, the instruction sets that oneDNN may use, and a test product."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onea import cpu
from onea.errors import OneaError
from onea.runtime import make_runtime


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulate a machine with these CPU flags, and replace the test product; returns the list of its runs."""

    def simulate(flags: str, product: str = "print(384.0)", allowed: str = "") -> list[list[str]]:
        info = tmp_path / "cpuinfo"
        info.write_text(f"processor\t: 0\nmodel name\t: a CPU\nflags\t\t: {flags}\n")
        runs: list[list[str]] = []
        plain = subprocess.run
        monkeypatch.setattr(cpu, "_CPUINFO", info)
        monkeypatch.setattr(cpu, "_TEST_PRODUCT", product)
        monkeypatch.setattr(subprocess, "run", lambda call, **how: runs.append(call) or plain(call, **how))
        monkeypatch.setenv("ONEA_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv(cpu.ISA_VARIABLE, allowed)
        clear_caches()
        return runs

    yield simulate
    monkeypatch.undo()
    clear_caches()


def clear_caches() -> None:
    for known in (cpu.has_bf16, cpu.is_amx_broken, cpu._flags):
        known.cache_clear()


def test_without_amx_the_flags_decide(machine):
    assert not machine("fpu avx2 avx512f")
    assert not cpu.has_bf16()
    runs = machine("fpu avx2 avx512_bf16")
    assert cpu.has_bf16()
    assert make_runtime("cpu", threads=1).precision == "bf16"
    assert not runs, "without AMX, no test product is needed"


@pytest.mark.parametrize(
    "product",
    ["import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "raise SystemExit(1)", "print('nan')", "print(1.0)"],
)
def test_broken_amx_is_detected_once_and_fp32_is_used(machine, product):
    runs = machine("avx512_bf16 amx_bf16 amx_tile", product)
    assert not cpu.has_bf16()
    assert make_runtime("cpu", threads=1).precision == "fp32"
    with pytest.raises(OneaError, match=f"use fp32, or set {cpu.ISA_VARIABLE}=AVX512_CORE_BF16"):
        make_runtime("cpu", "bf16", threads=1)
    clear_caches()
    assert cpu.is_amx_broken()
    assert len(runs) == 1, "another process reads the result from the cache"


def test_working_amx_is_used(machine):
    runs = machine("avx512_bf16 amx_bf16 amx_tile")
    assert cpu.has_bf16()
    assert len(runs) == 1


@pytest.mark.parametrize(("allowed", "bf16"), [("AVX512_CORE_BF16", True), ("avx2", False), ("AVX512_CORE", False)])
def test_forbidden_instructions_are_neither_tested_nor_used(machine, allowed, bf16):
    runs = machine("avx512_bf16 amx_bf16 amx_tile", "raise SystemExit(1)", allowed)
    assert cpu.has_bf16() == bf16
    assert not cpu.is_amx_broken()
    assert not runs


def test_a_damaged_or_unwritable_cache_repeats_the_test_product(machine, tmp_path):
    runs = machine("avx512_bf16 amx_bf16")
    assert not cpu.is_amx_broken()
    (cached,) = (tmp_path / "cache").iterdir()
    cached.write_text("{")
    clear_caches()
    assert not cpu.is_amx_broken()
    assert len(runs) == 2
    cached.unlink()
    cached.parent.rmdir()
    cached.parent.write_text("a file where a folder should be")
    clear_caches()
    assert not cpu.is_amx_broken()
    assert len(runs) == 3


def test_the_test_product_works_here():
    """conftest forbids AMX; without it, every machine computes or emulates bf16."""
    assert cpu._product_works()
    assert Path(sys.executable).is_file()
