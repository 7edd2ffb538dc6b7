# SPDX-License-Identifier: Apache-2.0
"""Class-incremental methods on one contract; looked up by name, imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onea.registry import Registry

if TYPE_CHECKING:
    from onea.methods.contract import Method

_OWN = {
    "one-a": "onea.methods.one_a:OneAMethod",
    "one-a-plus": "onea.methods.one_a_plus:OneAPlus",
    "adapter": "onea.methods.adapter:MergedAdapter",
    "simplecil": "onea.methods.simplecil:SimpleCIL",
    "slda": "onea.methods.simplecil:SLDA",
    "ranpac": "onea.methods.simplecil:RanPACFrozen",
    "ranpac-first": "onea.methods.first_task:RanPACFirst",
    "first-task": "onea.methods.first_task:FirstTask",
    "running-mean": "onea.methods.running_mean:RunningMeanOfAdapters",
    "running-mean-shared": "onea.methods.running_mean:RunningMeanSharedStart",
    "aper-adapter": "onea.methods.aper:AperAdapter",
    "aper-finetune": "onea.methods.aper:AperFinetune",
    "aper-ssf": "onea.methods.aper:AperSSF",
    "aper-vpt-shallow": "onea.methods.aper:AperVPTShallow",
    "aper-vpt-deep": "onea.methods.aper:AperVPTDeep",
    "per-task": "onea.methods.per_task:PerTaskAdapter",
    "ease": "onea.methods.ease:EASE",
    "mos": "onea.methods.mos:MOS",
    "acmap": "onea.methods.acmap:ACMap",
    "l2p": "onea.methods.l2p:L2P",
    "dualprompt": "onea.methods.dualprompt:DualPrompt",
    "coda-prompt": "onea.methods.coda_prompt:CODAPrompt",
    "inflora": "onea.methods.inflora:InfLoRA",
    "cl-lora": "onea.methods.cl_lora:CLLoRA",
    "sema": "onea.methods.sema:SEMA",
    "joint": "onea.methods.joint:Joint",
    "sequential": "onea.methods.sequential:Sequential",
}

METHODS = Registry("method", "onea.methods", _OWN)


def method_class(name: str) -> type[Method]:
    """The class of a method."""
    found: type[Method] = METHODS.load(name)
    return found
