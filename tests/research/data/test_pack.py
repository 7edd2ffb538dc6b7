# SPDX-License-Identifier: Apache-2.0
"""Packing: lossless where possible, cached, atomic, with clear errors for unreadable files."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from onea.data.dataset import Split
from onea.data.decode import fit, read_image
from onea.data.file_checks import OnBad, map_threaded, sha256_of_files
from onea.errors import OneaError
from onea.files import cache_folder
from onea.research.data import pack as pack_module
from onea.research.data.pack import Packed, stored_shape


def pack(split: Split, size: int, shape: tuple[int, int] | None = None, **options: Any) -> Packed:
    return pack_module.pack(split, shape or stored_shape([split], size), **options)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def make_split(folder: Path, sizes: list[tuple[int, int]], suffix: str = "png") -> Split:
    """Images of these widths and heights; their classes alternate between 0 and 1."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{i}.{suffix}" for i in range(len(sizes))]
    for i, (file, (width, height)) in enumerate(zip(files, sizes, strict=True)):
        noise(width, height, i).save(file)
    return Split(labels=np.arange(len(files), dtype=np.int64) % 2, files=tuple(files))


def suffixes(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir()) if cache.exists() else []


def error_of(split: Split, cache: Path, on_bad: OnBad = "fail", names: list[str] | None = None) -> str:
    with pytest.raises(OneaError) as caught:
        pack(split, 8, cache=cache, on_bad=on_bad, class_names=names)
    assert suffixes(cache) == []
    return str(caught.value)


def break_file(split: Split, *rows: int) -> None:
    assert split.files is not None
    for row in rows:
        split.files[row].write_bytes(b"not an image")


def test_pixels_are_returned_unchanged(tmp_path: Path) -> None:
    pixels = np.zeros((3, 3, 32, 16), dtype=np.uint8)
    packed = pack(Split(np.zeros(3, np.int64), pixels=pixels), 224, cache=tmp_path / "c", on_bad="fail")
    assert packed.pixels is pixels
    assert packed.rows.tolist() == [0, 1, 2]
    assert packed.skipped == ()
    assert not (tmp_path / "c").exists()


def test_small_images_of_equal_size_are_stored_unchanged(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(16, 12)] * 5)
    packed = pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    assert packed.pixels.shape == (5, 3, 12, 16)
    assert isinstance(packed.pixels, np.memmap)
    assert not packed.pixels.flags.writeable
    assert packed.rows.dtype == np.int64
    for row in range(5):
        assert np.array_equal(packed.pixels[row].transpose(1, 2, 0), np.asarray(noise(16, 12, row)))


@pytest.mark.parametrize("sizes", [[(16, 12), (12, 16)], [(17, 12)] * 2, [(8, 8), (9, 9)]])
def test_images_of_other_sizes_become_squares(tmp_path: Path, sizes: list[tuple[int, int]]) -> None:
    split = make_split(tmp_path / "d", sizes)
    packed = pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    assert packed.pixels.shape == (2, 3, 8, 8)
    assert split.files is not None
    for row, file in enumerate(split.files):
        assert np.array_equal(packed.pixels[row], fit(read_image(file), 8, 8))


def test_both_splits_have_the_same_shape(tmp_path: Path) -> None:
    train = make_split(tmp_path / "train", [(10, 10)] * 3)
    test = make_split(tmp_path / "test", [(10, 10), (12, 10)])
    assert stored_shape([train], 8) == (10, 10)
    shape = stored_shape([train, test], 8)
    assert shape == (8, 8)
    for split in (train, test):
        packed = pack(split, 8, shape=shape, cache=tmp_path / "c", on_bad="fail")
        assert packed.pixels.shape == (len(split), 3, 8, 8)


def test_the_shape_of_splits_with_pixels() -> None:
    def pixels(height: int, width: int) -> Split:
        return Split(np.zeros(1, np.int64), pixels=np.zeros((1, 3, height, width), np.uint8))

    assert stored_shape([pixels(32, 30), pixels(32, 30)], 8) == (32, 30)
    with pytest.raises(OneaError, match=r"differ in size \(32 x 30 and 32 x 32\): give both the same"):
        stored_shape([pixels(32, 30), pixels(32, 32)], 8)


