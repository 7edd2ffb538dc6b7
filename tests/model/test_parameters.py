# SPDX-License-Identifier: Apache-2.0
"""Presets of models, and options that override them now or later."""

from __future__ import annotations

import dataclasses

import pytest
from support.models import class_folders, tiny_model
from support.toys import toy

import onea
from onea.errors import OneaError
from onea.model.parameters import change_options, choose_image_size, choose_options
from onea.model.storage.teaching import teach_folder
from onea.vit.network_config import ACCURATE_IMAGE_SIZE

MACHINE = {"threads": 1, "precision": "fp32", "device": "cpu"}


def test_the_presets_differ_in_training_and_image_size():
    auto, fast, accurate = (choose_options(preset, {}, toy("CLIP")) for preset in ("auto", "fast", "accurate"))
    assert auto == accurate == dataclasses.replace(fast, train=True, views=auto.views)
    assert (fast.should_train(20, 1.0), auto.should_train(20, 1.0), fast.views) == (False, True, 1)
    sizes = [choose_image_size(onea.OneA(preset=preset).get_params()) for preset in ("auto", "fast", "accurate")]
    assert sizes == [None, None, ACCURATE_IMAGE_SIZE]


@pytest.mark.parametrize("given", [{"image_size": 56}, {"backbone": "other.safetensors", "image_size": 56}])
def test_a_given_image_size_takes_precedence_over_the_preset(given):
    assert choose_image_size(onea.OneA(preset="accurate", **given).get_params()) == 56


def test_the_size_of_the_preset_is_for_the_bundled_network_only():
    assert choose_image_size(onea.OneA(preset="accurate", backbone="other.safetensors").get_params()) is None


@pytest.mark.parametrize("given", [{"views": 3}, {"cached_views": 3}])
def test_an_explicit_number_of_views_holds_for_updates_of_any_size(given):
    vit = toy("CLIP")
    assert choose_options("auto", given, vit).enough_images == 0
    assert choose_options("auto", {**given, "enough_images": 7}, vit).enough_images == 7


def test_overriding_an_option_with_its_stored_value_changes_nothing():
    vit = toy("CLIP")
    noted = dataclasses.asdict(choose_options("auto", {}, vit))
    assert dataclasses.asdict(change_options(noted, {"views": 2, "cached_views": 2}, vit)) == noted
    assert change_options(noted, {"views": 3}, vit).enough_images == 0


@pytest.mark.parametrize("preset", ["tiny", "", None, ["auto"]])
def test_an_unknown_preset_is_refused(preset):
    with pytest.raises(OneaError, match="choose auto, fast, accurate or paper"):
        choose_options(preset, {}, toy("CLIP"))


@pytest.fixture(scope="module")
def files(tiny_images):
    found = class_folders(tiny_images / "train")
    return [file for name in sorted(found)[:4] for file in found[name]]


def lesson(files):
    return files, [file.parent.name for file in files]


def test_fit_of_a_loaded_model_applies_overrides(tiny_vit, files, tmp_path):
    model = tiny_model(tiny_vit, preset="paper").learn(*lesson(files))
    path = model.save(tmp_path / "m.onea")
    longer = onea.load(path, epochs=1, options={"max_epochs": 1}, **MACHINE).fit(*lesson(files)).snapshot().state
    assert longer.options == model.snapshot().state.options | {"epochs": 1, "max_epochs": 1}
    lighter = onea.load(path, preset="auto", **MACHINE).fit(*lesson(files)).snapshot().state
    assert (lighter.options["adapter_blocks"], lighter.options["views"]) == (1, 2)


@pytest.mark.parametrize("preset", ["auto", "accurate", "paper"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"adapter_blocks": 0},
        {"adapter-blocks": 1},
        {"adapter_blocks": "0", "patch_drop_rate": 0.25},
        {"epochs": 30},
        {"epochs": 30, "max_epochs": 31},
    ],
    ids=str,
)
def test_later_overrides_equal_initial_ones(preset, given):
    vit = toy("CLIP")
    made = dataclasses.asdict(choose_options(preset, {"epochs": 2}, vit))
    later = {"epochs": 2} | given
    assert change_options(made, given, vit) == choose_options(preset, later, vit)


def test_dependent_options_follow_overrides_only():
    vit = toy("CLIP")
    chosen = {"adapter_blocks": 0, "patch_drop_rate": 0.5, "epochs": 2, "max_epochs": 2}
    made = choose_options("auto", chosen, vit)
    assert change_options(dataclasses.asdict(made), {"rank": 2}, vit) == dataclasses.replace(made, rank=2)
    longer = change_options(dataclasses.asdict(made), {"epochs": 30}, vit)
    assert longer == dataclasses.replace(made, epochs=30, min_epochs=0, max_epochs=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"carry": "none"}, "set follow_drift"),
        ({"compare-classifiers": "ncm"}, "set readout"),
        (3, "options is 3; give a mapping"),
        ({3: 4}, "give a mapping"),
        ({"epochs": "many"}, "epochs is 'many'; it needs a whole number"),
        ({"adapter_block": 1}, "adapter_blocks"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_when_learning_and_when_loading(tiny_vit, files, tmp_path, options, sentence):
    for preset in ("auto", "paper"):
        with pytest.raises(OneaError, match=sentence):
            tiny_model(tiny_vit, preset=preset, options=options).learn(*lesson(files))
    path = tiny_model(tiny_vit).learn(*lesson(files[:12])).save(tmp_path / "m.onea")
    with pytest.raises(OneaError, match=sentence):
        onea.load(path, options=options, **MACHINE)


def test_a_loaded_model_with_adapters_in_all_blocks_trains_on_all_patches(tiny_vit, files, tmp_path):
    path = tiny_model(tiny_vit, options={"patch_drop_rate": 0.5}).learn(*lesson(files)).save(tmp_path / "m.onea")
    anew = onea.load(path, options={"adapter_blocks": 0}, **MACHINE).fit(*lesson(files)).snapshot().state.options
    assert (anew["adapter_blocks"], anew["patch_drop_rate"]) == (0, 0.0)


def test_the_preset_of_a_model_folder_cannot_change(tiny_vit, tiny_images, tmp_path):
    path, photos = tmp_path / "m.onea", tiny_images / "train"
    teach_folder(path, photos, None, {"backbone": tiny_vit, "epochs": 1}, MACHINE, "fail")
    assert teach_folder(path, photos, None, {"preset": "auto"}, MACHINE, "fail").version == 2
    with pytest.raises(OneaError, match="was created with preset auto; leave out preset="):
        teach_folder(path, photos, None, {"preset": "accurate"}, MACHINE, "fail")
    with pytest.raises(OneaError, match="was created without image_size; leave out image_size="):
        teach_folder(path, photos, None, {"image_size": 42}, MACHINE, "fail")
