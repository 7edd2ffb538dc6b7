# SPDX-License-Identifier: Apache-2.0
"""Records compressed by gzip are read like others, and damaged ones are refused with one sentence."""

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
def finished_run(tmp_path_factory, tiny_vit, tiny_images) -> dict[str, object]:
    """Configuration values of a finished run, and its store."""
    values = {"method": "simplecil", "data": f"folder:{tiny_images}", "backbone": tiny_vit, "sizes": "3,1,2"}
    values |= {"device": "cpu", "precision": "fp32", "threads": 1}
    store = RecordStore(tmp_path_factory.mktemp("store"))
    run(make_config(values), store.folder(make_config(values)))
    return {"values": values, "store": store}


@pytest.fixture
def compressed_run(finished_run, tmp_path) -> tuple[RecordStore, Path, dict]:
    """A new store with that run, whose record is compressed; the store, the folder of the run and the record."""
    config = make_config(finished_run["values"])
    record = read_record(finished_run["store"].folder(config))
    store = RecordStore(tmp_path)
    folder = store.folder(config)
    folder.mkdir()
    (folder / COMPRESSED).write_bytes(
        gzip.compress((finished_run["store"].folder(config) / NAME).read_bytes(), mtime=0)
    )
    return store, folder, record


def test_a_compressed_record_is_read_like_a_plain_one(compressed_run, finished_run):
    store, folder, record = compressed_run
    config = make_config(finished_run["values"])
    assert read_record(folder) == record
    assert store.find(config) == record
    assert list(store.records()) == [record]
    assert load_records(store.root) == load_records(folder / COMPRESSED) == [record]
    before = (folder / COMPRESSED).read_bytes()
    assert run(config, folder) == record, "a finished run is not repeated"
    assert {path.name for path in folder.iterdir()} <= {COMPRESSED, "lock"}
    assert (folder / COMPRESSED).read_bytes() == before


def test_a_plain_record_replaces_a_compressed_one(compressed_run):
    store, folder, record = compressed_run
    (folder / PLAIN).write_text("a newer record")
    assert record_path(folder) == folder / PLAIN
    assert find_record_files(store.root) == [folder / PLAIN], "each run is listed once"
    write_record(folder, record)
    assert [path.name for path in folder.iterdir()] == [PLAIN]
    assert read_record(folder) == record


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:40], lambda raw: b"{}", lambda raw: b""])
def test_a_damaged_compressed_record_is_refused(damage, compressed_run):
    store, folder, _ = compressed_run
    file = folder / COMPRESSED
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(OneaError, match=r"record\.json\.gz is damaged \(.*\); restore it from a backup"):
        load_records(store.root)


def test_flipped_bits_are_detected(compressed_run):
    """Both gzip and the record have a checksum."""
    _, folder, record = compressed_run
    file = folder / COMPRESSED
    intact = file.read_bytes()
    for position in range(10, len(intact), 97):  # the first ten bytes are the header of gzip
        changed = bytearray(intact)
        changed[position] ^= 4
        file.write_bytes(changed)
        with pytest.raises(OneaError, match="is damaged"):
            read_record(folder)
    file.write_bytes(intact)
    assert read_record(folder) == record


def test_a_decompression_bomb_is_refused():
    assert gunzip(gzip.compress(b"x" * 1000), max_bytes=1000) == b"x" * 1000
    with pytest.raises(ValueError, match="more than 999 bytes"):
        gunzip(gzip.compress(b"x" * 1000), max_bytes=999)