def test_headers_of_the_same_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, cache = make_split(tmp_path / "d", [(9, 9)] * 3), tmp_path / "c"
    assert stored_shape([split], 8, cache) == (9, 9)
    with monkeypatch.context() as patch:
        patch.setattr("onea.research.data.pack.image_size", lambda file: pytest.fail(f"reads {file} again"))
        assert stored_shape([split], 8, cache) == (9, 9)
    [index] = cache.glob("shape-*.json")
    index.write_text("broken")
    assert stored_shape([split], 8, cache) == (9, 9)
    assert split.files is not None
    noise(10, 9).save(split.files[0])
    assert stored_shape([split], 8, cache) == (8, 8)
    assert stored_shape([split], 16, cache) == (16, 16)


def test_a_shape_is_not_cached_while_a_file_is_unreadable(tmp_path: Path) -> None:
    split, cache = make_split(tmp_path / "d", [(9, 9), (9, 9), (50, 50)]), tmp_path / "c"
    assert split.files is not None
    content = split.files[2].read_bytes()
    break_file(split, 2)
    assert stored_shape([split], 20, cache) == (9, 9)
    assert not list(cache.glob("shape-*"))
    split.files[2].write_bytes(content)
    assert stored_shape([split], 20, cache) == (20, 20)


def test_absolute_paths_work_without_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = make_split(tmp_path / "d", [(9, 9)] * 2)
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert stored_shape([split], 8, tmp_path / "c") == (9, 9)
    assert len(pack(split, 8, cache=tmp_path / "c", on_bad="fail").rows) == 2


@pytest.mark.parametrize("count", [0, 1, 5, 300])
@pytest.mark.parametrize("threads", [None, 1, 3])
def test_results_come_in_order(count: int, threads: int | None) -> None:
    assert list(map_threaded(lambda item: -item, range(count), threads)) == [-item for item in range(count)]


def test_unreadable_files_do_not_affect_the_shape(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(9, 9)] * 3)
    break_file(split, 0)
    assert stored_shape([split], 8) == (9, 9)
    break_file(split, 1, 2)
    assert stored_shape([split], 8) == (8, 8)


def test_a_second_call_maps_the_cached_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 4)
    first = pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    assert suffixes(tmp_path / "c") == [".bin", ".json"]
    monkeypatch.setattr(pack_module, "read_image", None)
    second = pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    assert np.array_equal(first.pixels, second.pixels)


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 2)
    before = np.array(pack(split, 8, cache=tmp_path / "c", on_bad="fail").pixels)
    assert split.files is not None
    noise(20, 30, seed=9).save(split.files[1])
    os.utime(split.files[1], ns=(1, 1))
    after = pack(split, 8, cache=tmp_path / "c", on_bad="fail").pixels
    assert np.array_equal(before[0], after[0])
    assert not np.array_equal(before[1], after[1])


def test_an_edit_that_keeps_size_and_time_is_decoded_again(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(9, 9)] * 3, "bmp")
    assert split.files is not None
    before = pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    pixels, status = np.array(before.pixels), split.files[1].stat()
    noise(9, 9, seed=7).save(split.files[1])
    os.utime(split.files[1], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert split.files[1].stat().st_size == status.st_size
    after = pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    assert not np.array_equal(pixels[1], after.pixels[1])
    assert before.sha256 != after.sha256
    assert suffixes(tmp_path / "c") == [".bin", ".json"], "the outdated array is deleted"
    assert np.array_equal(pixels, before.pixels), "a mapped array stays valid"


def test_arrays_of_other_files_are_not_deleted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pack(make_split(tmp_path / name, [(9, 9)] * 3), 8, cache=tmp_path / "c", on_bad="fail")
    pack(make_split(tmp_path / "a", [(9, 9)] * 3), 8, cache=tmp_path / "c", on_bad="skip")
    assert suffixes(tmp_path / "c") == [".bin"] * 3 + [".json"] * 3


def test_the_index_holds_the_digest_of_the_pixels(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 40)
    break_file(split, 4)
    packed = pack(split, 8, cache=tmp_path / "c", on_bad="skip")
    assert packed.sha256 == hashlib.sha256(np.ascontiguousarray(packed.pixels).data).hexdigest()
    assert pack(split, 8, cache=tmp_path / "c", on_bad="skip").sha256 == packed.sha256
    assert pack(split, 8, cache=tmp_path / "other", on_bad="skip").sha256 == packed.sha256
    pixels = Split(np.zeros(1, np.int64), pixels=np.zeros((1, 3, 4, 4), np.uint8))
    assert pack(pixels, 8, cache=tmp_path / "c", on_bad="fail").sha256 == "", "the dataset's fingerprint has them"


def test_hash_of_files_depends_on_their_order(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(9, 9)] * 50)
    assert split.files is not None
    digest = sha256_of_files(split.files)
    assert digest == sha256_of_files(split.files)
    assert digest != sha256_of_files(split.files[::-1])
    split.files[3].unlink()
    assert digest != sha256_of_files(split.files)


