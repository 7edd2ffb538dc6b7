# SPDX-License-Identifier: Apache-2.0
"""Old names of what is now in ``onea.runs.runner``."""

from __future__ import annotations

from onea.renamed import renamed

__getattr__ = renamed(__name__, {"run": "onea.runs.runner:run"})
