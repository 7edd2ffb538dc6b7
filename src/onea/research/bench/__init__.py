# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of training and inference, next to plain baselines in the same process."""
