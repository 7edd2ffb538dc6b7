# SPDX-License-Identifier: Apache-2.0
"""Photos of any size as the input of a graph: what ``onea.data.decode.fit`` and Pillow do, in ONNX's own operators.

ONNX Runtime's antialiased resize of bytes follows Pillow's: the same filter in the same fixed point, one axis after the
other, rounded after each. Less than one pixel in a thousand differs, by one level of 255.
"""

from __future__ import annotations

from typing import Any

from onea.vit.onnx_files import OPSET, needed

# Cut what lies far outside the final crop, scale until the square is covered, cut its middle; all sizes are (height,
# width). Round takes halves to the even number, as Python does.
_FRONT = """
<ir_version: 8, opset_import: ["": {opset}]>
photos (uint8[batch, height, width, 3] images) => (float[batch, 3, {side}, {side}] squares)
<int64[2] photo_swap = {{1, 0}}, int64 photo_two = {{2}}, int64 photo_zero = {{0}}, int64[2] photo_rows = {{1, 2}},
 int64[1] photo_channels = {{3}}, int64 photo_side = {{{side}}}, int64[2] photo_planes = {{2, 3}},
 float photo_half = {{0.5}}, float photo_white = {{255}}>
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
  photo_batch = Shape <start = 0, end = 1> (images)
  photo_wanted = Concat <axis = 0> (photo_batch, photo_channels, photo_covering)
  photo_upright = Transpose <perm = [0, 3, 1, 2]> (photo_cut)
  photo_resized = Resize <mode = "cubic", antialias = 1, cubic_coeff_a = -0.5, exclude_outside = 1>
    (photo_upright, "", "", photo_wanted)
  photo_beyond = Sub (photo_covering, photo_side)
  photo_margins = Cast <to = 1> (photo_beyond)
  photo_margin = Mul (photo_margins, photo_half)
  photo_whole = Round (photo_margin)
  photo_first = Cast <to = 7> (photo_whole)
  photo_last = Add (photo_first, photo_side)
  photo_middle = Slice (photo_resized, photo_first, photo_last, photo_planes)
  photo_bytes = Cast <to = 1> (photo_middle)
  squares = Div (photo_bytes, photo_white)
}}
"""


def take_photos(model: Any, side: int) -> None:
    """Let a model that takes squares of pixels in 0..1 take photos instead: ``uint8 [N, height, width, 3]``, RGB."""
    front = needed("onnx.parser").parse_model(_FRONT.format(opset=OPSET, side=side)).graph
    body = model.graph
    for node in body.node:
        node.input[:] = ["squares" if name == "images" else name for name in node.input]
    nodes = [*front.node, *body.node]
    del body.node[:]
    body.node.extend(nodes)
    body.initializer.extend(front.initializer)
    body.input[0].CopyFrom(front.input[0])
