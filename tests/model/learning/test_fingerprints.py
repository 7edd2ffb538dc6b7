# SPDX-License-Identifier: Apache-2.0
"""Repeated photos are recognised by fingerprints, which copies share and other photos do not."""

from __future__ import annotations

import hashlib
import json
import time
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from support.models import all_blocks_model, class_folders, resealed, tiny_model

import onea
from onea.classifiers.statistics import ClassStatistics
from onea.data.decode import fit, read_image
from onea.errors import OneaError
from onea.model.learning import fingerprints as module
from onea.model.learning import series as groups
from onea.model.learning.fingerprints import WORDS, compute_fingerprints, find_repeats, same_photos
from onea.model.learning.images import read_labelled
from onea.model.learning.update import learn
from onea.model.reports import notes
from onea.runtime import Progress
from onea.tensors import row_blocks

A, B, C, D = (f"class{number:02d}" for number in range(4))
SIDE = 128


def drawn(seed: int, size: int = 400) -> Image.Image:
    """A still life: shapes of many colours on a table."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (size, size * 3 // 4), tuple(rng.integers(120, 256, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(9):
        x, y, w, h = rng.integers(0, size, 2).tolist() + rng.integers(size // 10, size // 3, 2).tolist()
        shape = draw.ellipse if rng.integers(2) else draw.rectangle
        shape((x - w, y - h, x + w, y + h), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return image


def squares(*images):
    return np.stack([fit(image.convert("RGB"), SIDE, SIDE) for image in images])


def saved(image, form, quality=80, scale=1.0):
    """The image after saving it in another format, perhaps in another size."""
    content = BytesIO()
    image.resize((round(image.width * scale), round(image.height * scale))).save(content, form, quality=quality)
    return read_image(content.getvalue(), min_side=SIDE)


@pytest.mark.parametrize(
    ("form", "quality", "scale"),
    [
        ("PNG", 0, 1.0),
        ("JPEG", 95, 1.0),
        ("JPEG", 60, 1.0),
        ("JPEG", 40, 0.5),
        ("JPEG", 80, 0.5),
        ("JPEG", 80, 3.0),
        ("WEBP", 70, 0.7),
    ],
)
def test_copies_match(form, quality, scale):
    images = [drawn(seed) for seed in range(40)]
    first = compute_fingerprints(squares(*images))
    second = compute_fingerprints(squares(*(saved(image, form, quality, scale) for image in images)))
    assert same_photos(first, second).nonzero().tolist() == [[row, row] for row in range(40)]


def test_different_photos_do_not_match():
    many = compute_fingerprints(squares(*(drawn(seed) for seed in range(300))))
    assert many.shape == (300, WORDS)
    assert same_photos(many, many).nonzero().tolist() == [[row, row] for row in range(300)]


def other(image, kind):
    """Another photo of the same things: the camera, the light, the packet's colour or what stands there changed."""
    if kind == "moved":
        return image.crop((40, 20, 400, 290))
    if kind == "mirrored":
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if kind == "darker":
        return image.point(lambda value: value * 3 // 4)
    if kind == "other colours":
        return Image.merge("RGB", image.split()[1:] + image.split()[:1])
    image = image.copy()
    ImageDraw.Draw(image).ellipse((120, 60, 280, 240), fill=(250, 40, 40), outline=(0, 0, 0))
    return image


@pytest.mark.parametrize("kind", ["moved", "mirrored", "darker", "other colours", "one thing more"])
def test_photos_of_a_series_do_not_match(kind):
    images = [drawn(seed) for seed in range(40)]
    first, second = (
        compute_fingerprints(squares(*these)) for these in (images, [other(image, kind) for image in images])
    )
    assert not same_photos(first, second).any()


def test_images_without_contrast_never_match():
    flat = np.full((3, 3, SIDE, SIDE), 200, np.uint8)
    flat[1] += 1
    assert not same_photos(compute_fingerprints(flat), compute_fingerprints(flat)).any()
    assert same_photos(compute_fingerprints(flat[:0]), compute_fingerprints(flat)).shape == (0, 3)


def correlation(found, true):
    found, true = (each - each.mean(1, keepdims=True) for each in (found, true))
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(true, axis=1)
    return float(np.mean((found * true).sum(1) / np.maximum(norms, 1e-9)))


def test_images_cannot_be_reconstructed_from_fingerprints():
    """The correlation of the best linear decoder, fitted to other photos; with signs of frequencies it was 0.6."""
    images = squares(*(drawn(seed, 96) for seed in range(1000)))
    pictures = np.asarray(images, float).mean(1).reshape(-1, 32, SIDE // 32, 32, SIDE // 32).mean((2, 4))
    pictures = pictures.reshape(len(images), -1)
    read = compute_fingerprints(images).numpy().view(np.uint8)
    inputs = np.concatenate([np.unpackbits(read, axis=1) * 100.0, read], 1)
    known, fresh = slice(0, 700), slice(700, None)
    inputs, mean = inputs - inputs[known].mean(0), pictures[known].mean(0)
    for ridge in (1e3, 1e5, 1e7):
        gram = inputs[known].T @ inputs[known] + ridge * np.eye(inputs.shape[1])
        found = inputs[fresh] @ np.linalg.solve(gram, inputs[known].T @ (pictures[known] - mean))
        assert correlation(found, pictures[fresh] - mean) < 0.3
        assert correlation(found + mean, pictures[fresh]) < 0.3


def frames(count, seed=0):
    """Fingerprints of a still camera's frames, in which at most two bits and one step of each colour differ."""
    rng = np.random.default_rng(seed)
    prints = np.full((count, WORDS), 0x5A3C_9669_0FF0_1234, np.int64)
    for _ in range(2):
        prints[:, 0] ^= np.int64(1) << rng.integers(0, 62, count)
    prints[:, -1] = sum(rng.integers(60, 62, count) << 8 * place for place in range(6))
    return torch.from_numpy(prints)


def test_comparison_in_blocks_equals_comparison_of_all_pairs(monkeypatch):
    """The expected result is computed from a list of all pairs."""
    rng = np.random.default_rng(1)
    prints, known = frames(90), frames(40, seed=1)
    for some in (prints, known):
        some[:, 0] ^= torch.from_numpy(0x0F0F_0F0F * rng.integers(0, 3, len(some)))  # three photos
        some[:, 0] ^= torch.from_numpy(7 << rng.integers(0, 60, len(some)))  # two copies may be too far apart
    labels, known_labels = (rng.choice(["a", "b", "c"], len(some)).tolist() for some in (prints, known))
    monkeypatch.setattr(module, "row_blocks", lambda rows, columns: row_blocks(rows, columns, pairs=500))
    found = find_repeats(prints, labels, known, known_labels)
    trained = torch.from_numpy(rng.random(90) < 0.1)
    before, twice, unseen, conflicts, hit = [], [], [], {}, set()
    copies, others = same_photos(prints, prints).tolist(), same_photos(prints, known).tolist()
    for row in range(90):
        there = [other for other in range(40) if others[row][other]]
        here = [other for other in range(90) if copies[row][other]]
        hit |= {other for other in there if known_labels[other] == labels[row]}
        before.append(any(known_labels[other] == labels[row] for other in there))
        twice.append(any(labels[other] == labels[row] for other in here if other < row))
        unseen.append(not (before[-1] or twice[-1] or any(trained[other] for other in here)))
        names = [known_labels[other] for other in there] + [labels[other] for other in here if other < row]
        if odd := [name for name in names if name != labels[row]]:
            conflicts[row] = odd[0]
    assert (found.taught_before.tolist(), found.duplicates.tolist()) == (before, twice)
    assert (found.matched.tolist(), found.conflicts) == (sorted(hit), conflicts)
    assert found.independent_of(trained).tolist() == unseen
    assert any(before) > all(before), "some are repeated and some are not"
    assert any(twice) > all(twice)
    assert any(unseen)


def test_memory_is_proportional_to_the_number_of_similar_photos(monkeypatch):
    """The size of a block does not grow with the number of photos, and no list of pairs is made."""
    held, compared = [0], [0]
    compare = module.same_photos

    def counted(first, second):
        found = compare(first, second)
        held.append(found.numel())
        compared.append(len(first) * len(second))
        return found

    monkeypatch.setattr(module, "same_photos", counted)
    for count in (1500, 6000):
        found = find_repeats(frames(count), ["a"] * count)
        assert int(found.repeated.sum()) == count - 1
        assert not found.independent_of(torch.arange(count) < 9).any()
        assert max(held) <= 2**22
    assert sum(compared) <= 1.1 * (1500**2 + 6000**2), "each pair is compared twice at most"


@pytest.mark.slow
def test_ten_thousand_frames_of_a_still_camera_take_seconds():
    began = time.process_time()
    assert int(find_repeats(frames(10_000), ["a"] * 10_000).repeated.sum()) == 9_999
    assert time.process_time() - began < 30


def test_comparison_can_be_cancelled():
    class Stopped(Progress):
        def start_phase(self, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_repeats(frames(10), ["a"] * 10, progress=Stopped())


@pytest.mark.parametrize("kind", ["still", "series", "unlike"])
def test_series_do_not_depend_on_the_block_size(kind, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(600, 48, generator=generator)
    if kind == "series":
        features += 3 * torch.randn(30, 48, generator=generator).repeat_interleave(20, 0)
    if kind == "still":
        features += torch.linspace(-9, 9, 600)[:, None]  # the light changes, and nothing else
    rows, known = torch.zeros(600, dtype=torch.int64), ClassStatistics.empty(48)
    together = groups.find_series(features, rows, known)
    blocks: list[int] = []

    def small(count, columns):
        found = list(row_blocks(count, columns, pairs=6000))
        blocks.extend(block.stop - block.start for block in found)
        return found

    monkeypatch.setattr(groups, "row_blocks", small)
    assert torch.equal(groups.find_series(features, rows, known), together)
    assert max(blocks) == 10
    assert len(together.unique()) > 5


def test_repeats_within_an_update_and_under_two_names():
    prints = compute_fingerprints(squares(*(drawn(seed) for seed in (0, 1, 0, 1, 2))))
    found = find_repeats(prints, ["apple", "apple", "apple", "pear", "pear"], prints[[4, 1]], ["pear", "plum"])
    assert found.duplicates.tolist() == [False, False, True, False, False]
    assert found.taught_before.tolist() == [False, False, False, False, True]
    assert found.conflicts == {1: "plum", 3: "plum"}
    assert found.matched.tolist() == [0]
    trained = torch.tensor([True, True, False, False, False])
    assert found.independent_of(trained).tolist() == [False] * 5, "each has a copy that was trained on, or came before"
    assert found.independent_of(~trained & False).tolist() == [True, True, False, True, False]


# A model that recognises its photos


@pytest.fixture(scope="module")
def files(tiny_images):
    return class_folders(tiny_images / "train")


def pairs(files, *names, last=6):
    chosen = [(file, name) for name in names for file in files[name][:last]]
    return [file for file, _ in chosen], [name for _, name in chosen]


@pytest.fixture(scope="module")
def before(tiny_vit, files):
    """A model of three classes; must not be changed."""
    return all_blocks_model(tiny_vit).learn(*pairs(files, A, B, C))  # keeps no rounded tokens


@pytest.fixture
def model(before, tmp_path):
    return onea.load(before.save(tmp_path / "shop.onea"), threads=1, precision="fp32", device="cpu")


def test_repeating_an_update_changes_nothing_and_reports_no_accuracy(before, model, files):
    model.learn(*pairs(files, A))
    update = model.history[-1]
    assert (update["images"], update["repeated"], update["held_out"], update["held_out_accuracy"]) == (6, 6, 0, None)
    assert notes(update) == ["all photos are repeated: nothing new was learned"]
    old, new = before.snapshot().state, model.snapshot().state
    assert new.images == old.images == [6, 6, 6]
    torch.testing.assert_close(new.statistics.state_dict(), old.statistics.state_dict(), rtol=0, atol=0)
    for name in (
        "held_out_signals",
        "left_out_signals",
        "temperature",
        "calibration_images",
        "fingerprints",
        "fingerprint_rows",
    ):
        assert np.array_equal(getattr(new, name), getattr(old, name))


def test_teaching_the_parent_folder_of_all_updates_changes_nothing(before, model, files, tmp_path):
    for day, names in (("monday", (A, B)), ("tuesday", (C,))):
        (tmp_path / "photos" / day).mkdir(parents=True)
        for name in names:
            (tmp_path / "photos" / day / name).symlink_to(files[name][0].parent)
    model.learn(tmp_path / "photos")
    update = model.history[-1]
    assert (update["images"], update["repeated"], update["new_classes"], update["held_out"]) == (18, 18, 0, 0)
    assert model.snapshot().state.images == before.snapshot().state.images


def test_notes_on_repeated_photos():
    again = {"kind": "learn", "images": 1, "repeated": 1, "trained": False}
    assert notes(again) == ["all photos are repeated: nothing new was learned"]
    many = {"kind": "learn", "images": 9, "repeated": 9, "trained": True}
    assert notes(many) == ["all photos are repeated: only the adapter was trained again"]


def test_repeated_photos_among_new_ones_count_once(tiny_vit, files):
    """Statistics are those of two updates without repeats, and only new photos are held out for evaluation."""
    twice = tiny_model(tiny_vit, views=1).learn(*pairs(files, A, B, last=3)).learn(*pairs(files, A))
    once = tiny_model(tiny_vit, views=1).learn(*pairs(files, A, B, last=3)).learn(files[A][3:], [A] * 3)
    assert twice.history[-1]["repeated"] == 3
    assert notes(twice.history[-1])[0] == "repeated photos, counted once: 3 of 6"
    assert twice.history[-1]["held_out"] <= 1
    for name in ("means", "counts"):
        torch.testing.assert_close(
            getattr(twice.snapshot().state.statistics, name), getattr(once.snapshot().state.statistics, name)
        )


def test_statistics_of_repeated_classes_are_recomputed_by_the_new_adapter(model, before, files, monkeypatch):
    """No drift is compensated: the means are those of the photos with the newly trained adapter."""
    from onea.learner import update

    monkeypatch.setattr(update, "dropped_significantly", lambda *given: False)
    model.learn(*pairs(files, A, B, C, D))
    update, state = model.history[-1], model.snapshot().state
    assert update["trained"]
    assert (update["repeated"], update["images"]) == (18, 24)
    assert state.images == [6, 6, 6, 6]
    assert len(state.fingerprints) == 24
    engine, batch = model.snapshot().engine, read_labelled(*pairs(files, A, B, C), model.snapshot().side)
    views = [
        engine.features(
            batch.pixels, model.snapshot().adapters, engine.sample_crops(batch.labels, 0, view) if view else None
        )
        for view in range(3)
    ]
    means = torch.stack(views).mean(0).reshape(3, 6, -1).mean(1)
    torch.testing.assert_close(state.statistics.means[:3], means, rtol=1e-4, atol=1e-4)


def test_one_photo_with_two_classes_is_reported(model, files):
    model.learn([*files[D], files[B][3]], [D] * 7)
    update = model.history[-1]
    assert (update["repeated"], update["conflicts"]) == (0, 1)
    assert notes(update)[0] == "photos with two class names: 1; undo if one is wrong"
    assert notes(update, model.last_report)[0] == (
        f"photos with two class names: 1 (3.png: '{B}' and '{D}'); undo if one is wrong"
    )
    assert model.snapshot().state.images == [6, 6, 6, 7]


def test_fingerprints_after_rename_forget_and_undo(model, before, files):
    model.rename(A, "apple").learn(files[A][:2], ["apple"] * 2)
    assert model.history[-1]["repeated"] == 2
    model.forget("apple")
    assert len(model.snapshot().state.fingerprints) == 12
    model.learn(*pairs(files, A))
    assert model.history[-1]["repeated"] == 0
    model.undo().undo()
    assert torch.equal(model.snapshot().state.fingerprints, before.snapshot().state.fingerprints)
    model.forget("apple", B, C)
    assert len(model.snapshot().state.fingerprints) == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda prints, rows: (prints[:-1], rows),
        lambda prints, rows: (prints[:, 1:], rows),
        lambda prints, rows: (prints, rows + 3),
        lambda prints, rows: (prints, rows - 1),
        lambda prints, rows: (prints.repeat(9, 1), rows.repeat(9)),
        lambda prints, rows: (prints.float(), rows),
        lambda prints, rows: (prints, None),
        lambda prints, rows: (prints[0, 0], rows),
    ],
)
def test_damaged_fingerprints_are_named(model, tmp_path, spoil):
    path = model.save(tmp_path / "shop.onea") / "states/000001"
    tensors = load_file(path / "state.safetensors")
    prints, rows = spoil(tensors.pop("fingerprints"), tensors.pop("fingerprint_rows"))
    tensors |= {"fingerprints": prints.contiguous()} | ({} if rows is None else {"fingerprint_rows": rows})
    save_file(tensors, path / "state.safetensors")
    digest = hashlib.sha256((path / "state.safetensors").read_bytes()).hexdigest()
    described = json.loads((path / "state.json").read_bytes()) | {"sha256": digest}
    (path / "state.json").write_bytes(resealed(described))
    with pytest.raises(OneaError, match=r"damaged .*(fingerprint|does not have the expected type and shape)"):
        onea.load(tmp_path / "shop.onea")


def test_repeats_are_found_without_an_estimator(before, files):
    """As in the service."""
    state, engine = before.snapshot().state, before.snapshot().engine
    batch = read_labelled(*pairs(files, A), engine.side)
    assert learn(engine, state, batch, version=2)[0].updates[-1]["repeated"] == 6
