# SPDX-License-Identifier: Apache-2.0
"""Published datasets by name, and images packed for runs."""

from __future__ import annotations

import os


def data_name(data: str) -> str:
    """The name of a dataset in presets and tables; for a folder, the last part of its path.

    >>> data_name("folder:/data/cub200/"), data_name("folder:cub200"), data_name("cifar100")
    ('cub200', 'cub200', 'cifar100')
    """
    return data.replace(os.sep, "/").rstrip("/").split("/")[-1].split(":")[-1]
