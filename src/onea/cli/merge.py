# SPDX-License-Identifier: Apache-2.0
"""``onea merge``: merge adapter files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    context: typer.Context,
    inputs: Annotated[list[str], typer.Argument(help="Two or more .safetensors files or PEFT LoRA folders.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Merged adapter: a .safetensors file or, for LoRA, a folder.")
    ],
    classes: Annotated[str | None, typer.Option(help="Number of classes of each input, such as 40,5.")] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Number of training samples of each input, such as 800,100.", show_default="as --classes"),
    ] = None,
    operator: Annotated[
        str, typer.Option("--with", help="Merging operator; `onea methods --operators` lists them.")
    ] = "one-a",
    rank: Annotated[
        int | None, typer.Option(help="Rank of the merged LoRA.", show_default="the rank of the merged update")
    ] = None,
) -> None:
    """Merge adapters, from left to right. Put options of the operator last, after the inputs.

    Also writes a JSON description of the merge: OUT.merge.json, or merge.json in the folder.
    """
    from onea.merging.files import merge_files, parse_counts
    from onea.options import parse_arguments

    words = [*inputs, *context.args]  # click parses unknown options as inputs, in the order of the command line
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    card = merge_files(
        [Path(word) for word in words[:end]],
        out,
        operator=operator,
        options=parse_arguments(words[end:]),
        classes=parse_counts("classes", classes) if classes else None,
        samples=parse_counts("samples", samples) if samples else None,
        rank=rank,
    )
    print(f"merged {len(card['inputs'])} adapters with {operator}: {out}")
    if card["truncation_error"]:
        print(f"rank {card['rank']}, truncation error at most {card['truncation_error']['max']:.2g}")
