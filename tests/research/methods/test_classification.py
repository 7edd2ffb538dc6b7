# SPDX-License-Identifier: Apache-2.0
"""Several views of each image in the statistics, and classifiers that are compared or replaced."""

from __future__ import annotations

import pytest
import torch
from support.methods import prepared

from onea.research.runs.config import make_config
from onea.research.runs.setup import prepare
from onea.runtime import make_runtime


def learn_first_task(values: dict, **options):
    config = make_config(values | {"method": "simplecil", "options": {"classifier": "slda", **options}})
    ready = prepare(config, make_runtime("cpu", "fp32", 1))
    task = ready.task(0)
    ready.method.learn(task)
    return ready.method, task


def test_every_view_counts_as_an_image(tiny_run):
    (plain, task), (with_views, _) = learn_first_task(tiny_run), learn_first_task(tiny_run, views=3)
    plain_statistics, view_statistics = plain.statistics_for("slda"), with_views.statistics_for("slda")
    assert plain_statistics.counts.tolist() == task.labels.bincount().tolist()
    assert view_statistics.counts.tolist() == (3 * plain_statistics.counts).tolist()
    views = torch.cat([with_views.task_features(task, with_views.hooks(), view) for view in range(3)])
    torch.testing.assert_close(views[: len(task)], plain.task_features(task, plain.hooks()))
    for row in task.classes:
        own = views[task.labels.repeat(3) == row]
        torch.testing.assert_close(view_statistics.means[row], own.mean(0), rtol=1e-4, atol=1e-5)


def test_views_differ_but_are_reproducible(tiny_run):
    (first, task), (second, _) = learn_first_task(tiny_run, views=3), learn_first_task(tiny_run, views=3)
    assert torch.equal(first.statistics_for("slda").scatter, second.statistics_for("slda").scatter)
    one, two, three = (first.task_features(task, first.hooks(), view) for view in range(3))
    assert not torch.allclose(one, two)
    assert not torch.allclose(two, three)


def test_classes_with_enough_images_use_images_instead_of_crops(tiny_run):
    images = int(learn_first_task(tiny_run)[1].labels.bincount().min())
    (plain, _), (enough, _), (few, _) = (
        learn_first_task(tiny_run, views=views, enough_images=enough_images)
        for views, enough_images in ((1, 0), (3, images), (3, images + 1))
    )
    plain_statistics, enough_statistics = plain.statistics_for("slda"), enough.statistics_for("slda")
    assert (
        enough_statistics.counts.tolist()
        == (3 * plain_statistics.counts).tolist()
        == few.statistics_for("slda").counts.tolist()
    )
    torch.testing.assert_close(enough_statistics.means, plain_statistics.means)
    assert not torch.allclose(few.statistics_for("slda").means, plain_statistics.means)


@pytest.mark.parametrize(
    ("options", "compared"),
    [
        ({"classifier": "ncm"}, "slda"),
        ({"classifier": "ncm"}, "rgda,fecam"),
        ({"classifier": "slda"}, "ranpac,rgda"),
        ({"classifier": "rgda", "classifier_options": "directions=2"}, "rgda-full"),
    ],
)
def test_inference_state_excludes_compared_classifiers(options, compared, tiny_run):
    (alone, _), (comparing, _) = (
        learn_first_task(tiny_run, **options),
        learn_first_task(tiny_run, compare_classifiers=compared, **options),
    )
    sizes, others = ({k: v.shape for k, v in method.inference_state().items()} for method in (alone, comparing))
    assert sizes == others == {k: v.shape for k, v in alone.state_dict().items()}


def test_ranpac_is_used_only_if_selected(tiny_run):
    def classifiers_of(**options):
        return prepared(tiny_run, "ranpac", options=options | {"random_features": 64}).method.classifiers

    assert list(classifiers_of()) == ["ranpac"]
    assert list(classifiers_of(classifier="slda", classifier_options="shrinkage=0.1")) == ["slda"]
    compared = classifiers_of(classifier="slda", classifier_options="shrinkage=0.1", compare_classifiers="ranpac")
    assert list(compared) == ["slda", "ranpac"]
    assert compared["ranpac"].features == classifiers_of()["ranpac"].features == 64
    assert classifiers_of(classifier_options="features=32")["ranpac"].features == 32
