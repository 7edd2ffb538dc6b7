# SPDX-License-Identifier: Apache-2.0
"""Old names of what is now in ``onea.vit.hooks``."""

from __future__ import annotations

from onea.renamed import renamed

__getattr__ = renamed(
    __name__,
    {"Plug": "onea.vit.hooks:BlockHooks", "Nothing": "onea.vit.hooks:NoHooks", "NOTHING": "onea.vit.hooks:NO_HOOKS"},
)
