# SPDX-License-Identifier: Apache-2.0
"""The error and the tags that scikit-learn expects of an estimator. Imported only if scikit-learn is."""

from __future__ import annotations

from typing import Any

from sklearn.exceptions import NotFittedError

from onea.errors import OneaError


class NotTaughtError(OneaError, NotFittedError):  # type: ignore[misc]  # scikit-learn has no types
    """The model has no classes yet."""


def tags() -> Any:
    """A classifier and transformer of arrays of paths or pixels, but not of tables."""
    from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags, TransformerTags  # since scikit-learn 1.6

    return Tags(
        estimator_type="classifier",
        target_tags=TargetTags(required=True),
        classifier_tags=ClassifierTags(),
        transformer_tags=TransformerTags(preserves_dtype=[]),
        input_tags=InputTags(one_d_array=True, two_d_array=False, string=True),
    )
