# SPDX-License-Identifier: Apache-2.0
"""Datasets of image files or pixels, and their images in batches for a network."""
