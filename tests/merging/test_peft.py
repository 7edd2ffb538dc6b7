# SPDX-License-Identifier: Apache-2.0
"""Adapters that PEFT saved and onea merged load in PEFT and have the merged updates."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onea.merging import make_operator
from onea.merging.files import merge_files
from onea.merging.operator import Sizes


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"query": nn.Linear(12, 8), "value": nn.Linear(8, 12)}) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["value"](torch.relu(layer["query"](x)))
        return x


@pytest.fixture
def network() -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network()


def save_adapter(network: Network, folder: Path, seed: int, **config) -> Path:
    import peft  # in functions: it takes seconds, which no process need spend that runs other tests

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = {"r": 3, "lora_alpha": 6, "target_modules": ["query", "value"]} | config
        model = peft.get_peft_model(copy.deepcopy(network), peft.LoraConfig(**settings))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
    model.save_pretrained(str(folder))
    return folder


def updates(network: Network, folder: Path) -> dict[str, Tensor]:
    """The updates that PEFT adds to the network's weights when it merges an adapter into them.

    In float64: the difference of two float32 weights has noise near the cut-offs below which operators see nothing.
    """
    import peft

    plain = copy.deepcopy(network).double()
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(plain), str(folder)).merge_and_unload().state_dict()
    return {name: adapted[name] - value for name, value in plain.state_dict().items() if name.endswith("weight")}


@pytest.mark.parametrize("operator", ["one-a", "weighted-mean", "ties", "knots-ties", "tsv", "iso-c"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"use_rslora": True}, {}),
        ({"r": 2, "rank_pattern": {"layers.0.query": 5}, "alpha_pattern": {"value": 1}}, {"r": 4, "lora_alpha": 4}),
    ],
)
def test_a_merged_folder_loads_in_peft_with_the_merged_updates(operator, first, second, network, tmp_path):
    folders = [save_adapter(network, tmp_path / "a", 1, **first), save_adapter(network, tmp_path / "b", 2, **second)]
    merge_files(folders, tmp_path / "out", operator=operator, classes=[40, 5], samples=[1200, 90])
    old, new = (updates(network, folder) for folder in folders)
    expected, _ = make_operator(operator)(old, new, Sizes(40, 5, 1200, 90), {})
    for name, found in updates(network, tmp_path / "out").items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)


def test_a_result_of_given_rank_loads_and_approximates_the_outputs(network, tmp_path):
    import peft

    folders = [save_adapter(network, tmp_path / "a", 1), save_adapter(network, tmp_path / "b", 2)]
    merge_files(folders, tmp_path / "out", operator="running-mean", classes=[1, 1], rank=6)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(network), str(tmp_path / "out"))
    assert model.peft_config["default"].r == 6
    mean = copy.deepcopy(network)
    old, new = (updates(network, folder) for folder in folders)
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            if name in old:
                parameter += ((old[name] + new[name]) / 2).float()
    inputs = torch.randn(5, 12, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model(inputs), mean(inputs), rtol=1e-4, atol=1e-4)
