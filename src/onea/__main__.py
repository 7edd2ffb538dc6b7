# SPDX-License-Identifier: Apache-2.0
"""``python -m onea``."""

from onea.cli import main

main()
