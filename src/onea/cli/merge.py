# SPDX-License-Identifier: Apache-2.0
"""``onea merge``: adapters on disk into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    context: typer.Context,
    inputs: Annotated[list[str], typer.Argument(help="Two or more .safetensors files, or PEFT LoRA folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Result: a .safetensors file or, for LoRA, a folder.")],
    classes: Annotated[str | None, typer.Option(help="Classes that each input knows, such as 40,5.")] = None,
    samples: Annotated[
        str | None, typer.Option(help="Samples that each was trained on; by default the same as --classes.")
    ] = None,
    operator: Annotated[
        str, typer.Option("--with", help="Operator: one-a, weighted-mean, ties, knots-ties, tsv, ...")
    ] = "one-a",
    rank: Annotated[int | None, typer.Option(help="Rank of a LoRA result; by default what it needs.")] = None,
) -> None:
    """Merge adapters from left to right. Options of the operator itself go last, after the inputs.

    The result comes with a card (OUT.merge.json, or merge.json in the folder) that says how it was made.
    """
    from onea.merging.files import merge_files, parse_counts
    from onea.options import parse_arguments

    words = [*inputs, *context.args]  # click takes unknown options for inputs, in the order given
    cut = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    card = merge_files(
        [Path(word) for word in words[:cut]],
        out,
        operator=operator,
        options=parse_arguments(words[cut:]),
        classes=parse_counts("classes", classes) if classes else None,
        samples=parse_counts("samples", samples) if samples else None,
        rank=rank,
    )
    print(f"merged {len(card['inputs'])} adapters with {operator}: {out}")
    if card["truncation_error"]:
        print(f"rank {card['rank']}, truncation error at most {card['truncation_error']['max']:.2g}")
