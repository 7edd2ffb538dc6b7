# SPDX-License-Identifier: Apache-2.0
"""The names of datasets."""

from __future__ import annotations

import os


def data_name(data: str) -> str:
    """The name a dataset goes by, as presets and tables know it; a folder counts by its own name.

    >>> data_name("folder:/data/cub200/"), data_name("folder:cub200"), data_name("cifar100")
    ('cub200', 'cub200', 'cifar100')
    """
    return data.replace(os.sep, "/").rstrip("/").split("/")[-1].split(":")[-1]
