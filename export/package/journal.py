"""The journal of an unfinished export: its parts, each with a digest of what it was made from.

::

    OUT.partial/
      package/   layer_000.xml  layer_000.bin ...     as they will be in the package
      parts/     layer_000.json ...                   a part's `PartRecord`, written when its files are whole

A part is finished if its record was made from the same source by the same version of the exporter, and its files
have the recorded hashes. An export can therefore continue after a kill, and several machines can share it: the files
and records of all parts, copied into one such directory, are enough to assemble the package.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from export.sources.source import read_json
from swarm.errors import DamagedFile, PackageError
from swarm.model.manifest import FileEntry, LayerSpec, check_files


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """`made_from` is a digest of source, settings and versions; `facts` are the part's entries in the manifest."""

    part: str
    made_from: str
    files: tuple[FileEntry, ...]
    facts: dict[str, Any]

    def spec(self) -> LayerSpec:
        """The facts of a layer. Raises PackageError if they do not describe one."""
        try:
            return LayerSpec(**self.facts)
        except TypeError as error:
            raise PackageError(f"the record of {self.part} does not describe a layer: export it again") from error


class Journal:
    """The directory of an unfinished export."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "package"
        self._records = folder / "parts"

    @classmethod
    def for_output(cls, out: Path) -> Journal:
        return cls(out.with_name(f"{out.name}.partial"))

    def create(self) -> None:
        self.package.mkdir(parents=True, exist_ok=True)
        self._records.mkdir(exist_ok=True)

    def has_records(self) -> bool:
        return self._records.is_dir() and any(self._records.glob("*.json"))

    def count(self) -> int:
        """How many parts have a record; their files are not checked."""
        return len(list(self._records.glob("*.json"))) if self._records.is_dir() else 0

    def finished(self, part: str, made_from: str) -> PartRecord | None:
        """The record of a finished part, else None."""
        record = self._read(part)
        if record is None or record.made_from != made_from:
            return None
        try:
            check_files(self.package, record.files)
        except DamagedFile:
            return None
        return record

    def record(self, record: PartRecord) -> None:
        """Record that a part's files are complete."""
        path = self._records / f"{record.part}.json"
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(asdict(record), sort_keys=True, indent=1))
        os.replace(unfinished, path)

    def _read(self, part: str) -> PartRecord | None:
        try:
            plain = read_json(self._records / f"{part}.json")
            if not plain:
                return None
            return PartRecord(
                part=part,
                made_from=str(plain["made_from"]),
                files=tuple(FileEntry(**entry) for entry in plain["files"]),
                facts=dict(plain["facts"]),
            )
        except (DamagedFile, PackageError, KeyError, TypeError, ValueError):
            return None  # An incomplete or foreign file counts as no record.
