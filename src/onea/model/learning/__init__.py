# SPDX-License-Identifier: Apache-2.0
"""Learning: one update of a model, its images, and how repeated ones are recognised."""
