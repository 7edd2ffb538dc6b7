"""Datasets by name, images by index, and the batched way from one to the other."""
