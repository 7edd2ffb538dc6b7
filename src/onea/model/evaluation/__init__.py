# SPDX-License-Identifier: Apache-2.0
"""Evaluation: accuracy on labelled images, and whether each class was taught well enough."""
