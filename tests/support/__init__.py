# SPDX-License-Identifier: Apache-2.0
"""What several tests share: tiny models and photos, the service, damaged files, the examples of the pages."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
