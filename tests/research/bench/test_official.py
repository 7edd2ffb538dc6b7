# SPDX-License-Identifier: Apache-2.0
"""The published network as a baseline: a stub with its names and arguments, and other folders."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from onea.errors import OneaError
from onea.research.bench.baselines import official_rows
from onea.research.bench.config import BenchConfig
from onea.research.bench.results import OFFICIAL, PLAIN, Row, _column_table
from onea.vit.backbones import load_backbone

CPU = torch.device("cpu")
STAND_IN = """
import torch
from torch import nn

print("as published codes do")

class VisionTransformer(nn.Module):
    def __init__(self, global_pool, img_size, patch_size, num_classes, embed_dim, depth, num_heads, tuning_config):
        super().__init__()
        assert tuning_config.ffn_num == 4 and not tuning_config.vpt_on and not global_pool and num_classes == 0
        self.embed = nn.Conv2d(3, embed_dim, patch_size, patch_size)
        self.blocks = nn.ModuleList(nn.Linear(embed_dim, embed_dim) for _ in range(depth))
        self.cur_adapter = nn.ModuleList([nn.Linear(embed_dim, embed_dim)])
        self.adapter_list = []

    def add_adapter_to_list(self):
        self.adapter_list.append(self.cur_adapter)

    def forward(self, x, test=False):
        assert test == bool(self.adapter_list) and self.training != test
        assert not self.blocks[0].weight.requires_grad
        x = self.embed(x).flatten(2).mean(2)
        for block in self.blocks:
            x = block(x)
        return self.cur_adapter[0](x)
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "backbone").mkdir()
    (tmp_path / "backbone" / "vit_onea.py").write_text(STAND_IN)
    return tmp_path


@pytest.fixture
def config():
    return BenchConfig(rank=4, batch=8, seconds=0.01, quick=True, device="cpu")


def test_published_network_is_timed(checkout, config, tiny_vit):
    rows = official_rows(checkout, config, load_backbone(str(tiny_vit)), CPU)
    assert [(row.measure, row.setting, row.unit) for row in rows] == [
        ("training", "batch 8", "images/s"),
        ("inference", "batch 1", "ms"),
        ("inference", "batch 1", "images/s"),
        ("inference", "batch 32", "ms"),
        ("inference", "batch 32", "images/s"),
    ]
    assert all(row.column == OFFICIAL and row.value > 0 for row in rows)


def test_folder_without_the_published_code_is_an_error(tmp_path, config, tiny_vit):
    with pytest.raises(
        OneaError, match=r"is not a checkout of the published One-A code: it has no backbone/vit_onea\.py"
    ):
        official_rows(tmp_path, config, load_backbone(str(tiny_vit)), CPU)


def test_failure_of_the_published_code_has_its_reason(checkout, config, tiny_vit):
    (checkout / "backbone" / "vit_onea.py").write_text("import a_missing_module")
    with pytest.raises(OneaError, match=r"could not be timed .*a_missing_module"):
        official_rows(checkout, config, load_backbone(str(tiny_vit)), CPU)


@pytest.mark.parametrize("official", [False, True])
def test_column_of_the_published_code_is_shown_if_measured(official):
    rows = [Row("training", "batch 8", PLAIN, 10.0, "images/s")]
    rows += [Row("training", "batch 8", OFFICIAL, 1234.0, "images/s")] if official else []
    console = Console(width=200, record=True)
    console.print(_column_table(rows))
    text = console.export_text()
    assert (OFFICIAL in text) == official
    assert ("1,234" in text) == official
