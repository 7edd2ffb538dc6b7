# SPDX-License-Identifier: Apache-2.0
"""Views of images: more rows in the statistics, drawn alike every time; classifiers that are compared or exchanged."""

from __future__ import annotations

import pytest
import torch
from support.methods import prepared

from onea.research.runs.config import make_config
from onea.research.runs.setup import prepare
from onea.runtime import make_runtime


def learned(values: dict, **options):
    config = make_config(values | {"method": "simplecil", "options": {"classifier": "slda", **options}})
    ready = prepare(config, make_runtime("cpu", "fp32", 1))
    task = ready.task(0)
    ready.method.learn(task)
    return ready.method, task


def test_every_view_counts_as_an_image(tiny_run):
    (plain, task), (seen, _) = learned(tiny_run), learned(tiny_run, views=3)
    known, more = plain.statistics_for("slda"), seen.statistics_for("slda")
    assert known.counts.tolist() == task.labels.bincount().tolist()
    assert more.counts.tolist() == (3 * known.counts).tolist()
    views = torch.cat([seen.task_features(task, seen.hooks(), view) for view in range(3)])
    torch.testing.assert_close(views[: len(task)], plain.task_features(task, plain.hooks()))
    for row in task.classes:
        own = views[task.labels.repeat(3) == row]
        torch.testing.assert_close(more.means[row], own.mean(0), rtol=1e-4, atol=1e-5)


def test_views_differ_but_are_reproducible(tiny_run):
    (first, task), (second, _) = learned(tiny_run, views=3), learned(tiny_run, views=3)
    assert torch.equal(first.statistics_for("slda").scatter, second.statistics_for("slda").scatter)
    one, two, three = (first.task_features(task, first.hooks(), view) for view in range(3))
    assert not torch.allclose(one, two)
    assert not torch.allclose(two, three)


def test_classes_with_enough_images_use_images_instead_of_crops(tiny_run):
    images = int(learned(tiny_run)[1].labels.bincount().min())
    (plain, _), (enough, _), (few, _) = (
        learned(tiny_run, views=views, enough_images=bound) for views, bound in ((1, 0), (3, images), (3, images + 1))
    )
    once, thrice = plain.statistics_for("slda"), enough.statistics_for("slda")
    assert thrice.counts.tolist() == (3 * once.counts).tolist() == few.statistics_for("slda").counts.tolist()
    torch.testing.assert_close(thrice.means, once.means)
    assert not torch.allclose(few.statistics_for("slda").means, once.means)


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
    (alone, _), (beside, _) = learned(tiny_run, **options), learned(tiny_run, compare_classifiers=compared, **options)
    sizes, others = ({k: v.shape for k, v in method.inference_state().items()} for method in (alone, beside))
    assert sizes == others == {k: v.shape for k, v in alone.state_dict().items()}


def test_ranpac_is_used_only_if_selected(tiny_run):
    def of(**options):
        return prepared(tiny_run, "ranpac", options=options | {"random_features": 64}).method.classifiers

    assert list(of()) == ["ranpac"]
    assert list(of(classifier="slda", classifier_options="shrinkage=0.1")) == ["slda"]
    beside = of(classifier="slda", classifier_options="shrinkage=0.1", compare_classifiers="ranpac")
    assert list(beside) == ["slda", "ranpac"]
    assert beside["ranpac"].features == of()["ranpac"].features == 64
    assert of(classifier_options="features=32")["ranpac"].features == 32
