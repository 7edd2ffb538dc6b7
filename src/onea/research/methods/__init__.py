# SPDX-License-Identifier: Apache-2.0
"""Class-incremental methods behind one interface, looked up by name and imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onea.registry import Registry

if TYPE_CHECKING:
    from onea.research.methods.contract import Method

_METHODS = {
    "one-a": "onea.research.methods.one_a:OneAMethod",
    "one-a-plus": "onea.research.methods.one_a:OneAPlus",
    "adapter": "onea.research.methods.adapter_merging:MergedAdapterMethod",
    "simplecil": "onea.research.methods.classification:SimpleCIL",
    "slda": "onea.research.methods.classification:SLDA",
    "ranpac": "onea.research.methods.classification:RanPACFrozen",
    "ranpac-first": "onea.research.methods.adapter_merging:RanPACFirst",
    "loranpac": "onea.research.methods.loranpac:LoRanPAC",
    "first-task": "onea.research.methods.adapter_merging:FirstTask",
    "running-mean": "onea.research.methods.adapter_merging:RunningMeanOfAdapters",
    "running-mean-shared": "onea.research.methods.adapter_merging:RunningMeanSharedStart",
    "aper-adapter": "onea.research.methods.aper:AperAdapter",
    "aper-finetune": "onea.research.methods.aper:AperFinetune",
    "aper-ssf": "onea.research.methods.aper:AperSSF",
    "aper-vpt-shallow": "onea.research.methods.aper:AperVPTShallow",
    "aper-vpt-deep": "onea.research.methods.aper:AperVPTDeep",
    "per-task": "onea.research.methods.ease:PerTaskAdapter",
    "ease": "onea.research.methods.ease:EASE",
    "mos": "onea.research.methods.mos:MOS",
    "acmap": "onea.research.methods.acmap:ACMap",
    "l2p": "onea.research.methods.l2p:L2P",
    "dualprompt": "onea.research.methods.dualprompt:DualPrompt",
    "coda-prompt": "onea.research.methods.coda_prompt:CODAPrompt",
    "inflora": "onea.research.methods.inflora:InfLoRA",
    "cl-lora": "onea.research.methods.cl_lora:CLLoRA",
    "ssiat": "onea.research.methods.ssiat:SSIAT",
    "macil": "onea.research.methods.macil:MACIL",
    "tuna": "onea.research.methods.tuna:TUNA",
    "sema": "onea.research.methods.sema:SEMA",
    "replay": "onea.research.methods.replay:Replay",
    "gdumb": "onea.research.methods.replay:GDumb",
    "icarl": "onea.research.methods.replay:ICaRL",
    "sldc": "onea.research.methods.sldc:SLDC",
    "lr-rgda": "onea.research.methods.sldc:LRRGDA",
    "moal": "onea.research.methods.moal:MoAL",
    "joint": "onea.research.methods.bounds:Joint",
    "sequential": "onea.research.methods.bounds:Sequential",
}

METHODS = Registry("method", "onea.methods", _METHODS)


def method_class(name: str) -> type[Method]:
    """The class of a method, by the method's name."""
    method: type[Method] = METHODS.load(name)
    return method