def damage_pixels(cache: Path) -> None:
    (file,) = cache.glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])


def delete_pixels(cache: Path) -> None:
    next(cache.glob("*.bin")).unlink()


def delete_index(cache: Path) -> None:
    next(cache.glob("*.json")).unlink()


def truncate_index(cache: Path) -> None:
    (file,) = cache.glob("*.json")
    file.write_text(file.read_text()[:-5])


def change_index(cache: Path, **changes: object) -> None:
    (file,) = cache.glob("*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "damage",
    [
        damage_pixels,
        delete_pixels,
        delete_index,
        truncate_index,
        lambda cache: change_index(cache, rows=[0, 0, 1]),
        lambda cache: change_index(cache, rows=[0, 1, 3]),
        lambda cache: change_index(cache, rows=[[0], [1], [2]]),
        lambda cache: change_index(cache, rows="many"),
        lambda cache: change_index(cache, shape=[3, 3, 9, 9]),
        lambda cache: change_index(cache, skipped=["one"]),
        lambda cache: (
            file := next(cache.glob("*.json")),
            file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "sha256"})),
        ),
        lambda cache: next(cache.glob("*.json")).write_text("[]"),
        lambda cache: next(cache.glob("*.json")).write_bytes(b"\xff"),
    ],
)
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: object) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 3)
    before = np.array(pack(split, 8, cache=tmp_path / "c", on_bad="fail").pixels)
    damage(tmp_path / "c")  # type: ignore[operator]
    after = pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    assert np.array_equal(before, after.pixels)
    assert after.rows.tolist() == [0, 1, 2]
    assert suffixes(tmp_path / "c") == [".bin", ".json"]


def flip(file: Path, position: int = 100) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_a_changed_pixel_is_detected_and_an_unchanged_array_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, cache = make_split(tmp_path / "d", [(20, 30)] * 3), tmp_path / "c"
    before = np.array(pack(split, 8, cache=cache, on_bad="fail").pixels)
    (file,) = cache.glob("*.bin")
    flip(file)
    assert np.array_equal(pack(split, 8, cache=cache, on_bad="fail").pixels, before), "it is rebuilt"
    intact = file.read_bytes()
    file.unlink()
    file.write_bytes(intact)  # like a copy: the same pixels, which are read once
    with monkeypatch.context() as patch:
        patch.setattr(pack_module, "read_image", lambda *_, **__: pytest.fail("decodes"))
        pack(split, 8, cache=cache, on_bad="fail")
        patch.setattr(pack_module, "sha256_of", lambda *_: pytest.fail("reads"))
        assert np.array_equal(pack(split, 8, cache=cache, on_bad="fail").pixels, before)


def test_a_changed_shape_is_detected(tmp_path: Path) -> None:
    split, cache = make_split(tmp_path / "d", [(9, 9)] * 3), tmp_path / "c"
    assert stored_shape([split], 8, cache) == (9, 9)
    (index,) = cache.glob("shape-*.json")
    index.write_text(index.read_text().replace("  9", "  8"))
    assert stored_shape([split], 8, cache) == (9, 9)
    index.write_text("[8, 8]")
    assert stored_shape([split], 8, cache) == (9, 9)


