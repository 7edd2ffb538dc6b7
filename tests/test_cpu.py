# SPDX-License-Identifier: Apache-2.0
"""Whether a CPU computes in bf16: by its flags, by what oneDNN may use, and by trying."""

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
    """Pretend to be a machine with these flags, on which the trial product ends like this."""

    def pretend(flags: str, product: str = "print(384.0)", allowed: str = "") -> list[list[str]]:
        info = tmp_path / "cpuinfo"
        info.write_text(f"processor\t: 0\nmodel name\t: a CPU\nflags\t\t: {flags}\n")
        tried: list[list[str]] = []
        plain = subprocess.run
        monkeypatch.setattr(cpu, "_CPUINFO", info)
        monkeypatch.setattr(cpu, "_TEST_PRODUCT", product)
        monkeypatch.setattr(subprocess, "run", lambda call, **how: tried.append(call) or plain(call, **how))
        monkeypatch.setenv("ONEA_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv(cpu.ISA_VARIABLE, allowed)
        forget()
        return tried

    yield pretend
    monkeypatch.undo()
    forget()


def forget() -> None:
    for known in (cpu.has_bf16, cpu.is_amx_broken, cpu._flags):
        known.cache_clear()


def test_flags_decide_where_there_is_no_amx(machine):
    assert not machine("fpu avx2 avx512f")
    assert not cpu.has_bf16()
    tried = machine("fpu avx2 avx512_bf16")
    assert cpu.has_bf16()
    assert make_runtime("cpu", threads=1).precision == "bf16"
    assert not tried, "nothing to try without AMX"


@pytest.mark.parametrize(
    "product",
    ["import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "raise SystemExit(1)", "print('nan')", "print(1.0)"],
)
def test_amx_that_does_not_work_is_noticed_once_and_fp32_used(machine, product):
    tried = machine("avx512_bf16 amx_bf16 amx_tile", product)
    assert not cpu.has_bf16()
    assert make_runtime("cpu", threads=1).precision == "fp32"
    with pytest.raises(OneaError, match=f"use fp32, or set {cpu.ISA_VARIABLE}=AVX512_CORE_BF16"):
        make_runtime("cpu", "bf16", threads=1)
    forget()
    assert cpu.is_amx_broken()
    assert len(tried) == 1, "another process reads what this one found"


def test_amx_that_works_is_used(machine):
    tried = machine("avx512_bf16 amx_bf16 amx_tile")
    assert cpu.has_bf16()
    assert len(tried) == 1


@pytest.mark.parametrize(("allowed", "bf16"), [("AVX512_CORE_BF16", True), ("avx2", False), ("AVX512_CORE", False)])
def test_instructions_that_are_forbidden_are_neither_tried_nor_used(machine, allowed, bf16):
    tried = machine("avx512_bf16 amx_bf16 amx_tile", "raise SystemExit(1)", allowed)
    assert cpu.has_bf16() == bf16
    assert not cpu.is_amx_broken()
    assert not tried


def test_a_damaged_note_or_a_cache_that_cannot_be_written_costs_another_trial(machine, tmp_path):
    tried = machine("avx512_bf16 amx_bf16")
    assert not cpu.is_amx_broken()
    (note,) = (tmp_path / "cache").iterdir()
    note.write_text("{")
    forget()
    assert not cpu.is_amx_broken()
    assert len(tried) == 2
    note.unlink()
    note.parent.rmdir()
    note.parent.write_text("a file where a folder should be")
    forget()
    assert not cpu.is_amx_broken()
    assert len(tried) == 3


def test_the_trial_is_a_real_product():
    """On whatever this machine allows: conftest forbids AMX, everything else computes bf16 or emulates it."""
    assert cpu._product_works()
    assert Path(sys.executable).is_file()
