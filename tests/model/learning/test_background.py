# SPDX-License-Identifier: Apache-2.0
"""Background photos make similar images less familiar, and change nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from support.models import class_folders, resealed, tiny_model

import onea
from onea.classifiers.drift import fit_drift_map
from onea.classifiers.familiarity import NO_BACKGROUND
from onea.errors import OneaError
from onea.model.export import Graph
from onea.model.learning.background import MAX_FEATURES, clearly_known, reservoir_sample
from onea.model.learning.fingerprints import NO_FINGERPRINTS
from onea.model.reports import notes
from onea.model.state import NO_ROWS
from onea.model.storage.card import card
from onea.model.versions import Versions
from onea.tensors import round_to_bfloat16

KNOWN = ("class00", "class01", "class02", "class03")


@pytest.fixture(scope="module")
def files(tiny_images):
    return class_folders(tiny_images / "train")


def teach(model, files, *names):
    return model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])


@pytest.fixture(scope="module")
def before(tiny_vit, files):
    """A model of four classes; must not be changed."""
    return teach(tiny_model(tiny_vit), files, *KNOWN)


@pytest.fixture
def model(before, tmp_path):
    return onea.load(before.save(tmp_path / "shop.onea"), threads=1, precision="fp32", device="cpu")


def without_fingerprints(model):
    """The model without fingerprints: photos are not recognised, only what they show."""
    state = dataclasses.replace(model.snapshot().state, fingerprints=NO_FINGERPRINTS, fingerprint_rows=NO_ROWS)
    model.restore(state, Versions((state.version,), state.version))
    return model


def familiarity(model, images):
    return model.snapshot().compute_scores(images).familiarity


def test_images_like_the_background_become_less_familiar(before, model, files):
    model.learn_background(files["class04"])
    same = model.snapshot().state.signals()
    asked = [file for name in sorted(files) for file in files[name]]
    nearer = same(*features_and_scores(model, asked))[:, -1] < 0
    old, new = familiarity(before, asked), familiarity(model, asked)
    assert (new[nearer] < old[nearer]).all()
    torch.testing.assert_close(new[~nearer], old[~nearer])
    photos = [file in files["class04"] for file in asked]
    assert nearer[photos].all(), "nothing is nearer to an image than itself"
    assert not nearer[: len(files["class00"])].all()


def features_and_scores(model, images):
    current = model.snapshot()
    features = current.engine.features(current.read(images).pixels, current.adapters)
    return features, current.scorer(features)


def test_the_background_changes_no_class(before, model, files):
    model.learn_background(files["class04"], name="nothing much")
    assert model.classes_.tolist() == before.classes_.tolist()
    np.testing.assert_array_equal(model.predict_proba(files["class05"]), before.predict_proba(files["class05"]))
    old, new = before.snapshot().state, model.snapshot().state
    torch.testing.assert_close(new.held_out_signals[:, :-1], old.held_out_signals[:, :-1], rtol=0, atol=0)
    unchanged = ("left_out_signals", "temperature", "calibration_images", "adapter_images", "statistics", "adapter")
    for name in unchanged:
        torch.testing.assert_close(as_values(getattr(new, name)), as_values(getattr(old, name)), rtol=0, atol=0)
    update = model.history[-1]
    assert {key: update[key] for key in ("version", "kind", "name", "classes", "known", "images")} == {
        "version": 2,
        "kind": "background",
        "name": "nothing much",
        "classes": [],
        "known": 4,
        "images": 6,
    }


def as_values(part):
    return part.state_dict() if dataclasses.is_dataclass(part) else part


def test_undo_forget_rename_and_starting_over(before, model, files):
    model.learn_background(files["class04"])
    kept = model.snapshot().state.background
    model.forget("class00").rename("class01", "one")
    assert torch.equal(model.snapshot().state.background, kept)
    model.undo().undo().undo()
    assert len(model.snapshot().state.background) == 0
    assert torch.equal(familiarity(model, files["class04"]), familiarity(before, files["class04"]))


def test_fit_starts_without_a_background(tiny_vit, files):
    model = teach(tiny_model(tiny_vit), files, "class00", "class01").learn_background(files["class04"])
    model.fit(files["class00"] + files["class01"], ["a"] * 6 + ["b"] * 6)
    assert len(model.snapshot().state.background) == 0


def test_a_loaded_model_has_the_same_background(model, files, tmp_path):
    model.learn_background(files["class04"])
    loaded = onea.load(model.save(tmp_path / "shop.onea"), threads=1)
    assert torch.equal(familiarity(loaded, files["class05"]), familiarity(model, files["class05"]))
    written = load_file(tmp_path / "shop.onea/states/000002/state.safetensors")["background"]
    assert written.dtype == torch.bfloat16
    assert torch.equal(written.float(), model.snapshot().state.background)
    assert "with 6 images of none of them" in (tmp_path / "shop.onea/README.md").read_text("utf-8")


def test_the_exported_graph_contains_the_background(model, files):
    model.set_params(unknown=0.2).learn_background(files["class04"])
    snapshot = model.snapshot()
    images = snapshot.read([file for name in sorted(files) for file in files[name]])
    wanted = snapshot.compute_scores(images).familiarity - snapshot.threshold
    none = Graph(snapshot)(torch.from_numpy(images.pixels).float() / 255)[1]
    clear = wanted.abs() > 1e-2  # nearer to the threshold, rounding decides
    assert clear.float().mean() > 0.8
    assert torch.equal((none > 0.5)[clear], (wanted < 0)[clear])


def test_later_images_are_calibrated_with_the_background(model, files):
    """Features of earlier held-out images are not stored, so their signals are simulated from their class."""
    without_fingerprints(model)
    assert (model.snapshot().state.held_out_signals[:, -1] == NO_BACKGROUND).all()
    model.learn_background(files["class04"])
    drawn = model.snapshot().state.held_out_signals
    assert (drawn[:, -1] < NO_BACKGROUND).all()
    # Two, because more that clearly show a class are refused.
    model.learn_background(files["class03"][:2])
    again = model.snapshot().state.held_out_signals
    assert (again[:, -1] <= drawn[:, -1]).all()
    assert (again[:, -1] < drawn[:, -1]).any(), "images of a class are near a background of the same class"
    teach(model, files, "class05")
    assert (model.snapshot().state.held_out_signals[:, -1] < NO_BACKGROUND).all()


@pytest.mark.parametrize("follow_drift", [True, False])
def test_the_background_moves_with_the_adapter(follow_drift, tiny_vit, files, monkeypatch):
    maps = []

    def watched(before, after):
        maps.append(fit_drift_map(before, after))
        return maps[-1]

    monkeypatch.setattr("onea.classifiers.drift.fit_drift_map", watched)
    monkeypatch.setattr(
        "onea.learner.update.dropped_significantly", lambda *given: False
    )  # keep the adapter even if it lowers the accuracy
    made = tiny_model(tiny_vit, follow_drift=follow_drift)
    model = teach(made, files, "class00", "class01")
    kept = model.learn_background(files["class04"]).snapshot().state.background
    teach(model, files, "class02", "class03")
    assert model.history[-1]["trained"]
    moved = model.snapshot().state.background
    assert torch.equal(moved, round_to_bfloat16(kept @ maps[-1].float()) if follow_drift else kept)
    assert torch.equal(moved, kept) != follow_drift


def test_a_seeded_sample_of_limited_size_is_kept(model, files, tmp_path):
    rng = np.random.default_rng(0)
    many = rng.integers(0, 256, (MAX_FEATURES + 40, 16, 16, 3), dtype=np.uint8)
    model.learn_background(many)
    kept = model.snapshot().state.background
    assert len(kept) == MAX_FEATURES
    assert torch.equal(model.undo().learn_background(many).snapshot().state.background, kept)
    model.learn_background(many[:30])
    assert model.snapshot().state.background_images == MAX_FEATURES + 70
    assert len(model.snapshot().state.background) == MAX_FEATURES
    assert onea.load(model.save(tmp_path / "shop.onea")).version == model.version


def test_reservoir_sampling_is_uniform():
    """Ten of 60 rows in three parts, ten thousand times: each is kept 1,667 times, within five standard deviations."""
    generator, times = torch.Generator().manual_seed(0), torch.zeros(60)
    for _ in range(10_000):
        kept, seen = torch.empty(0, dtype=torch.int64), 0
        for size in (4, 16, 40):
            kept = torch.cat([kept, torch.arange(seen, seen + size)])[
                reservoir_sample(len(kept), size, seen, 10, generator)
            ]
            seen += size
        assert len(kept.unique()) == 10
        times[kept] += 1
    assert (times - 10_000 / 6).abs().max() < 5 * (10_000 * 5 / 36) ** 0.5


# Bad input


def test_a_background_needs_a_class(tiny_vit, files, model):
    with pytest.raises(OneaError, match="has no classes yet; teach it some first"):
        tiny_model(tiny_vit).learn_background(files["class04"])
    model.forget(*KNOWN)
    with pytest.raises(OneaError, match="has no classes yet; teach it some first"):
        model.learn_background(files["class04"])


def test_a_background_needs_an_image(model, tmp_path):
    with pytest.raises(OneaError, match="no background images"):
        model.learn_background([])
    with pytest.raises(OneaError, match="cannot be read"):
        model.learn_background([b"no image"])
    assert model.version == 1


def clear_photos(model, files):
    """Taught photos that clearly show a known class."""
    taught = [file for name in KNOWN for file in files[name]]
    found = [taught[row] for row in clearly_known(model.snapshot(), features_and_scores(model, taught)[0])]
    assert len(found) > 3
    return found


def test_taught_photos_are_refused_as_background(model, files):
    """They are recognised by their fingerprints, even if there is only one."""
    with pytest.raises(
        OneaError, match=r"1 of 7 background images were taught as a class .*2\.png as 'class01'"
    ) as told:
        model.learn_background([*files["class04"], files["class01"][2]])
    assert "remove them, or forget the class first" in str(told.value)
    assert model.version == 1
    model.forget("class01").learn_background([*files["class04"], files["class01"][2]])


def test_background_that_is_taught_as_a_class_is_removed(model, files, tmp_path):
    """Otherwise every image of the class would be unfamiliar."""
    model.learn_background([*files["class04"], *files["class05"]])
    both = model.snapshot().state.background
    teach(model, files, "class04")
    assert model.history[-1]["relabelled_background"] == len(files["class04"])
    assert "background photos that now belong to a class, and no longer to the background: 6" in notes(
        model.history[-1]
    )
    state = model.snapshot().state
    assert torch.equal(state.background, both[len(files["class04"]) :])
    assert state.background_images == len(files["class05"])
    loaded = onea.load(model.save(tmp_path / "less.onea"))
    assert torch.equal(loaded.snapshot().state.background, state.background)
    assert torch.equal(model.undo().snapshot().state.background, both)
    teach(model.forget(*KNOWN), files, "class04")
    assert model.history[-1]["relabelled_background"] == 0, "without classes, the variance within classes is unknown"


def test_background_is_recognised_after_the_adapter_was_trained(model, files, tmp_path):
    model.learn_background(files["class04"])
    teach(model, files, *KNOWN)
    assert model.history[-1]["trained"]
    assert len(teach(model, files, "class04").snapshot().state.background) == 0
    loaded = onea.load(model.save(tmp_path / "none.onea"), threads=1, precision="fp32", device="cpu")
    assert len(loaded.learn_background(files["class05"]).snapshot().state.background) == len(files["class05"])
    loaded.save(tmp_path / "none.onea")


def test_a_background_of_known_photos_is_refused_and_named(model, files):
    without_fingerprints(model)
    with pytest.raises(
        OneaError, match=r"of \d+ background images clearly show a known class .*\.png like 'class0"
    ) as told:
        model.learn_background(clear_photos(model, files))
    assert str(told.value).count(".png like ") == 3
    assert "remove them, or teach them as a class." in str(told.value)
    assert model.version == 1


def test_a_few_known_photos_are_learned_and_counted(model, files):
    strange = np.random.default_rng(0).integers(0, 256, (200, 16, 16, 3), dtype=np.uint8)
    before = without_fingerprints(model).snapshot()
    model.learn_background([*clear_photos(model, files), *strange])
    assert 1 <= model.history[-1]["resembling_known"] < 200 / 3
    assert len(before.state.held_out_signals) >= 20


def test_with_few_held_out_images_no_image_clearly_shows_a_class(tiny_vit, files):
    model = teach(tiny_model(tiny_vit), files, "class00", "class01")
    assert len(without_fingerprints(model).snapshot().state.held_out_signals) < 20
    model.learn_background(files["class00"])
    assert model.history[-1]["resembling_known"] == 0


# The folder


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of a version, with correct checksums."""
    content = save(tensors)
    (folder / "state.safetensors").write_bytes(content)
    described = json.loads((folder / "state.json").read_bytes())
    (folder / "state.json").write_bytes(resealed(described | {"sha256": hashlib.sha256(content).hexdigest()}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda rows: rows[:-1], "'background' does not have the expected type and shape"),
        (lambda rows: torch.cat([rows, rows]), "'background' does not have the expected type and shape"),
        (lambda rows: rows[:, 1:], "'background' does not have the expected type and shape"),
        (lambda rows: rows.float(), "'background' does not have the expected type and shape"),
        (lambda rows: rows[0], "'background' does not have the expected type and shape"),
        (lambda rows: None, "does not have the expected type and shape"),
        (lambda rows: rows * torch.nan, "background contains NaN or infinity"),
    ],
)
def test_a_damaged_background_is_named(model, files, tmp_path, spoil, reason):
    path = model.learn_background(files["class04"]).save(tmp_path / "shop.onea")
    tensors = load_file(path / "states/000002/state.safetensors")
    spoiled = spoil(tensors.pop("background"))
    rewritten(path / "states/000002", tensors | ({} if spoiled is None else {"background": spoiled.contiguous()}))
    with pytest.raises(OneaError, match=rf"damaged .*{reason}"):
        onea.load(path)


def test_a_background_does_not_affect_a_model_of_one_class(tiny_vit, files):
    model = teach(tiny_model(tiny_vit), files, KNOWN[0])
    familiar = model.familiarity(files["class01"] + files[KNOWN[0]])
    model.learn_background(files["class02"])
    assert (model.familiarity(files["class01"] + files[KNOWN[0]]) == familiar).all(), (
        "the background counts from the second class on"
    )
    assert set(model.predict(files[KNOWN[0]])) == {KNOWN[0]}
    assert "Detected by their distance to the only class." in card(model.snapshot().state, "shop.onea")
