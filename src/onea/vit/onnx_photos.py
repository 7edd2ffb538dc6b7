# SPDX-License-Identifier: Apache-2.0
"""Photos of any size as the input of a graph: what ``onea.data.decode.fit`` and Pillow do, in ONNX's own operators.

ONNX's antialiased resize computes its weights in float32 and gives one pixel in a thousand another level than Pillow.
Here they are Pillow's: computed in float64, rounded to 22 bits behind the point. Their products with bytes, and all
sums, are whole numbers that float64 holds exactly, so no order of summation and no processor changes a pixel.
"""

from __future__ import annotations

from typing import Any

from onea.errors import import_extra
from onea.vit.onnx_files import OPSET

# Cut what lies far outside the final crop and scale until the square is covered, width first; only the square itself is
# computed. All sizes are (height, width). Round takes halves to the even number, as Python does.
_FRONT = """
<ir_version: 8, opset_import: ["": {opset}]>
photos (uint8[batch, height, width, 3] images) => (float[batch, 3, {side}, {side}] squares)
<int64[2] photo_swap = {{1, 0}}, int64 photo_two = {{2}}, int64 photo_zero = {{0}}, int64 photo_one = {{1}},
 int64[2] photo_rows = {{1, 2}}, int64 photo_side = {{{side}}}, int64[1] photo_column = {{1}},
 float photo_white = {{255}}, double real_none = {{0}}, double real_half = {{0.5}}, double real_one = {{1}},
 double real_two = {{2}}, double real_most = {{255}}, double real_fine = {{4194304}}, double real_cubic = {{1.5}},
 double real_square = {{2.5}}, double real_five = {{5}}, double real_eight = {{8}}, double real_four = {{4}},
 double real_a = {{-0.5}}>
{{
  photo_size = Shape <start = 1, end = 3> (images)
  photo_across = Gather (photo_size, photo_swap)
  photo_most = Mul (photo_across, photo_two)
  photo_over = Sub (photo_size, photo_most)
  photo_excess = Max (photo_over, photo_zero)
  photo_spare = Div (photo_excess, photo_two)
  photo_end = Sub (photo_size, photo_spare)
  photo_cut = Slice (images, photo_spare, photo_end, photo_rows)
  photo_kept = Sub (photo_end, photo_spare)
  photo_short = ReduceMin (photo_kept)
  photo_scaled = Mul (photo_kept, photo_side)
  photo_covering = Div (photo_scaled, photo_short)
  photo_beyond = Sub (photo_covering, photo_side)
  photo_margins = Cast <to = 11> (photo_beyond)
  photo_margin = Mul (photo_margins, real_half)
  photo_first = Round (photo_margin)
  photo_width = Cast <to = 11> (photo_side)
  photo_last = Add (photo_first, photo_width)
  photo_upright = Transpose <perm = [0, 3, 1, 2]> (photo_cut)
  photo_levels = Cast <to = 11> (photo_upright)
  {across}
  across_turned = Transpose <perm = [1, 0]> (across_weights)
  across_sums = MatMul (photo_levels, across_turned)
  {across_rounded}
  {down}
  down_sums = MatMul (down_weights, across_levels)
  {down_rounded}
  photo_bytes = Cast <to = 1> (down_levels)
  squares = Div (photo_bytes, photo_white)
}}
"""

# Pillow's weights along one axis, ``[side, kept]``: Keys' cubic of the distances between the middles of the pixels, as
# wide as the photo shrinks, of sum one; in its order of operations.
_WEIGHTS = """
  {axis}_kept = Gather (photo_kept, {index})
  {axis}_wanted = Gather (photo_covering, {index})
  {axis}_from = Cast <to = 11> ({axis}_kept)
  {axis}_to = Cast <to = 11> ({axis}_wanted)
  {axis}_scale = Div ({axis}_from, {axis}_to)
  {axis}_wide = Max ({axis}_scale, real_one)
  {axis}_narrow = Div (real_one, {axis}_wide)
  {axis}_first = Gather (photo_first, {index})
  {axis}_last = Gather (photo_last, {index})
  {axis}_numbers = Range ({axis}_first, {axis}_last, real_one)
  {axis}_middles = Add ({axis}_numbers, real_half)
  {axis}_places = Mul ({axis}_middles, {axis}_scale)
  {axis}_centres = Unsqueeze ({axis}_places, photo_column)
  {axis}_pixels = Range (real_none, {axis}_from, real_one)
  {axis}_offsets = Sub ({axis}_pixels, {axis}_centres)
  {axis}_shifted = Add ({axis}_offsets, real_half)
  {axis}_signed = Mul ({axis}_shifted, {axis}_narrow)
  {axis}_x = Abs ({axis}_signed)
  {axis}_near_a = Mul ({axis}_x, real_cubic)
  {axis}_near_b = Sub ({axis}_near_a, real_square)
  {axis}_near_c = Mul ({axis}_near_b, {axis}_x)
  {axis}_near_d = Mul ({axis}_near_c, {axis}_x)
  {axis}_near = Add ({axis}_near_d, real_one)
  {axis}_far_a = Sub ({axis}_x, real_five)
  {axis}_far_b = Mul ({axis}_far_a, {axis}_x)
  {axis}_far_c = Add ({axis}_far_b, real_eight)
  {axis}_far_d = Mul ({axis}_far_c, {axis}_x)
  {axis}_far_e = Sub ({axis}_far_d, real_four)
  {axis}_far = Mul ({axis}_far_e, real_a)
  {axis}_is_near = Less ({axis}_x, real_one)
  {axis}_is_close = Less ({axis}_x, real_two)
  {axis}_outer = Where ({axis}_is_close, {axis}_far, real_none)
  {axis}_cubic = Where ({axis}_is_near, {axis}_near, {axis}_outer)
  {axis}_sum = ReduceSum ({axis}_cubic, photo_column)
  {axis}_share = Div ({axis}_cubic, {axis}_sum)
  {axis}_fine = Mul ({axis}_share, real_fine)
  {axis}_size = Abs ({axis}_fine)
  {axis}_up = Add ({axis}_size, real_half)
  {axis}_whole = Floor ({axis}_up)
  {axis}_sign = Sign ({axis}_fine)
  {axis}_weights = Mul ({axis}_whole, {axis}_sign)
"""

# Sums of weighted bytes as bytes again.
_ROUNDED = """
  {axis}_raw = Div ({axis}_sums, real_fine)
  {axis}_raised = Add ({axis}_raw, real_half)
  {axis}_floor = Floor ({axis}_raised)
  {axis}_levels = Clip ({axis}_floor, real_none, real_most)
"""


def take_photos(model: Any, side: int) -> None:
    """Let a model that takes squares of pixels in 0..1 take photos instead: ``uint8 [N, height, width, 3]``, RGB."""
    axes = {"down": "photo_zero", "across": "photo_one"}
    parts = {axis: _WEIGHTS.format(axis=axis, index=index) for axis, index in axes.items()}
    parts |= {f"{axis}_rounded": _ROUNDED.format(axis=axis) for axis in axes}
    front = import_extra("onnx.parser", "export").parse_model(_FRONT.format(opset=OPSET, side=side, **parts)).graph
    body = model.graph
    for node in body.node:
        node.input[:] = ["squares" if name == "images" else name for name in node.input]
    nodes = [*front.node, *body.node]
    del body.node[:]
    body.node.extend(nodes)
    body.initializer.extend(front.initializer)
    body.input[0].CopyFrom(front.input[0])
