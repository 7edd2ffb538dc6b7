# SPDX-License-Identifier: Apache-2.0
"""Speed-up of FP8 over bfloat16 for each matrix product of a ViT-B/16 block on a GPU.

    python benchmarks/speed/fp8_products.py --out fp8-products.csv

The time of conversion to FP8 is not included: the result is an upper bound. Each product is recorded twenty times as
one CUDA graph, without launch overhead; the result is the median of seven replays.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from cuda_timing import microseconds
from torch.nn import functional as F

from onea.vit.fp8 import quantise_rows, scaled_matmul

TOKENS = 197
WIDTHS = ((768, 2304), (768, 768), (768, 3072), (3072, 768), (2304, 768))  # input and output widths
REPEATS, REPLAYS = 20, 7


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256])
    arguments = parser.parse_args()
    with arguments.out.open("w", newline="") as file, torch.no_grad():
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("rows", "inputs", "outputs", "bf16_us", "fp8_us", "ratio"))
        for rows in (batch * TOKENS for batch in arguments.batches):
            for inputs, outputs in WIDTHS:
                x, weights = (torch.randn(size, inputs, device="cuda").bfloat16() for size in (rows, outputs))
                bias = torch.randn(outputs, device="cuda").bfloat16()
                quantised = (*quantise_rows(x), *quantise_rows(weights), bias)
                # The lambdas are called before the next turn of the loop.
                bf16 = microseconds(lambda: F.linear(x, weights, bias), REPEATS, REPLAYS)  # noqa: B023
                fp8 = microseconds(lambda: scaled_matmul(*quantised), REPEATS, REPLAYS)  # noqa: B023
                table.writerow((rows, inputs, outputs, f"{bf16:.1f}", f"{fp8:.1f}", f"{bf16 / fp8:.2f}"))


if __name__ == "__main__":
    main()
