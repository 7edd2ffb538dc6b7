# SPDX-License-Identifier: Apache-2.0
"""Merging files: the same results as in memory, a card about the merge, and one sentence for every error."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from support.adapters import BARE_OPERATORS, CONFIG, MODULES, random, write_lora, write_matrices
from torch import Tensor
from typer.testing import CliRunner

from onea import __version__
from onea.cli.merge import merge
from onea.errors import OneaError
from onea.merging import OPERATORS, make_operator
from onea.merging.files import merge_files, read_source
from onea.merging.lora import matches
from onea.merging.operator import MergeResult, Sizes


def deltas(folder: Path, scales: dict[str, float] | float) -> dict[str, Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {
        module: (scales if isinstance(scales, float) else scales[module])
        * tensors[f"{module}.lora_B.weight"].double()
        @ tensors[f"{module}.lora_A.weight"].double()
        for module in MODULES
    }


@pytest.mark.parametrize("operator", BARE_OPERATORS)
def test_matrices_merge_as_in_memory(operator, tmp_path):
    files = [write_matrices(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2, 3)]
    out = tmp_path / "merged.safetensors"
    merge_files(files, out, operator=operator, classes=[4, 1, 2], samples=[400, 90, 10])
    first, second, third = map(load_file, files)
    expected, state = make_operator(operator)(first, second, Sizes(4, 1, 400, 90), {})
    expected, _ = make_operator(operator)(expected, third, Sizes(5, 2, 490, 10), state)
    merged = load_file(out)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)


def test_the_type_is_kept(tmp_path):
    files = [write_matrices(tmp_path / f"{seed}.safetensors", seed, torch.bfloat16) for seed in (1, 2)]
    merge_files(files, tmp_path / "merged.safetensors", classes=[1, 1])
    assert {value.dtype for value in load_file(tmp_path / "merged.safetensors").values()} == {torch.bfloat16}


def test_the_card_records_the_merge(tmp_path):
    files = [write_matrices(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2)]
    out = tmp_path / "merged.safetensors"
    returned = merge_files(files, out, operator="ties", options={"density": "0.5"}, classes=[40, 5])
    card = json.loads((tmp_path / "merged.safetensors.merge.json").read_text())
    assert card == returned
    assert card["operator"] == "ties"
    assert card["options"] == {"density": 0.5, "scale": 1.0, "weights": "uniform"}
    assert card["onea"] == __version__
    assert card["date"].startswith("20")
    assert card["samples_are"] == "taken equal to classes"
    assert card["truncation_error"] is None
    assert [(source["classes"], source["samples"]) for source in card["inputs"]] == [(40, 40), (5, 5)]
    for file, source in zip(files, card["inputs"], strict=True):
        assert source["path"] == str(file)
        assert source["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "1.safetensors",
        "2.safetensors",
        "merged.safetensors",
        "merged.safetensors.merge.json",
    ]


def write_state(path: Path, seed: int, classes: int, samples: int) -> Path:
    save_file(
        {
            "adapter.blocks.0.down.weight": random((4, 9), seed),
            "prototypes": random((classes, 9), seed),
            "merged": torch.tensor([classes, samples]),
            "operator.count": torch.tensor(3),
        },
        path,
    )
    return path


def test_states_of_runs_include_adapter_and_counts(tmp_path):
    files = [write_state(tmp_path / "a.safetensors", 1, 3, 300), write_state(tmp_path / "b.safetensors", 2, 1, 90)]
    out = tmp_path / "merged.safetensors"
    card = merge_files(files, out, operator="weighted-mean")
    merged = load_file(out)
    assert list(merged) == ["blocks.0.down.weight"]
    torch.testing.assert_close(merged["blocks.0.down.weight"], (3 * random((4, 9), 1) + random((4, 9), 2)) / 4)
    assert [(source["classes"], source["samples"]) for source in card["inputs"]] == [(3, 300), (1, 90)]
    assert card["samples_are"] == "as in the files"
    assert card["inputs"][0]["left_out"] == ["merged", "operator.count", "prototypes"]


@pytest.mark.parametrize("rslora", [False, True])
def test_loras_merge_as_deltas_with_their_scale(rslora, tmp_path):
    folders = [write_lora(tmp_path / "a", 1, use_rslora=rslora), write_lora(tmp_path / "b", 2, use_rslora=rslora)]
    card = merge_files(folders, tmp_path / "out", operator="weighted-mean", classes=[3, 1])
    scale = 6 / 3**0.5 if rslora else 2.0
    first, second = (deltas(folder, scale) for folder in folders)
    merged = deltas(tmp_path / "out", 1.0)
    for module in MODULES:
        torch.testing.assert_close(merged[module], (3 * first[module] + second[module]) / 4, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == card["rank"] == 5, "two updates of rank 3 in matrices of 5 columns"
    assert not config["use_rslora"]
    assert config["target_modules"] == CONFIG["target_modules"]
    assert 0 < card["truncation_error"]["max"] < 1e-6, "rounding to float32"
    assert json.loads((tmp_path / "out/merge.json").read_text()) == card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out"]


def test_patterns_of_rank_and_alpha_are_respected(tmp_path):
    query, value = MODULES
    odd = write_lora(
        tmp_path / "a", 1, ranks={query: 2}, rank_pattern={"0.query": 2}, alpha_pattern={"layer.[1-3].value": 9}
    )
    plain = write_lora(tmp_path / "b", 2)
    merge_files([odd, plain], tmp_path / "out", operator="running-mean", classes=[1, 1])
    first, second = deltas(odd, {query: 6 / 2, value: 9 / 3}), deltas(plain, 2.0)
    merged = deltas(tmp_path / "out", 1.0)
    for module in MODULES:
        torch.testing.assert_close(merged[module], (first[module] + second[module]) / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_a_requested_rank_is_used_and_its_error_reported(rank, tmp_path):
    folders = [write_lora(tmp_path / "a", 1), write_lora(tmp_path / "b", 2)]
    card = merge_files(folders, tmp_path / "out", operator="running-mean", classes=[1, 1], rank=rank)
    tensors = load_file(tmp_path / "out/adapter_model.safetensors")
    first, second, merged = deltas(folders[0], 2.0), deltas(folders[1], 2.0), deltas(tmp_path / "out", 1.0)
    for module, (rows, columns) in MODULES.items():
        assert tensors[f"{module}.lora_A.weight"].shape == (rank, columns)
        assert tensors[f"{module}.lora_B.weight"].shape == (rows, rank)
        exact = (first[module] + second[module]) / 2
        spectrum = torch.linalg.svdvals(exact)
        best = float(spectrum[rank:].norm() / spectrum.norm())
        assert card["truncation_error"]["by_tensor"][module] == pytest.approx(best, abs=1e-6)
        assert float((merged[module] - exact).norm() / exact.norm()) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("operator", BARE_OPERATORS)
def test_every_operator_merges_loras(operator, tmp_path):
    folders = [write_lora(tmp_path / "a", 1), write_lora(tmp_path / "b", 2)]
    card = merge_files(folders, tmp_path / "out", operator=operator, classes=[4, 2])
    expected, _ = make_operator(operator)(deltas(folders[0], 2.0), deltas(folders[1], 2.0), Sizes(4, 2, 4, 2), {})
    merged = deltas(tmp_path / "out", 1.0)
    for module in MODULES:
        torch.testing.assert_close(merged[module], expected[module], rtol=1e-4, atol=1e-5)
    assert card["truncation_error"]["max"] < 1e-6


# Mistakes


def refused(words: str, *inputs: Path, out: Path | None = None, **more):
    out = out or inputs[0].parent / ("out" if inputs[0].is_dir() else "out.safetensors")
    before = sorted(inputs[0].parent.iterdir())
    with pytest.raises(OneaError, match=words) as caught:
        merge_files(inputs, out, **({"classes": [1] * len(inputs)} | more))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    assert sorted(inputs[0].parent.iterdir()) == before, "nothing is written"


@pytest.mark.parametrize("operator", ["fisher", "regmean"])
def test_operators_with_statistics_refuse_files(operator, tmp_path):
    a = write_matrices(tmp_path / "a.safetensors", 1)
    words = "needs statistics of the training data, which plain files do not have"
    refused(words, a, a, operator=operator)


def test_wrong_requests_are_refused(tmp_path):
    a = write_matrices(tmp_path / "a.safetensors", 1)
    refused("at least two", a)
    refused("positive number for each of the 2", a, a, classes=[1])
    refused("positive number for each of the 2", a, a, samples=[1, 0])
    refused("does not include its number of classes", a, a, classes=None)
    refused("Unknown operator 'tis'; did you mean 'ties'", a, a, operator="tis")
    refused("Unknown option 'densty'; did you mean 'density'", a, a, operator="ties", options={"densty": 1})
    refused("already exists", a, a, out=a)
    refused("for LoRA folders", a, a, rank=2)
    refused("at least 1", a, a, rank=0)
    refused(r"name it out\.safetensors", a, a, out=tmp_path / "out")


def test_wrong_files_are_refused(tmp_path):
    a = write_matrices(tmp_path / "a.safetensors", 1)
    damaged, empty, pickled = (tmp_path / name for name in ("d.safetensors", "e.safetensors", "p.pt"))
    damaged.write_bytes(a.read_bytes()[:60])
    save_file({}, empty)
    torch.save({"w": torch.ones(1)}, pickled)
    refused("is damaged or not safetensors", a, damaged)
    refused("has no tensors", a, empty)
    refused("other formats are not supported", a, pickled)
    refused("cannot be read", a, tmp_path / "none.safetensors")
    refused("not a weight", a, write_matrices(tmp_path / "i.safetensors", 2, step=torch.tensor([1])))
    refused("only on the new side", a, write_matrices(tmp_path / "m.safetensors", 2, more=torch.ones(1)))
    refused("NaN", a, write_matrices(tmp_path / "n.safetensors", 2, **{"down.bias": torch.full((4,), torch.nan)}))
    refused("shapes", a, write_matrices(tmp_path / "s.safetensors", 2, **{"down.bias": torch.ones(5)}))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        refused("not a plain file", a, tmp_path / "pipe.safetensors")
    hollow = write_matrices(tmp_path / "h.safetensors", 2, more=torch.ones(0, 4))
    refused(r"'more': it is empty \(shape \(0, 4\)\); leave it out", hollow, hollow)


def test_third_party_operators_get_only_mergeable_sides(tmp_path, monkeypatch):
    class ThirdParty:  # not a dataclass, so it has no options
        title, needs = "Third party", ""

        def __call__(self, accumulated, new, sizes, state):
            return MergeResult(new)

    monkeypatch.setitem(OPERATORS.names, "third-party", ThirdParty)
    a = write_matrices(tmp_path / "a.safetensors", 1)
    other = write_matrices(tmp_path / "s.safetensors", 2, **{"down.bias": torch.ones(5)})
    refused("Cannot merge 'down.bias': shapes", a, other, operator="third-party")
    refused("Unknown option 'x'; there are none", a, a, operator="third-party", options={"x": 1})
    assert merge_files([str(a), str(a)], str(tmp_path / "out.safetensors"), operator="third-party", classes=[1, 1])


def test_a_result_that_overflows_its_dtype_is_refused(tmp_path):
    large = [write_matrices(tmp_path / f"{n}.safetensors", n, more=torch.full((3, 3), 6e4).half()) for n in (1, 2)]
    words = "numbers too large for float16; save its inputs as float32"
    refused(words, *large, operator="iso-c")
    loras = [write_lora(tmp_path / name, seed, lora_alpha=1e8) for seed, name in enumerate("ab")]
    for folder in loras:
        factors = load_file(folder / "adapter_model.safetensors")
        save_file({name: 1e4 * value.half() for name, value in factors.items()}, folder / "adapter_model.safetensors")
    refused(words, *loras)


def test_a_full_disk_leaves_no_card(tmp_path, monkeypatch):
    a = write_matrices(tmp_path / "a.safetensors", 1)

    def full(*_):
        raise OneaError("No space left.")

    monkeypatch.setattr("onea.merging.files.write_atomically", full)
    refused("No space left", a, a)


def test_wrong_loras_are_refused(tmp_path):
    a, plain = write_lora(tmp_path / "a", 1), write_matrices(tmp_path / "m.safetensors", 1)
    refused("different kinds", a, plain)
    refused("different kinds", plain, a)
    refused("give the folder", a / "adapter_model.safetensors", a, out=tmp_path / "x.safetensors")
    refused("adapts 'other/network'", a, write_lora(tmp_path / "b", 2, base_model_name_or_path="other/network"))
    for index, (words, change) in enumerate(
        [
            ("type IA3; only LORA", {"peft_type": "IA3"}),
            ("uses use_dora", {"use_dora": True}),
            ("uses modules_to_save", {"modules_to_save": ["head"]}),
            ("also trained biases", {"bias": "all"}),
            ("initialised by pissa", {"init_lora_weights": "pissa_niter_4"}),
            ("no number 'lora_alpha'", {"lora_alpha": None}),
            ("have ranks 3 and 3, but adapter_config.json has 8", {"rank_pattern": {"query": 8}}),
        ]
    ):
        refused(words, a, write_lora(tmp_path / f"wrong{index}", 2, **change))
    words = r"rank is 1,000, but no module is wider than 7; choose 7 or less"
    refused(words, a, write_lora(tmp_path / "c", 2), rank=1000)
    refused("has no adapter_config.json", a, (tmp_path / "empty").mkdir() or tmp_path / "empty")


def test_loras_are_not_merged_into_a_folder_with_the_name_of_a_file(tmp_path):
    a, b = write_lora(tmp_path / "a", 1), write_lora(tmp_path / "b", 2)
    words = r"m\.safetensors has the name of a file, but LoRA folders are merged into a folder; name it m\.$"
    refused(words, a, b, out=tmp_path / "m.safetensors")


def test_loras_with_odd_tensors_are_refused(tmp_path):
    a, b = write_lora(tmp_path / "a", 1), write_lora(tmp_path / "b", 2)
    tensors = load_file(b / "adapter_model.safetensors")
    query, value = MODULES
    cases = {
        "not a LoRA factor of a linear layer": tensors | {"base_model.model.head.weight": torch.ones(2, 2)},
        "only one of the two factors": {k: v for k, v in tensors.items() if k != f"{query}.lora_A.weight"},
        f"Only {re.escape(str(a))} adapts '{query}'": {k: v for k, v in tensors.items() if query not in k},
        "contains no LoRA factors": {},
        "shapes": tensors | {f"{value}.lora_B.weight": torch.ones(5, 3)},
    }
    for words, changed in cases.items():
        save_file(changed, b / "adapter_model.safetensors")
        refused(words, a, b)


def test_a_pickle_is_never_opened(tmp_path):
    a, b = write_lora(tmp_path / "a", 1), write_lora(tmp_path / "b", 2)
    (b / "adapter_model.safetensors").unlink()
    refused("has no adapter_model.safetensors", a, b)
    (b / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    refused(r"has adapter_model\.bin, a pickle, which could run code", a, b)
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path):
    a, b = write_lora(tmp_path / "a", 1), write_lora(tmp_path / "b", 2)
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused("Cannot write", a, b, out=blocked / "out")


@pytest.mark.parametrize(
    "merged", [[3], [3, 4, 5], [[3, 4]], 7, [-1, 4], [0, 0], [1.5, 2.0], [math.nan, 1.0], [2**62, 2**62], [True, True]]
)
def test_invalid_counts_of_a_state_are_ignored(merged, tmp_path):
    a, b = (write_state(tmp_path / f"{name}.safetensors", 1, 3, 300) for name in "ab")
    save_file(load_file(b) | {"merged": torch.tensor(merged)}, b)
    refused(f"{re.escape(str(b))} does not include its number of classes; give --classes", a, b, classes=None)
    merge_files([a, b], tmp_path / "out.safetensors", operator="weighted-mean", classes=[3, 1])


@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        ("query", "layer.0.query", True),
        ("layer.0.query", "layer.0.query", True),
        ("ery", "layer.0.query", False),
        ("layer.0", "layer.0.query", False),
        ("layer.[0-2].query", "layer.1.query", True),
        ("layer.[^0].query", "layer.0.query", False),
        (r"layers\.\d+\.q_proj", "model.layers.12.q_proj", True),
        (r"layers\.\d+\.q_proj", "model.layers.x.q_proj", False),
        (r".*q_proj", "model.layers.12.q_proj", True),
        (r"^layers.*q_proj$", "model.layers.12.q_proj", False),
        (r"lay?ers*", "layer", True),
        (r"\w+-[\d.]*", "head-0.5", True),
        ("", "query", False),
        (".*.*.*.*.*.*.*.*.*.*x", "a" * 300, False),
    ],
)
def test_patterns_match_as_in_peft(key, name, expected):
    import re

    assert matches(key, name) == expected
    if len(name) < 100:
        assert bool(re.match(rf"(.*\.)?({key})$", name)) == expected, "as PEFT matches it"


def test_a_pattern_cannot_cause_catastrophic_backtracking(tmp_path):
    """Python's matcher would take longer than the age of the universe."""
    a = write_lora(tmp_path / "a", 1)
    tensors = load_file(a / "adapter_model.safetensors")
    tensors = {name.replace("query", "a" * 60): value for name, value in tensors.items()}
    cases = [
        ({"(a+)+b": 3}, r"rank_pattern has '\(a\+\)\+b', which is not supported"),
        ({"[z-a]": 3}, "not supported .bad character range"),
        ({"a{9}": 3}, "not supported"),
        ({"query": "many"}, "a number for each name"),
        ({"query": math.nan}, "a number for each name"),
        (["query"], "a number for each name"),
    ]
    for index, (pattern, words) in enumerate(cases):
        b = write_lora(tmp_path / f"b{index}", 2, rank_pattern=pattern)
        save_file(tensors, b / "adapter_model.safetensors")
        refused(words, a, b)
    slow = write_lora(tmp_path / "slow", 2, rank_pattern={".*.*.*.*.*.*.*.*.*.*.*.*b": 3})
    save_file(tensors, slow / "adapter_model.safetensors")
    assert len(read_source(slow).tensors) == 2
    changes = [{"r": 0}, {"r": math.inf}, {"r": True}, {"lora_alpha": math.nan}, {"lora_alpha": 1e300}]
    for index, change in enumerate(changes):
        odd = write_lora(tmp_path / f"odd{index}", 2, ranks=dict.fromkeys(MODULES, 3), **change)
        refused("without (it|the true rank)", a, odd)


