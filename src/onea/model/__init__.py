# SPDX-License-Identifier: Apache-2.0
"""The estimator that a practitioner holds: teach, predict, save, load, export."""
