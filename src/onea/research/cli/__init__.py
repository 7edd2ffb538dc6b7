# SPDX-License-Identifier: Apache-2.0
"""The research commands."""

from __future__ import annotations

from onea.research.cli.bench import bench
from onea.research.cli.demo import demo
from onea.research.cli.methods import methods
from onea.research.cli.paper import paper
from onea.research.cli.report import compare, report
from onea.research.cli.run import run
from onea.research.cli.stream import stream

COMMANDS = (demo, run, methods, stream, paper, report, compare)
__all__ = ["COMMANDS", "bench"]
