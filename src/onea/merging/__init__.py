"""Merging operators: pure functions on tensors that know nothing of networks."""
