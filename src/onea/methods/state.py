# SPDX-License-Identifier: Apache-2.0
"""Flat states: the tensors of several parts under one dictionary, each part by its prefix."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def prefixed(prefix: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part's tensors under its prefix.

    >>> prefixed("head.", {"bias": Tensor([1.0])})
    {'head.bias': tensor([1.])}
    """
    return {prefix + name: value for name, value in part.items()}


def part_of(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under a prefix, without it.

    >>> part_of("head.", {"head.bias": Tensor([1.0]), "other": Tensor([2.0])})
    {'bias': tensor([1.])}
    """
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
