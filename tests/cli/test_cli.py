# SPDX-License-Identifier: Apache-2.0
"""The command line: results on success, one sentence and exit code 2 for invalid input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from PIL import Image
from support.serving import folder_hash

from onea.cli import main


@pytest.fixture
def arguments(tiny_run):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in tiny_run["options"].items()]
    rest = [f"--{name}={value}" for name, value in tiny_run.items() if name not in ("method", "options")]
    return [*rest, *options]


PRINT_PACKAGES = """
import atexit, sys
others = lambda: {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
atexit.register(lambda: print("\\n" + " ".join(others())))
"""


def packages_of(code: str) -> set[str]:
    """The packages that a program has loaded when it ends, without the standard library."""
    done = subprocess.run([sys.executable, "-c", PRINT_PACKAGES + code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_no_heavy_package():
    plain = packages_of("import typer; app = typer.Typer(); app.command()(lambda: None); app(['--help'])")
    assert "typer" in plain
    ours = packages_of("sys.argv = ['onea', '--help']; from onea.cli import main; main()")
    assert ours - plain == {"onea"}


def test_help_is_grouped_and_models_come_first(onea):
    out = onea("--help")[1]
    panels = ("Models", "Research", "Merging and benchmarks")
    places = [out.index(f" {panel} ") for panel in panels]
    assert places == sorted(places)
    assert places[0] < out.index(" teach ") < out.index(" serve ") < places[1] < out.index(" run ") < places[2]
    assert "adapter" not in out[: places[0]]


@pytest.mark.slow
def test_help_is_quick():
    def once() -> float:
        started = os.times()
        done = subprocess.run([sys.executable, "-m", "onea", "--help"], capture_output=True, text=True, check=True)
        assert "demo" in done.stdout
        ended = os.times()  # CPU time, which is what a user waits for on an idle machine
        return ended.children_user - started.children_user + ended.children_system - started.children_system

    assert min(once() for _ in range(5)) < 0.5


def test_run_prints_a_table_and_resumes(onea, arguments):
    code, out, _ = onea("run", "one-a", *arguments, "--out", "out", "--no-gating")
    assert code == 0
    assert "A_T" in out
    record = json.loads(Path("out/record.json").read_text())
    assert record["options"]["gating"] is False
    assert f"{record['metrics']['A_T']:.2f}" in out
    again = onea("run", "one-a", *arguments, "--out", "out", "--no-gating")
    assert again[0] == 0
    assert again[1].startswith(out)
    assert "already finished on" in again[1]


def test_the_default_folder_is_that_of_the_configuration(onea, arguments):
    onea("run", "simplecil", *[a for a in arguments if a.split("=")[0] in ("--data", "--backbone", "--sizes")])
    folders = list(Path("runs").iterdir())
    assert len(folders) == 1
    assert folders[0].name.startswith("simplecil-")


def test_methods_are_listed_with_their_options(onea):
    assert all(name in onea("methods")[1] for name in ("one-a", "simplecil", "running-mean"))
    assert "--kappa" in onea("methods", "one-a")[1]


def test_stream_prints_the_sizes_first_and_draws_three_figures_with_out(onea):
    words = ["stream", "--classes", "100", "--tasks", "10", "--gamma", "0.01", "--seed", "1"]
    code, out, _ = onea(*words)
    assert code == 0
    assert out.splitlines()[0] == "14,1,3,6,36,9,23,2,2,4"
    assert not list(Path().iterdir())
    assert onea(*words, "--out", "drawn")[1].startswith(out)
    assert len(list(Path("drawn").glob("*.png"))) == 3


def test_version(onea):
    assert onea("--version")[1].strip() == "0.1.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "one-b"], "did you mean 'one-a'?"),
        (["run", "one-a", "--data", "gliphs"], "did you mean 'glyphs'?"),
        (["run", "one-a", "--data", "folder:missing"], "missing"),
        (["run", "one-a", "--data", "glyphs-mini", "--backbone", "vit_small_dinov2"], "vit_small_patch14_dinov2"),
        (["run", "one-a", "--data", "glyphs-mini", "--tasks", "999"], "999"),
        (["run", "one-a", "--data", "glyphs-mini", "--tasks", "5", "--gamma", "0"], "gamma"),
        (["run", "one-a", "--data", "glyphs-mini", "--tasks", "5", "--gamma", "1.5"], "gamma"),
        (["run", "one-a", "--data", "glyphs-mini", "--sizes", "3,4"], "add up to 7"),
        (["run", "one-a", "--kapa", "3"], "did you mean 'kappa'?"),
        (["run", "one-a", "--track-to", "logs"], "add --track tensorboard"),
        (["run", "one-a", "--config", "nothing.yaml"], "nothing.yaml"),
        (["run", "one-a", "--kappa", "nan"], "finite"),
        (["run", "one-a", "--learning-rate", "inf"], "finite"),
        (["run", "one-a", "--threads", "-3"], "threads"),
        (["run", "one-a", "--budget", "-1"], "budget"),
        (["run", "one-a", "--budget", "nan"], "finite"),
        (["run", "one-a", "--out", "/dev/null/x"], "choose another"),
        (["paper", "nope"], "`onea paper` lists"),
        (["paper", "abblation"], "did you mean 'ablation'"),
        (["run", "one-a", "--device", "cuda:77"], "cuda:77"),
        (["run", "one-a", "--precision", "fp4"], "bf16"),
        (["run", "simplecil", "--data", "glyphs-mini", "--store", "exact"], "exact"),
        (["stream", "--classes", "5", "--tasks", "9"], "tasks"),
    ],
)
def test_an_invalid_option_gets_one_sentence_and_writes_nothing(arguments, message, onea, tmp_path):
    code, _, err = onea(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("onea: ")
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tiny_images, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("wrong") / "images"
    shutil.copytree(tiny_images, root)
    return root


def run_error(onea, folder: Path, tiny_vit: str, *more: str) -> str:
    code, _, err = onea("run", "simplecil", "--data", f"folder:{folder}", "--backbone", tiny_vit, "--out", "o", *more)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert not Path("o").exists()
    return err


def test_an_empty_class(onea, folder, tiny_vit):
    (folder / "train" / "hollow").mkdir()
    assert "hollow" in run_error(onea, folder, tiny_vit)


def test_a_class_in_two_tasks(onea, folder, tiny_vit, tmp_path_factory):
    root = tmp_path_factory.mktemp("grouped")
    for group in ("monday", "tuesday"):
        shutil.copytree(folder / "train", root / group)
    err = run_error(onea, root, tiny_vit)
    assert "monday" in err
    assert "tuesday" in err


def test_natural_tasks_from_folders(onea, folder, tiny_vit, tmp_path_factory):
    root = tmp_path_factory.mktemp("grouped")
    for number in range(6):
        target = root / ("monday" if number < 4 else "tuesday") / f"class{number:02d}"
        shutil.copytree(folder / "train" / f"class{number:02d}", target)
    code, *_ = onea("run", "simplecil", "--data", f"folder:{root}", "--backbone", tiny_vit, "--out", "out")
    record = json.loads(Path("out/record.json").read_text())
    assert code == 0
    assert record["stream"]["sizes"] == [4, 2]
    assert [task["name"] for task in record["tasks"]] == ["monday", "tuesday"]


def test_a_corrupt_image_is_named_or_skipped(onea, folder, tiny_vit):
    bad = folder / "train" / "class00" / "0.png"
    bad.write_bytes(bad.read_bytes()[:60])
    assert "class00/0.png" in run_error(onea, folder, tiny_vit)
    skip = ("run", "simplecil", "--data", f"folder:{folder}", "--backbone", tiny_vit, "--on-bad", "skip", "--out")
    code, out, _ = onea(*skip, "o")
    record = json.loads(Path("o/record.json").read_text())
    assert code == 0
    assert record["data"]["train_images"] == 35
    assert "class00/0.png" in record["data"]["skipped"][0]
    assert out.count("1 unreadable image was skipped; see data.skipped in the record.") == 1
    (folder / "test" / "class01" / "0.png").write_bytes(b"")
    assert "2 unreadable images were skipped; see data.skipped in the record." in onea(*skip, "both")[1]


def test_a_run_without_skipped_images_does_not_mention_them(onea, folder, tiny_vit):
    _, out, _ = onea("run", "simplecil", "--data", f"folder:{folder}", "--backbone", tiny_vit, "--on-bad", "skip")
    assert "record:" in out
    assert "left out" not in out


def test_images_of_mixed_sizes_are_stored_at_one_square_size(onea, folder, tiny_vit):
    odd = folder / "train" / "class00" / "0.png"
    Image.open(odd).resize((90, 50)).save(odd)
    onea("run", "simplecil", "--data", f"folder:{folder}", "--backbone", tiny_vit, "--out", "o")
    assert json.loads(Path("o/record.json").read_text())["data"]["stored"] == [32, 32]


def test_a_truncated_backbone(onea, folder, tiny_vit, tmp_path_factory):
    cut = tmp_path_factory.mktemp("cut") / "cut.safetensors"
    cut.write_bytes(Path(tiny_vit).read_bytes()[:999])
    assert "damaged" in run_error(onea, folder, str(cut))


def test_a_diverging_loss(onea, arguments):
    code, _, err = onea("run", "one-a", *arguments, "--learning-rate", "1e30", "--out", "o")
    assert code == 2
    assert "task 1" in err
    assert not Path("o").exists()


@pytest.mark.parametrize("text", ["5: x\n", "options: 5\n", "tasks: .inf\n", "- a\n", "seed: 1\nseed: 2\n", "out: o\n"])
def test_an_invalid_config_file(text, onea, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    code, _, err = onea("run", "one-a", "--config", "run.yaml")
    assert code == 2
    assert len(err.strip().splitlines()) == 1


def test_a_config_file_may_name_the_method_and_the_command_its_options(onea, arguments, tmp_path):
    (tmp_path / "run.yaml").write_text("method: one-a\ncompile: no\nkappa: 3\n")
    code, _, err = onea("run", "--config", "run.yaml", *arguments, "--out", "o", "--kappa", "5")
    assert code == 0, err
    record = json.loads(Path("o/record.json").read_text())
    assert (record["config"]["method"], record["options"]["kappa"]) == ("one-a", 5)


def test_a_config_file_that_is_not_text(onea, tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert onea("run", "one-a", "--config", "run.yaml")[0] == 2


def test_ctrl_c_prints_that_finished_tasks_are_kept(arguments, tmp_path):
    command = [sys.executable, "-m", "onea", "run", "one-a", *arguments, "--out", str(tmp_path / "o")]
    # The first task trains nothing; the second would train for hours.
    slow = ["--sizes=1,3,2", "--single-class=skip", "--epochs=3000", "--max-epochs=3000"]
    with subprocess.Popen([*command, *slow], stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert first.startswith("task 1/3")
    assert process.returncode == 130
    assert "repeat the command to resume" in rest
    assert json.loads((tmp_path / "o/record.json").read_text())["status"] == "running"


@pytest.mark.parametrize("command", [["run", "one-a"], ["demo"], ["paper", "table3"]])
def test_runs_refuse_the_folder_of_a_model(command, onea, shop):
    before = folder_hash(shop)
    code, _, err = onea(*command, "--out", str(shop))
    assert code == 2
    assert err == f"onea: {shop} contains a model, and runs need a separate folder; choose another --out.\n"
    assert folder_hash(shop) == before


def test_models_refuse_the_folder_of_a_run(onea, arguments, tiny_images):
    assert onea("run", "one-a", *arguments, "--out", "a")[0] == 0
    before = folder_hash(Path("a"))
    code, _, err = onea("teach", "a", str(tiny_images / "train"))
    assert code == 2
    assert err == "onea: a is not empty and contains no model; choose another folder.\n"
    assert folder_hash(Path("a")) == before


def test_the_folder_of_another_run(onea, arguments):
    assert onea("run", "one-a", *arguments, "--out", "o")[0] == 0
    code, _, err = onea("run", "one-a", *arguments, "--out", "o", "--seed", "5")
    assert code == 2
    assert "another run (seed 1 instead of 5)" in err


def test_an_interrupted_merge_prints_that_there_is_no_result(onea, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("onea.merging.files.merge_files", stopped)
    assert onea("merge", "a", "b", "-o", "c")[::2] == (130, "onea: interrupted; no result was written.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_error_message_for_a_full_disk_at_stdout():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "onea", "methods"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("onea: No space left for the output")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_before_the_start_prints_nothing(monkeypatch, capsys):
    """Ctrl-C while the commands are being imported must not print a traceback."""

    class Stopped(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt if name == "app" else AttributeError(name)

    monkeypatch.setitem(sys.modules, "onea.cli.app", Stopped("onea.cli.app"))
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        main()
    assert getattr(stopped.value, "code", "a traceback") == 130
    assert capsys.readouterr() == ("", "")
