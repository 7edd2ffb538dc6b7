# SPDX-License-Identifier: Apache-2.0
"""Learning: one update of a model, the images that it is made of and how they are told apart."""
