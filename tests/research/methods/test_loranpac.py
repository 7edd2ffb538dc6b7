# SPDX-License-Identifier: Apache-2.0
"""LoRanPAC as a method: the adapter of the first task, its head, and what truncation costs."""

from __future__ import annotations

import torch
from support.methods import learn_all, prepared, shown_images
from support.tiny import write_tiny_images

from onea.research.methods.loranpac import RandomFeatureHead


def loranpac(tiny_run, sizes="3,1,2", **options):
    return prepared(tiny_run, "loranpac", sizes=sizes, options=tiny_run["options"] | options)


def test_only_the_first_task_trains_and_every_task_reports_the_energy_kept(tiny_run):
    ready = loranpac(tiny_run)
    reports = [ready.method.learn(ready.task(index)) for index in range(3)]
    assert [report["trained"] for report in reports] == [True, False, False]
    assert all(0.5 < report["energy_kept"] <= 1 for report in reports)
    whole = loranpac(tiny_run, classifier_options="kept=1")
    assert all(whole.method.learn(whole.task(index))["energy_kept"] > 0.999 for index in range(3))


def test_a_frozen_network_is_the_classifier_alone(tiny_run):
    ready = loranpac(tiny_run, train=False)
    frozen = prepared(tiny_run, "simplecil", options={"classifier": "loranpac", "classifier_options": "features=64"})
    images = shown_images(ready)
    torch.testing.assert_close(learn_all(ready).scores(images), learn_all(frozen).scores(images))


def test_the_official_head_classifies_random_features(tiny_run, monkeypatch):
    import onea.learner.merged_adapter as module

    heads, train = [], module.train_adapter

    def watched(*arguments):
        heads.append(arguments[-1])
        return train(*arguments)

    monkeypatch.setattr(module, "train_adapter", watched)
    plain, official = (learn_all(loranpac(tiny_run, loranpac_head=head)) for head in ("features", "official"))
    assert heads[0] is None
    assert isinstance(heads[1], RandomFeatureHead)
    assert torch.equal(heads[1].projection, official.statistics_for("loranpac").projection)
    assert any(
        not torch.equal(value, official.adapter.state_dict()[name])
        for name, value in plain.adapter.state_dict().items()
    )


def test_another_classifier_can_be_compared(tiny_run):
    ready = loranpac(tiny_run, compare_classifiers="ranpac,rgda")
    learned = learn_all(ready)
    assert [*learned.classifiers] == ["loranpac", "ranpac", "rgda"]
    assert learned.classifiers["ranpac"].features == learned.classifiers["loranpac"].features == 64
    other = loranpac(tiny_run, classifier="slda")
    assert "energy_kept" not in other.method.learn(other.task(0))


def test_a_stream_may_begin_with_one_image(tiny_run, tmp_path):
    write_tiny_images(tmp_path, classes=48, train=2, test=1)
    (tmp_path / "train/class40/1.png").unlink()
    ready = loranpac(tiny_run | {"data": f"folder:{tmp_path}"}, "36,1,2,9")
    learned = learn_all(ready)
    assert all(value.isfinite().all() for value in learned.state_dict().values() if value.is_floating_point())
    assert learned.scores(shown_images(ready)).shape == (48, 48)
