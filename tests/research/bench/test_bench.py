# SPDX-License-Identifier: Apache-2.0
"""The benchmark: its baseline computes the same as onea, and its CSV file has all measurements."""

from __future__ import annotations

import csv
import json
import tempfile

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import onnx_runtime_or_skip

from onea.cli import main
from onea.data.image_storage import PackedImages
from onea.errors import OneaError
from onea.research.bench import exported
from onea.research.bench.baselines import PlainImages, loader, plain_epoch, plain_network, plain_transform
from onea.research.bench.config import BenchConfig
from onea.research.bench.measure import bench_backbone, preprocess_of, synthetic_pixels
from onea.research.bench.results import FAST, PLAIN, SAME, print_result, time_interleaved
from onea.research.bench.run import bench, stream_config
from onea.vit.adapter import Adapters


@pytest.fixture
def vit(tiny_vit):
    return bench_backbone(tiny_vit)


def copy_adapters(network: torch.nn.Module, vit, rank: int) -> Adapters:
    """onea's adapters with the weights of the plain network."""
    adapters = Adapters(vit.depth, vit.width, rank, generator=torch.Generator()).eval()
    for block, adapter in zip(network.blocks, adapters.blocks, strict=True):
        adapter.load_state_dict(block.adapter.state_dict())
    return adapters


@pytest.mark.parametrize("name", ["random:vit_tiny_patch16_224", "random:vit_little_patch16_reg1_gap_256"])
def test_plain_network_has_the_features_of_ours(name):
    vit = bench_backbone(name)
    network = plain_network(vit.vit, rank=8).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
        images = torch.randn(2, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(1))
        plain, ours = network(images), vit(images, copy_adapters(network, vit, 8))
        assert not torch.allclose(plain, vit(images)), "the adapter does something"
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_plain_loop_has_the_gradients_of_ours(vit):
    network = plain_network(vit.vit, rank=4).eval()
    adapters = copy_adapters(network, vit, 4)
    images = torch.randn(3, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(1))
    network(images).square().sum().backward()
    vit(images, adapters).square().sum().backward()
    for block, adapter in zip(network.blocks, adapters.blocks, strict=True):
        torch.testing.assert_close(adapter.up.weight.grad, block.adapter.up.weight.grad, rtol=1e-4, atol=1e-5)
    assert all(not p.requires_grad for name, p in network.named_parameters() if ".adapter." not in name)