def test_a_renamed_array_is_not_used(tmp_path: Path) -> None:
    """Its checksums are correct, but it contains other images."""
    caches = [tmp_path / "mine", tmp_path / "theirs"]
    mine, theirs = make_split(tmp_path / "d", [(9, 9)] * 3), make_split(tmp_path / "e", [(9, 9)] * 3)
    noise(9, 9, 77).save(theirs.files[0])  # type: ignore[index]
    expected = [
        np.array(pack(*each, cache=to, on_bad="fail").pixels)
        for each, to in zip([(mine, 8), (theirs, 8)], caches, strict=True)
    ]
    assert not np.array_equal(*expected)
    for suffix in ("bin", "json"):
        (target,), (source,) = caches[0].glob(f"*.{suffix}"), caches[1].glob(f"*.{suffix}")
        source.replace(target)
    assert np.array_equal(pack(mine, 8, cache=caches[0], on_bad="fail").pixels, expected[0])


def test_partial_files_after_a_kill_are_deleted(tmp_path: Path) -> None:
    split, cache = make_split(tmp_path / "d", [(9, 9)] * 3), tmp_path / "c"
    pack(split, 8, cache=cache, on_bad="fail")
    (file,) = cache.glob("*.bin")
    prefix = file.stem.rpartition("-")[0]
    names = (f"{file.stem}-ab.tmp", f".{file.stem}.json.7.partial", f"{prefix}.lock", f"{prefix}-{'0' * 24}.bin")
    for name in names:
        (cache / name).touch()
    (cache / "packed-other.bin.tmp").touch()
    pack(split, 8, cache=cache, on_bad="fail")
    assert suffixes(cache) == [".bin", ".json", ".tmp"]


