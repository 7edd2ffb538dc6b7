# SPDX-License-Identifier: Apache-2.0
"""One update: train an adapter on new images, merge it into the earlier one, and add the images to the statistics."""
