# SPDX-License-Identifier: Apache-2.0
"""The folders that a model was taught from, if the user wants them to be remembered.

They are in a file of the model folder that is read only by ``onea refresh``: exports, uploads, the model card and the
service neither read nor send it.
"""

from __future__ import annotations

from pathlib import Path

from onea.errors import OneaError
from onea.files import (
    DamagedFile,
    dump_with_checksum,
    parse_json_object,
    read_regular,
    verify_checksum,
    write_atomically,
)
from onea.model.storage.layout import SOURCES

_MAX_BYTES = 2**24


def read_sources(path: Path) -> list[Path]:
    """The remembered folders, in the order in which they were taught; none if they are not remembered."""
    file = path / SOURCES
    if not file.exists():
        return []
    try:
        values = parse_json_object(read_regular(file, _MAX_BYTES))
        verify_checksum(values)
        folders = values.get("folders")
        if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
            raise DamagedFile("it lists no folders")
    except DamagedFile as reason:
        raise OneaError(f"{file} is damaged ({reason}); delete it, and name the folders in the command.") from reason
    return [Path(folder) for folder in folders]


def remember_source(path: Path, folder: Path) -> None:
    """Add a folder to the remembered ones. The lock of the model folder must be held."""
    folders = [str(source) for source in read_sources(path)]
    if (added := str(folder.resolve())) not in folders:
        write_atomically(path / SOURCES, dump_with_checksum({"folders": [*folders, added]}))
