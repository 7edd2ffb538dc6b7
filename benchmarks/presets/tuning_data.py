# SPDX-License-Identifier: Apache-2.0
"""The images of the trials of tune_presets.py in a few files, which can be copied to another machine.

    python benchmarks/presets/tuning_data.py cifar100=FOLDER cub200=FOLDER --draws 3 --to DRAWN

Each file, ``NAME-DRAW.npz``, is the beginning of a stream: the encoded training images of its classes, some of them
held out. Test images are never read. Streams are drawn until the first task has at least ten classes.
"""

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onea.data.dataset import Split
from onea.files import write_atomically
from onea.research.data.pack import pack, stored_shape
from onea.research.data.sources import load_dataset
from onea.research.streams import make_stream
from onea.schedules import DatasetSize

FIRST_SEED = 100  # the streams of the results have small seeds
SHARE = (0.25, 0.36)  # fraction of all classes in a trial
CLASSES_OF_TASK = 10  # on average in the whole stream


@dataclass(frozen=True)
class Material:
    """The images of a dataset's trials, in a file that each worker reads once."""

    file: Path
    sizes: tuple[int, ...]
    train_images: int
    held_out_images: int
    seed: int
    mirror: bool

    @property
    def shape(self) -> DatasetSize:
        """The input of the default preset's rule."""
        return DatasetSize(self.train_images, sum(self.sizes), len(self.sizes))


def draw_stream(classes: int, draw: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Seed, class order and sizes of the first tasks of a step-imbalanced stream that begins with at least ten classes.

    If there are three tasks or more, one of them is small, because methods are tuned for uneven streams.
    """
    tasks = max(2, round(classes / CLASSES_OF_TASK))
    few, first = max(2, round(0.4 * tasks)), min(CLASSES_OF_TASK, classes // 4)
    for seed in count(FIRST_SEED):
        stream = make_stream(classes=classes, tasks=tasks, gamma=0.01, seed=seed)
        sizes = stream.sizes[:few]
        uneven = few < 3 or min(sizes) <= 3
        if sizes[0] >= first and uneven and (few < 3 or SHARE[0] <= sum(sizes) / classes <= SHARE[1]):
            draw -= 1
            if draw < 0:
                return seed, stream.class_order[: sum(sizes)], sizes
    raise AssertionError("the seeds never end")


def draw_images(path: str, draw: int, per_class: int, holdout: float, max_held_out: int, file: Path) -> int:
    """Write the file of one draw; returns the number of its images."""
    dataset = load_dataset(f"folder:{path}")
    seed, order, sizes = draw_stream(len(dataset.classes), draw)
    numbers = np.random.default_rng(seed)
    images, labels, held = [], [], []
    for position, label in enumerate(order):
        own = numbers.permutation(np.flatnonzero(dataset.train.labels == label))
        out = min(max(1, round(holdout * len(own))), max_held_out)
        chosen = own[: out + per_class]
        images += [(dataset.train.files or ())[row].read_bytes() for row in chosen]
        labels += [position] * len(chosen)
        held += [True] * out + [False] * (len(chosen) - out)
    buffer = io.BytesIO()
    np.savez(
        buffer,
        images=np.frombuffer(b"".join(images), np.uint8),
        offsets=np.cumsum([0, *map(len, images)]),
        labels=np.array(labels),
        held=np.array(held),
        sizes=np.array(sizes),
        seed=np.array(seed),
        mirror=np.array(dataset.mirror),
    )
    write_atomically(file, buffer.getvalue())
    return len(labels)


def draws_in(folder: Path) -> dict[tuple[str, int], Path]:
    """The files of a folder by dataset and draw."""
    named = {file: file.stem.rpartition("-") for file in sorted(folder.glob("*-*.npz"))}
    return {(name, int(draw)): file for file, (name, _, draw) in named.items()}


def material_of(file: Path, stored_size: int, place: Path) -> Material:
    """The images of a draw, decoded once for all workers."""
    with np.load(file) as drawn:
        blob, offsets, labels, held = (drawn[name] for name in ("images", "offsets", "labels", "held"))
        sizes, seed, mirror = drawn["sizes"].tolist(), int(drawn["seed"]), bool(drawn["mirror"])
    folder = place / f"files-{file.stem}"
    folder.mkdir(exist_ok=True)
    files = tuple(folder / f"{row:06d}.webp" for row in range(len(labels)))  # of any format
    for path, start, stop in zip(files, offsets[:-1], offsets[1:], strict=True):
        path.write_bytes(blob[start:stop].tobytes())
    split = Split(labels, files)
    pixels: npt.NDArray[np.uint8] = pack(split, stored_shape([split], stored_size), cache=place, on_bad="fail").pixels
    ready = place / file.name
    np.savez(ready, pixels=pixels, labels=labels, held=held)
    out = int(held.sum())
    return Material(ready, tuple(sizes), len(held) - out, out, seed, mirror)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="NAME=FOLDER for each dataset")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=1, help="number of streams per dataset")
    parser.add_argument("--per-class", type=int, default=60, help="maximum number of training images per class")
    parser.add_argument("--holdout", type=float, default=0.25, help="fraction of held-out images per class")
    parser.add_argument("--most-held-out", type=int, default=40, help="maximum number of held-out images per class")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name, _, path in (pair.partition("=") for pair in arguments.data):
        for draw in range(arguments.draws):
            file = arguments.to / f"{name}-{draw}.npz"
            total = draw_images(path, draw, arguments.per_class, arguments.holdout, arguments.most_held_out, file)
            print(f"{file}: {total} images, {file.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