# The command


@pytest.fixture
def command():
    app = typer.Typer()
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(merge)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_merges_and_passes_options_on(command, tmp_path):
    a, b = (write_matrices(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2))
    out = tmp_path / "merged.safetensors"
    done = command(a, b, "--kappa", "5", "--classes", "40,5", "--samples=1200,90", "-o", out, "--no-gating")
    assert done.exit_code == 0, done.output
    assert "merged 2 adapters with one-a" in done.output
    card = json.loads((tmp_path / "merged.safetensors.merge.json").read_text())
    assert (card["options"]["kappa"], card["options"]["gating"]) == (5.0, False)
    assert card["inputs"][1]["samples"] == 90
    assert card["samples_are"] == "given"


def test_the_command_merges_loras_at_a_rank(command, tmp_path):
    a, b = write_lora(tmp_path / "a", 1), write_lora(tmp_path / "b", 2)
    done = command(a, b, "--with", "ties", "--rank", "2", "--classes", "4,1", "-o", tmp_path / "out", "--density=0.4")
    assert done.exit_code == 0, done.output
    assert "rank 2, truncation error at most" in done.output
    assert read_source(tmp_path / "out").lora is not None


def test_an_invalid_command_is_refused_in_one_sentence(command, tmp_path):
    a = write_matrices(tmp_path / "a.safetensors", 1)
    done = command(a, a, "--classes", "forty,5", "-o", tmp_path / "x.safetensors")
    assert isinstance(done.exception, OneaError)
    assert "whole numbers" in str(done.exception)
