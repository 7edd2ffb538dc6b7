# SPDX-License-Identifier: Apache-2.0
"""Classifiers fitted to statistics of features, without old images, in a registry that imports them on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onea.registry import Registry

if TYPE_CHECKING:
    from onea.classifiers.base import Classifier

_BUILT_IN = {
    "ncm": "onea.classifiers.linear:NearestMean",
    "slda": "onea.classifiers.linear:StreamingLDA",
    "whitened": "onea.classifiers.linear:WhitenedCosine",
    "ridge": "onea.classifiers.linear:RidgeClassifier",
    "rgda": "onea.classifiers.gaussian:RegularisedGaussian",
    "rgda-full": "onea.classifiers.gaussian:FullRegularisedGaussian",
    "lr-rgda": "onea.classifiers.gaussian:LowRankGaussian",
    "sampled-head": "onea.classifiers.alignment:SampledHead",
    "fecam": "onea.classifiers.gaussian:FeCAM",
    "ranpac": "onea.classifiers.ranpac:RanPAC",
    "loranpac": "onea.classifiers.loranpac:LoRanPAC",
}

CLASSIFIERS = Registry("classifier", "onea.classifiers", _BUILT_IN)


def classifier_class(name: str) -> type[Classifier]:
    """The class of a classifier: a dataclass with its options as fields."""
    kind: type[Classifier] = CLASSIFIERS.load(name)
    return kind


def make_classifier(name: str, **options: Any) -> Classifier:
    """A classifier by name; options may be text, as a command line gives them.

    >>> make_classifier("rgda", directions="16")
    RegularisedGaussian(directions=16, prior_images=800.0)
    """
    from onea.options import make_options

    return make_options(classifier_class(name), options)
