# SPDX-License-Identifier: Apache-2.0
"""Old names of what is now in ``onea.report.load``."""

from __future__ import annotations

from onea.renamed import renamed

__getattr__ = renamed(__name__, {"find_records": "onea.report.load:load_records"})
