# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime for tests, imported as onea imports it: without its telemetry."""

from __future__ import annotations

from typing import Any

import pytest

from onea.errors import OneaError
from onea.vit.onnx_files import check_installed, onnx_runtime


def onnx_runtime_or_skip() -> Any:
    """ONNX Runtime; the test is skipped where a library that ONNX files need is missing."""
    try:
        check_installed()
    except OneaError as missing:
        pytest.skip(str(missing))
    return onnx_runtime()
