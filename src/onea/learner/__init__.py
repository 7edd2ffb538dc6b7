# SPDX-License-Identifier: Apache-2.0
"""Learning one update: train an adapter on new images, merge it into the kept one, add the images to the statistics."""