def test_images_are_packed_by_only_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process waits for the first and then maps its array."""
    split, cache = make_split(tmp_path / "d", [(9, 9)] * 3), tmp_path / "c"
    started, may_continue, write = threading.Event(), threading.Event(), pack_module._write

    def slow(*arguments: object) -> object:
        started.set()
        assert may_continue.wait(60)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pack_module, "_write", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(pack, split, 8, cache=cache, on_bad="fail")
        assert started.wait(60)
        monkeypatch.setattr(pack_module, "_write", lambda *_: pytest.fail("packs"))
        second = pool.submit(pack, split, 8, cache=cache, on_bad="fail")
        may_continue.set()
        assert np.array_equal(first.result(60).pixels, second.result(60).pixels)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 9)
    break_file(split, 4)
    assert split.files is not None
    assert error_of(split, tmp_path / "c") == (
        f"1 of 9 images cannot be read ({split.files[4]}: it is not an image in a supported format): "
        'remove it or pass on_bad="skip".'
    )


def test_many_unreadable_files_are_grouped_by_reason(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 9)
    break_file(split, *range(1, 8))
    message = error_of(split, tmp_path / "c")
    assert message.startswith(f"7 of 9 images cannot be read ({tmp_path / 'd' / '1.png'}, ")
    assert message.endswith(
        f"{tmp_path / 'd' / '5.png'} and 2 more: it is not an image in a supported format): "
        'remove them or pass on_bad="skip".'
    )


def test_missing_files_are_unreadable(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 3)
    assert split.files is not None
    split.files[2].unlink()
    assert f"{split.files[2]}: there is no such file" in error_of(split, tmp_path / "c")


def test_unreadable_files_can_be_skipped(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 6)
    all_pixels = np.array(pack(split, 8, cache=tmp_path / "c", on_bad="skip").pixels)
    break_file(split, 1, 4)
    for _ in range(2):  # decoded, then from the cache
        packed = pack(split, 8, cache=tmp_path / "c", on_bad="skip")
        assert packed.rows.tolist() == [0, 2, 3, 5]
        assert np.array_equal(packed.pixels, all_pixels[[0, 2, 3, 5]])
        assert packed.skipped == tuple(
            f"{tmp_path / 'd' / name}: it is not an image in a supported format" for name in ("1.png", "4.png")
        )


def test_skipping_must_leave_images_of_every_class(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 4)
    break_file(split, 1, 3)
    assert error_of(split, tmp_path / "c", "skip", ["cat", "dog"]).startswith(
        f"No image of class 'dog' can be read ({tmp_path / 'd' / '1.png'}: it is not an image"
    )
    assert error_of(split, tmp_path / "c", "skip").startswith("No image of class 1 can be read")
    break_file(split, 0, 2)
    assert error_of(split, tmp_path / "c", "skip").startswith("No image of class 0 (and of 1 more) can be read")


def test_new_labels_on_a_cached_array_are_checked_too(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 4)
    break_file(split, 1)
    pack(split, 8, cache=tmp_path / "c", on_bad="skip")
    relabelled = Split(np.array([0, 1, 0, 0]), files=split.files)
    with pytest.raises(OneaError, match="No image of class 1 can be read"):
        pack(relabelled, 8, cache=tmp_path / "c", on_bad="skip")


def test_an_empty_split_packs_to_nothing(tmp_path: Path) -> None:
    packed = pack(Split(np.empty(0, np.int64), files=()), 8, cache=tmp_path, on_bad="fail")
    assert packed.pixels.shape == (0, 3, 8, 8)


def test_an_interrupted_pack_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, fit = make_split(tmp_path / "d", [(20, 30)] * 40), pack_module.fit
    count = itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if next(count) == 20:
            raise KeyboardInterrupt
        return fit(*arguments)

    monkeypatch.setattr(pack_module, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    assert suffixes(tmp_path / "c") == []


def test_missing_disk_space_is_reported_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 4)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda _: usage(100, 100, 0))
    assert error_of(split, tmp_path / "c") == (
        f"No space left in {tmp_path / 'c'}: needs 1 MB; free some or set ONEA_CACHE to another folder."
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["_decode_into", "index"])
def test_error_message_if_the_disk_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 4)

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    if step == "_decode_into":
        monkeypatch.setattr(pack_module, step, full)
    else:  # there is space for the pixels, but not for the index
        monkeypatch.setattr(os, "fsync", full)
    assert error_of(split, tmp_path / "c").startswith(f"No space left in {tmp_path / 'c'}: needs 1 MB; free some")


def test_error_message_for_a_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    split = make_split(tmp_path / "d", [(20, 30)] * 4)
    decode_into = pack_module._decode_into

    def into_full(_: object, *arguments: object) -> object:
        with Path("/dev/full").open("wb") as stream:
            return decode_into(stream, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pack_module, "_decode_into", into_full)
    assert error_of(split, tmp_path / "c").startswith(f"No space left in {tmp_path / 'c'}")


def test_error_message_for_an_unwritable_cache(tmp_path: Path) -> None:
    split = make_split(tmp_path / "d", [(20, 30)] * 2)
    (tmp_path / "c").touch()
    with pytest.raises(OneaError) as caught:
        pack(split, 8, cache=tmp_path / "c", on_bad="fail")
    assert str(caught.value) == (
        f"Cannot write to {tmp_path / 'c'} (File exists): make it writable or set ONEA_CACHE to another folder."
    )


def test_default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ONEA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "onea"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "onea"
    monkeypatch.setenv("ONEA_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


@settings(max_examples=15, deadline=None)
@given(bad=st.sets(st.integers(0, 39)))
def test_each_row_is_readable_or_skipped(tmp_path_factory: pytest.TempPathFactory, bad: set[int]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    split = Split(np.arange(40, dtype=np.int64) * 0, files=make_split(folder / "d", [(4, 4)] * 40, "bmp").files)
    break_file(split, *bad)
    if len(bad) == 40:
        error_of(split, folder / "c", "skip")
        return
    packed: Packed = pack(split, 8, cache=folder / "c", on_bad="skip")
    assert packed.rows.tolist() == [row for row in range(40) if row not in bad]
    assert len(packed.skipped) == len(bad)
    for row, pixels in zip(packed.rows, packed.pixels, strict=True):
        assert np.array_equal(pixels.transpose(1, 2, 0), np.asarray(noise(4, 4, int(row))))
