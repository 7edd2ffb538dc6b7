# SPDX-License-Identifier: Apache-2.0
"""Records that gzip has compressed are read like others; whatever is wrong with one is told in a sentence."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from onea.errors import OneaError
from onea.files import gunzip
from onea.research.record import FILES, NAME, find_record_files, read_record, record_path, write_record
from onea.research.report.records import load_records
from onea.research.runs.config import make_config
from onea.research.runs.grid import RecordStore
from onea.research.runs.runner import run

PLAIN, COMPRESSED = FILES


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_vit, tiny_images) -> dict[str, object]:
    """Values and folder of a run that is over."""
    values = {"method": "simplecil", "data": f"folder:{tiny_images}", "backbone": tiny_vit, "sizes": "3,1,2"}
    values |= {"device": "cpu", "precision": "fp32", "threads": 1}
    store = RecordStore(tmp_path_factory.mktemp("store"))
    run(make_config(values), store.folder(make_config(values)))
    return {"values": values, "store": store}


@pytest.fixture
def kept(finished, tmp_path) -> tuple[RecordStore, Path, dict]:
    """A store of one's own with that run, whose record is compressed, and what it was."""
    config = make_config(finished["values"])
    record = read_record(finished["store"].folder(config))
    store = RecordStore(tmp_path)
    place = store.folder(config)
    place.mkdir()
    (place / COMPRESSED).write_bytes(gzip.compress((finished["store"].folder(config) / NAME).read_bytes(), mtime=0))
    return store, place, record


def test_a_compressed_record_is_read_like_a_plain_one(kept, finished):
    store, place, record = kept
    config = make_config(finished["values"])
    assert read_record(place) == record
    assert store.find(config) == record
    assert list(store.records()) == [record]
    assert load_records(store.root) == load_records(place / COMPRESSED) == [record]
    before = (place / COMPRESSED).read_bytes()
    assert run(config, place) == record, "a finished run is not repeated"
    assert {path.name for path in place.iterdir()} <= {COMPRESSED, "lock"}
    assert (place / COMPRESSED).read_bytes() == before


def test_a_plain_record_replaces_a_compressed_one(kept):
    store, place, record = kept
    (place / PLAIN).write_text("a newer one")
    assert record_path(place) == place / PLAIN
    assert find_record_files(store.root) == [place / PLAIN], "and none twice"
    write_record(place, record)
    assert [path.name for path in place.iterdir()] == [PLAIN]
    assert read_record(place) == record


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:40], lambda raw: b"{}", lambda raw: b""])
def test_a_damaged_compressed_record_is_refused(damage, kept):
    store, place, _ = kept
    file = place / COMPRESSED
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(OneaError, match=r"record\.json\.gz is damaged \(.*\); restore it from a copy"):
        load_records(store.root)


def test_flipped_bits_are_detected(kept):
    """gzip has a checksum of its own, and the record another."""
    _, place, record = kept
    file = place / COMPRESSED
    whole = file.read_bytes()
    for position in range(10, len(whole), 97):  # the first ten bytes say when and where it was compressed
        changed = bytearray(whole)
        changed[position] ^= 4
        file.write_bytes(changed)
        with pytest.raises(OneaError, match="is damaged"):
            read_record(place)
    file.write_bytes(whole)
    assert read_record(place) == record


def test_a_decompression_bomb_is_refused():
    assert gunzip(gzip.compress(b"x" * 1000), max_bytes=1000) == b"x" * 1000
    with pytest.raises(ValueError, match="more than 999 bytes"):
        gunzip(gzip.compress(b"x" * 1000), max_bytes=999)
