# SPDX-License-Identifier: Apache-2.0
"""What scikit-learn asks of an estimator besides its methods. Imported only where scikit-learn itself is."""

from __future__ import annotations

from typing import Any

from sklearn.exceptions import NotFittedError

from onea.errors import OneaError


class NotTaughtError(OneaError, NotFittedError):  # type: ignore[misc]  # scikit-learn has no types
    """A model was asked before it was taught; scikit-learn's tools wait for its own error."""


def tags() -> Any:
    """A classifier of images, and a source of features: of arrays of paths or of pixels, but no tables."""
    from sklearn.utils import (  # since 1.6, which alone asks for them
        ClassifierTags,
        InputTags,
        Tags,
        TargetTags,
        TransformerTags,
    )

    return Tags(
        estimator_type="classifier",
        target_tags=TargetTags(required=True),
        classifier_tags=ClassifierTags(),
        transformer_tags=TransformerTags(preserves_dtype=[]),
        input_tags=InputTags(one_d_array=True, two_d_array=False, string=True),
    )
