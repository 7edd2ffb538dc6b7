# SPDX-License-Identifier: Apache-2.0
"""Datasets by name, images by index, and the batched way from one to the other."""
