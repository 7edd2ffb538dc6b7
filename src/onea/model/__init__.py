# SPDX-License-Identifier: Apache-2.0
"""The estimator of a model: teach, predict, save, load, export."""