def test_plain_loop_has_the_test_images_of_ours(vit):
    preprocess = preprocess_of(vit)
    smooth = np.repeat(np.repeat(synthetic_pixels(3, vit.size // 4), 4, 2), 4, 3)
    plain = PlainImages(smooth, torch.arange(3), plain_transform(preprocess, training=False))
    ours = PackedImages(smooth, preprocess, torch.device("cpu"), "device").test_views(torch.arange(3))
    theirs = torch.stack([plain[index][0] for index in range(3)])
    levels = (ours - theirs).abs().amax() * 255 * min(preprocess.std)
    assert levels <= 2, "Pillow rounds to whole grey levels after each axis; we do not"


def test_the_plain_loop_learns(vit):
    """Its adapters change and its loss falls."""
    torch.manual_seed(0)
    network = plain_network(vit.vit, rank=4)
    pixels = synthetic_pixels(16, vit.size)
    pixels[8:] //= 4  # dark images are the second class
    images = PlainImages(pixels, torch.arange(16) // 8, plain_transform(preprocess_of(vit), training=True))
    batches = loader(images, 8, 0, shuffle=True)
    epoch = plain_epoch(network, batches, 2, torch.device("cpu"))
    losses = [epoch() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(block.adapter.up.weight.abs().sum() > 0 for block in network.blocks)


def test_random_weights_are_reproducible_and_need_no_download():
    first, second = (bench_backbone("vit_tiny_patch16_224").vit.state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    with pytest.raises(OneaError, match="did you mean 'vit_tiny_patch16_224'"):
        bench_backbone("vit_tiny_patch16_22")


def test_actions_are_timed_in_turn(monkeypatch):
    calls: list[str] = []
    clock = [0.0]

    def takes(seconds: float, name: str) -> None:
        calls.append(name)
        clock[0] += seconds

    monkeypatch.setattr("onea.research.bench.results.time.perf_counter", lambda: clock[0])
    actions = [lambda: takes(0.5, "slow"), lambda: takes(0.125, "quick")]
    slow, quick = time_interleaved(actions, torch.device("cpu"), 2.0, warm_up=1)
    assert calls == ["slow", "quick"] * 8  # until twice two seconds are over
    assert (slow.seconds, slow.spread, slow.best) == (0.5, 0, 0.5)
    assert (quick.seconds, quick.spread, quick.best) == (0.125, 0, 0.125)


@pytest.fixture(scope="module")
def result(tiny_vit):
    config = BenchConfig(
        tiny_vit, rank=4, device="cpu", batch=8, tasks=5, seconds=0.01, threads=1, workers=1, quick=True
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as short, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", short)
        return bench(config)


def test_long_temporary_path_is_an_error(vit, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    transform = plain_transform(preprocess_of(vit), training=True)
    images = PlainImages(synthetic_pixels(2, vit.size), torch.arange(2), transform)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(OneaError, match="set TMPDIR to a shorter one"):
        loader(images, 2, 1, shuffle=False)
    assert len(loader(images, 2, 0, shuffle=False)) == 1, "without workers there is no socket"


def test_all_measurements_are_in_the_csv_file(result, tmp_path):
    path = result.write(tmp_path)
    assert path.name.startswith("bench-")
    assert path.name.endswith("-tiny.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["measure"], row["setting"], row["column"], row["unit"]): float(row["value"]) for row in rows}
    assert all(value > 0 for value in found.values())
    for column in (PLAIN, SAME, FAST):
        assert ("training", "batch 8", column, "images/s") in found
        assert ("inference", "batch 32", column, "images/s") in found
        assert ("inference", "batch 1", column, "ms") in found
    for column in (SAME, FAST):
        assert ("merge", "2 blocks, rank 4, float64", column, "ms") in found
        assert ("utilisation", "training, of measured peak", column, "%") in found
    flops = [found["growth: inference", f"after {tasks}", FAST, "GFLOP/image"] for tasks in ("1 task", "5 tasks")]
    assert flops[0] == flops[1]
    early, late = (found["growth: peak memory", f"after task {task}", FAST, "MB"] for task in (4, 5))
    assert late >= early, "a peak never falls; the slow suite tests that it does not rise"
    training, inference = (found["operations", what, SAME, "GFLOP/image"] for what in ("training", "inference"))
    assert 1 < training / inference < 2.2, "forward and backward to the adapters, no gradients of frozen weights"
    assert {row["hardware"] for row in rows} == {result.hardware}
    assert "torch" in rows[0]["versions"]


@pytest.mark.slow
def test_memory_does_not_grow_with_tasks(result):
    peaks = [row.value for row in result.rows if row.measure == "growth: peak memory"]
    assert len(peaks) == 2
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_stream_is_timed_and_its_record_is_kept(tiny_vit, tmp_path, monkeypatch, capsys):
    images = np.random.default_rng(1).integers(0, 255, (10, 3, 8, 8, 3), dtype=np.uint8)
    for label, pictures in enumerate(images):
        for side, some in (("train", pictures[:2]), ("test", pictures[2:])):
            folder = tmp_path / "tens" / side / f"class{label}"
            folder.mkdir(parents=True)
            for number, pixels in enumerate(some):
                Image.fromarray(pixels).save(folder / f"{number}.png")
    monkeypatch.setenv("COLUMNS", "100")
    what = ["--data", f"folder:{tmp_path / 'tens'}", "--backbone", str(tiny_vit), "--out", str(tmp_path)]
    how = ["--device", "cpu", "--precision", "fp32", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["onea", "bench", *what, *how])

    with pytest.raises(SystemExit, match="0"):
        main()
    assert "accuracy A_T" in capsys.readouterr().out
    [path] = tmp_path.glob("bench-*-tens-fp32.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["setting"].removeprefix("tens, 10 tasks, "), row["unit"]): float(row["value"]) for row in rows}
    record = json.loads((tmp_path / "stream-tiny-tens-fp32" / "record.json").read_text())
    assert record["status"] == "finished"
    assert all(20 <= task["epochs"] <= 40 for task in record["tasks"]), "the paper's epochs"
    assert found["accuracy A_T", "%"] == pytest.approx(record["metrics"]["A_T"])
    assert found["from start to end", "s"] > found["learning", "s"] > 0
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "contains an earlier run; delete it to measure again" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["onea", "bench", *what, *how, "--rank", "4"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--rank has no effect with --data" in capsys.readouterr().err


def test_stream_has_the_epochs_of_the_paper_on_any_data():
    for data in ("cub200", "folder:hats"):
        config = stream_config(BenchConfig("x.safetensors"), data)
        assert [config.options[name] for name in ("epochs", "min_epochs", "max_epochs")] == [25, 20, 40]


def test_exported_files_predict_the_same_as_pytorch(tiny_vit, tmp_path):
    onnx_runtime_or_skip()
    network = exported._Network(bench_backbone(tiny_vit), rank=4)
    columns = exported._columns(network, 1, tmp_path)
    images = np.random.default_rng(0).standard_normal((5, 3, network.vit.size, network.vit.size), dtype=np.float32)
    scores = {name: np.asarray(answer(images)).reshape(5, -1) for name, answer in columns.items()}
    assert {"PyTorch fp32", "ONNX Runtime fp32", "ONNX Runtime int8"} <= set(scores)
    wanted = scores[exported.PYTORCH]
    np.testing.assert_allclose(scores["ONNX Runtime fp32"], wanted, atol=1e-4)
    for name, found in scores.items():
        np.testing.assert_allclose(found, wanted, atol=0.1, err_msg=name)
    assert not np.allclose(scores["ONNX Runtime int8"], wanted, atol=1e-6), "int8 is not fp32"


def test_exported_files_and_pytorch_are_timed(tiny_vit, tmp_path, monkeypatch, capsys):
    onnx_runtime_or_skip()
    command = ["onea", "bench", "--export", "--backbone", str(tiny_vit), "--out", str(tmp_path), "--threads", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--rank", "4", "--quick", "--seconds", "0.01"])
    with pytest.raises(SystemExit, match="0"):
        main()
    out = capsys.readouterr().out
    [path] = tmp_path.glob("bench-*-tiny-export.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for name in ("PyTorch fp32", "ONNX Runtime fp32", "ONNX Runtime int8"):
        assert name in out
        units = {(row["setting"], row["unit"]) for row in rows if row["column"] == name and float(row["value"]) > 0}
        assert units == {("batch 1", "ms"), ("batch 1", "images/s"), ("batch 32", "ms"), ("batch 32", "images/s")}
    for words, sentence in {
        ("--batch", "4"): "--batch has no effect with --export",
        ("--data", "folder:x"): "--data and --export cannot be combined",
        ("--device", "cuda"): "--export measures the CPU",
    }.items():
        monkeypatch.setattr("sys.argv", [*command, *words])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [({"batch": 0}, "batch is 0"), ({"seconds": 0.0}, "seconds is 0"), ({"tasks": 3}, "growth needs at least 5")],
)
def test_invalid_options_are_errors(change, message):
    with pytest.raises(OneaError, match=message):
        BenchConfig("vit_tiny_patch16_224", **change)


def test_the_tables_fit_a_terminal(result, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    print_result(result)
    out = capsys.readouterr().out
    for label in ("training, batch 8, images/s", "fp32 eager, batch 32, images/s", "peak memory, MB"):
        assert label in out
    assert "…" not in out


def test_unknown_architecture_is_an_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["onea", "bench", "--backbone", "vit_tinny", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "Unknown architecture 'vit_tinny'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
