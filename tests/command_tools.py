# SPDX-License-Identifier: Apache-2.0
"""Every command by its name."""

from __future__ import annotations

from typing import Any

import typer

from onea.cli.app import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
