# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for attention on short sequences: one program for each head of each image.

Queries, keys and values are read from the output of one linear layer, ``[images, tokens, 3, heads, head width]``,
and their gradients are written in the same layout. The number of rows of a tile is a power of two. 64 patches and a
class token exceed one by a single token, and padding to the next power would quadruple the work. Therefore, the last
token may stay outside the tile: its rows and columns are vectors, computed without tensor cores.

Arguments in capitals are compile-time constants. ``TILE`` is at least ``TOKENS - 1``; ``WIDTH`` is that of a head. In
names, the prefix ``d`` means a gradient, the suffix ``x`` the token outside the tile.
The attention matrix has a query in each row and a key in each column: ``p`` is its tile, ``px`` the column next to it,
``py`` the row below it, ``pz`` the corner.
"""

# ruff: noqa: D103
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton.language as tl
    from triton import jit
except ImportError:  # CPU builds of PyTorch lack it and never call the kernels

    def jit(function: Callable[..., Any]) -> Callable[..., Any]:
        return function


@jit
def _read(at, inside, MASKED: tl.constexpr):
    if MASKED:
        values = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        values = tl.load(at)
    return values


@jit
def _write(at, values, inside, MASKED: tl.constexpr):
    values = values.to(at.dtype.element_ty)
    if MASKED:
        tl.store(at, values, mask=inside[:, None])
    else:
        tl.store(at, values)


@jit
def _dot_rows(tile, row):
    """The dot product of each row of a tile with one row."""
    return tl.sum(tile.to(tl.float32) * row[None, :], 1)


@jit
def _weighted_sum(tile, column):
    """The sum of the rows of a tile, weighted by a column."""
    return tl.sum(tile.to(tl.float32) * column[:, None], 0)


@jit
def _tile(q, k, kx, inside, SCALE: tl.constexpr, PADDED: tl.constexpr, EXTRA: tl.constexpr):
    """``p`` and ``px``, in float32."""
    s = tl.dot(q, tl.trans(k)) * SCALE
    if PADDED:
        s = tl.where(inside[None, :], s, float("-inf"))
    maximum = tl.max(s, 1)
    px = maximum
    if EXTRA:
        px = _dot_rows(q, kx) * SCALE
        maximum = tl.maximum(maximum, px)
    p = tl.exp2(s - maximum[:, None])
    total = tl.sum(p, 1)
    if EXTRA:
        px = tl.exp2(px - maximum)
        total += px
    factor = 1.0 / total
    return p * factor[:, None], px * factor


@jit
def _row_below(k, qx, kx, SCALE: tl.constexpr):
    """``py`` and ``pz``, in float32."""
    sy, sz = _dot_rows(k, qx) * SCALE, tl.sum(qx * kx, 0) * SCALE
    maximum = tl.maximum(tl.max(sy, 0), sz)
    py, pz = tl.exp2(sy - maximum), tl.exp2(sz - maximum)
    factor = 1.0 / (tl.sum(py, 0) + pz)
    return py * factor, pz * factor


@jit
def short_attention_forward(
    qkv, out, TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """Write ``out``, which is ``[images, tokens, heads, head width]``."""
    PADDED: tl.constexpr = TILE > TOKENS
    EXTRA: tl.constexpr = TILE < TOKENS
    STEP: tl.constexpr = HEADS * WIDTH  # from queries to keys, and to values
    SCALE: tl.constexpr = WIDTH**-0.5 * 1.4426950408889634  # for powers of two instead of e
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    source = qkv + (image * (TOKENS * 3 * STEP) + head * WIDTH)
    target = out + (image * (TOKENS * STEP) + head * WIDTH)
    rows, columns = tl.arange(0, TILE), tl.arange(0, WIDTH)
    inside = rows < TOKENS
    at, last = rows[:, None] * (3 * STEP) + columns[None, :], TILE * 3 * STEP + columns
    q = _read(source + at, inside, PADDED)
    k = _read(source + STEP + at, inside, PADDED)
    v = _read(source + 2 * STEP + at, inside, PADDED)
    kx = columns
    if EXTRA:
        kx = tl.load(source + STEP + last).to(tl.float32)
    p, px = _tile(q, k, kx, inside, SCALE, PADDED, EXTRA)
    o = tl.dot(p.to(v.dtype), v)
    if EXTRA:
        qx, vx = tl.load(source + last).to(tl.float32), tl.load(source + 2 * STEP + last).to(tl.float32)
        o += px[:, None] * vx[None, :]
        py, pz = _row_below(k, qx, kx, SCALE)
        ox = _weighted_sum(v, py) + pz * vx
        tl.store(target + TILE * STEP + columns, ox.to(out.dtype.element_ty))
    _write(target + rows[:, None] * STEP + columns[None, :], o, inside, PADDED)


@jit
def short_attention_backward(
    qkv, upper, grad, TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """Write the gradient of ``qkv``; ``upper`` is the gradient of the output. Each has the layout of its tensor."""
    PADDED: tl.constexpr = TILE > TOKENS
    EXTRA: tl.constexpr = TILE < TOKENS
    STEP: tl.constexpr = HEADS * WIDTH
    FACTOR: tl.constexpr = WIDTH**-0.5
    SCALE: tl.constexpr = FACTOR * 1.4426950408889634
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    start = image * (TOKENS * 3 * STEP) + head * WIDTH
    source, target = qkv + start, grad + start
    above = upper + (image * (TOKENS * STEP) + head * WIDTH)
    rows, columns = tl.arange(0, TILE), tl.arange(0, WIDTH)
    inside = rows < TOKENS
    at, last = rows[:, None] * (3 * STEP) + columns[None, :], TILE * 3 * STEP + columns
    q = _read(source + at, inside, PADDED)
    k = _read(source + STEP + at, inside, PADDED)
    v = _read(source + 2 * STEP + at, inside, PADDED)
    do = _read(above + rows[:, None] * STEP + columns[None, :], inside, PADDED)
    kx = columns
    if EXTRA:
        kx = tl.load(source + STEP + last).to(tl.float32)
    p, px = _tile(q, k, kx, inside, SCALE, PADDED, EXTRA)
    dp = tl.dot(do, tl.trans(v))
    mean = tl.sum(p * dp, 1)
    dv = tl.dot(tl.trans(p.to(do.dtype)), do)
    if EXTRA:
        qx, vx = tl.load(source + last).to(tl.float32), tl.load(source + 2 * STEP + last).to(tl.float32)
        dox = tl.load(above + TILE * STEP + columns).to(tl.float32)
        py, pz = _row_below(k, qx, kx, SCALE)
        dpy, dpz = _dot_rows(v, dox), tl.sum(vx * dox, 0)
        mean_y = tl.sum(py * dpy, 0) + pz * dpz
        dsy, dsz = py * (dpy - mean_y) * FACTOR, pz * (dpz - mean_y) * FACTOR
        dpx = _dot_rows(do, vx)
        mean += px * dpx
        dsx = px * (dpx - mean) * FACTOR
        dqx = _weighted_sum(k, dsy) + dsz * kx
        dkx = _weighted_sum(q, dsx) + dsz * qx
        dvx = _weighted_sum(do, px) + pz * dox
        tl.store(target + last, dqx.to(grad.dtype.element_ty))
        tl.store(target + STEP + last, dkx.to(grad.dtype.element_ty))
        tl.store(target + 2 * STEP + last, dvx.to(grad.dtype.element_ty))
        dv += py[:, None] * dox[None, :]
    _write(target + 2 * STEP + at, dv, inside, PADDED)
    ds = (p * (dp - mean[:, None]) * FACTOR).to(k.dtype)
    dk, dq = tl.dot(tl.trans(ds), q), tl.dot(ds, k)
    if EXTRA:
        dk += dsy[:, None] * qx[None, :]
        dq += dsx[:, None] * kx[None, :]
    _write(target + STEP + at, dk, inside, PADDED)
    _write(target + at, dq, inside, PADDED)
