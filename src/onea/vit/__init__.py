# SPDX-License-Identifier: Apache-2.0
"""The frozen vision transformer, modules that hook into it, and heads on its features."""
