# SPDX-License-Identifier: Apache-2.0
"""The version, alone, so that reading it imports nothing."""

__version__ = "0.1.0"
