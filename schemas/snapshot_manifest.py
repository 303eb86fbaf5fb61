"""The manifest of a snapshot: its cut, its tables, and every file with size and checksum. No I/O.

A manifest is JSON with sorted keys and an indentation of two spaces, so equal manifests are equal bytes. Its own
checksum is the field `crc32c`, over the same JSON without that field. `docs/snapshots.md` has an example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crc32c import crc32c

from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "ShardPart",
    "SnapshotFile",
    "SnapshotManifest",
    "check_snapshot_name",
    "shard_folder",
]

# ON DISK: never renumber, never rename a field.
FORMAT_VERSION = 3
MANIFEST_NAME = "manifest.json"
_FORMAT = "headrace-snapshot"
# The first character is a letter or digit: a name that starts with a dot is not published.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]+")


def check_snapshot_name(name: str) -> str:
    """Return a snapshot's name if it is valid.

    Raises:
        RequestError: It is not.
    """
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"snapshot name {name!r}: 1 to 100 letters, digits, '.', '_' or '-', the first a letter or digit"
        )
    return name


def shard_folder(shard: int) -> str:
    """Return the name of a shard's folder in a snapshot. ON DISK."""
    return f"shard-{shard:04d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotFile:
    """One file of a shard's part.

    Attributes:
        name: Name in the shard's folder.
        size_bytes: Length.
        crc32c: Checksum of the whole file.
    """

    name: str
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPart:
    """One shard's copy: its RocksDB with exactly the batches up to `seq`.

    Attributes:
        shard: Index of the shard.
        server_id: Identity of the data directory.
        seq: Last record of the update log that is included; a follower continues at `seq + 1`.
        epoch: Epoch of the run whose cut it is; 0 for none.
        step: Step of the consistent cut; -1 for a cut at no step.
        tables: Registered tables.
        files: All files of the shard's folder, by name.
        mark: Nonce of record `seq` (`UpdateLog.nonce_of`); None if not known. ON DISK under this name.
        term: Term of the copy of the shard that made it; 0 where there is none. ON DISK under this name.
    """

    shard: int
    server_id: str
    seq: int
    epoch: int
    step: int
    tables: tuple[TableSpec, ...]
    files: tuple[SnapshotFile, ...]
    mark: int | None = None
    term: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        values = {
            "shard": self.shard,
            "server_id": self.server_id,
            "seq": self.seq,
            "epoch": self.epoch,
            "step": self.step,
            "tables": [_spec_to_json(spec) for spec in self.tables],
            "files": [{"name": f.name, "size_bytes": f.size_bytes, "crc32c": f.crc32c} for f in self.files],
        }
        values |= {} if self.mark is None else {"mark": self.mark}
        return values | {"term": self.term} if self.term else values

    @classmethod
    def from_json(cls, values: Any) -> ShardPart:
        """Return the part of values made by `to_json`.

        Raises:
            CorruptionError: They are something else.
        """
        try:
            files = tuple(SnapshotFile(**file) for file in values["files"])
            if not all(_is_count(file.size_bytes, 2**63) and _is_count(file.crc32c, 2**32) for file in files):
                raise ValueError("a size or a checksum of a file is no number")
            part = cls(
                **{name: values[name] for name in ("shard", "server_id", "seq", "epoch", "step")},
                tables=tuple(_spec_from_json(spec) for spec in values["tables"]),
                files=files,
                mark=values.get("mark"),
                term=values.get("term", 0),
            )
            if any(not _FILE_NAME.fullmatch(file.name) or file.name in (".", "..") for file in files):
                raise ValueError("a file name is invalid")
            numbers = part.shard, part.seq, part.epoch, part.step, 0 if part.mark is None else part.mark, part.term
            if not all(type(n) is int and -(2**63) <= n < 2**63 for n in numbers):
                raise ValueError("a field is not an integer of 64 bits")
            if type(part.server_id) is not str:
                raise ValueError("the server's identity is no text")
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError, RequestError) as exc:
            raise CorruptionError(f"not a shard's part of a snapshot: {exc}") from exc
        return part

    def encode(self) -> str:
        """Return the part as JSON text."""
        return json.dumps(self.to_json())

    @classmethod
    def decode(cls, text: str) -> ShardPart:
        """Return the part of a text made by `encode`.

        Raises:
            CorruptionError: The text is something else.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise CorruptionError(f"not a shard's part of a snapshot: {exc}") from exc
        return cls.from_json(values)

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotManifest:
    """The contents of a snapshot.

    Attributes:
        name: Name of the snapshot.
        created_us: Wall clock, microseconds since 1970.
        parts: One per shard, by index; all of one server, epoch and step.
        lease_s: The server removes the snapshot when nobody has read it for this long, seconds; 0 keeps it.
    """

    name: str
    created_us: int
    parts: tuple[ShardPart, ...]
    lease_s: int = 0

    def __post_init__(self) -> None:
        """Check that the parts belong to one cut.

        Raises:
            CorruptionError: They do not.
        """
        if not self.parts or [part.shard for part in self.parts] != list(range(len(self.parts))):
            raise CorruptionError(f"snapshot {self.name}: a shard is missing")
        if len({(part.server_id, part.epoch, part.step) for part in self.parts}) != 1:
            raise CorruptionError(f"snapshot {self.name}: its shards differ in store, epoch or step")

    @property
    def server_id(self) -> str:
        """Identity of the data directory."""
        return self.parts[0].server_id

    @property
    def epoch(self) -> int:
        """Epoch of the run whose cut it is; 0 for none."""
        return self.parts[0].epoch

    @property
    def step(self) -> int:
        """Step of the cut; -1 for a cut at no step."""
        return self.parts[0].step

    @property
    def size_bytes(self) -> int:
        """Total size of all files except the manifest."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def tables(self) -> dict[str, TableSpec]:
        """All tables of all shards, by fqn; the larger spec of one that has not grown at every shard."""
        specs = sorted((spec for part in self.parts for spec in part.tables), key=lambda spec: spec.num_rows)
        return {spec.fqn: spec for spec in specs}

    def files(self) -> dict[str, SnapshotFile]:
        """Return all files by their paths in the snapshot, such as `shard-0000/CURRENT`."""
        return {f"{shard_folder(part.shard)}/{file.name}": file for part in self.parts for file in part.files}

    def encode(self) -> bytes:
        """Return the manifest's bytes."""
        values = {
            "format": _FORMAT,
            "format_version": FORMAT_VERSION,
            "name": self.name,
            "created_us": self.created_us,
            "shards": [part.to_json() for part in self.parts],
        }
        if self.lease_s:
            values["lease_s"] = self.lease_s
        return _dump(values | {"crc32c": crc32c(_dump(values))})

    @classmethod
    def decode(cls, data: bytes) -> SnapshotManifest:
        """Return the manifest of bytes made by `encode`.

        Raises:
            CorruptionError: They are damaged, or have another format.
        """
        try:
            values = json.loads(data)
            found = values.pop("crc32c")
            is_known = values["format"] == _FORMAT and values["format_version"] == FORMAT_VERSION
            is_whole = crc32c(_dump(values)) == found
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise CorruptionError(f"not a snapshot manifest: {exc}") from exc
        if not is_known:
            raise CorruptionError(f"not a snapshot manifest of version {FORMAT_VERSION}")
        if not is_whole:
            raise CorruptionError("the snapshot manifest's checksum is wrong")
        try:
            name, created_us, shards = values["name"], values["created_us"], values["shards"]
            check_snapshot_name(name)
            lease_s = values.get("lease_s", 0)
            if not _is_count(lease_s, 2**63):
                raise ValueError(f"lease_s is {lease_s!r}")
            if not _is_count(created_us, 2**63):
                raise ValueError(f"created_us is {created_us!r}")
            if type(shards) is not list:
                raise ValueError("its shards are no list")
        except (KeyError, TypeError, ValueError, RequestError) as exc:
            raise CorruptionError(f"not a snapshot manifest: {exc}") from exc
        parts = tuple(ShardPart.from_json(shard) for shard in shards)
        return cls(name=name, created_us=created_us, parts=parts, lease_s=lease_s)


def _is_count(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end


def _dump(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"


def _spec_to_json(spec: TableSpec) -> dict[str, Any]:
    states: Sequence[StateSpec] = spec.states
    values = {
        "fqn": spec.fqn,
        "num_rows": spec.num_rows,
        "dim": spec.dim,
        "dtype": spec.dtype.name,
        "states": [{"name": s.name, "kind": s.kind.name, "dtype": s.dtype.name, "width": s.width} for s in states],
        "has_identities": spec.has_identities,
        "fingerprint": spec.fingerprint,
    }
    values |= {} if spec.shape is None else {"shape": list(spec.shape)}
    return values if spec.uses is None else values | {"uses": spec.uses}


def _spec_from_json(values: dict[str, Any]) -> TableSpec:
    states = values["states"]
    numbers = [values["num_rows"], values["dim"], *values.get("shape", ()), *(state["width"] for state in states)]
    if not all(type(n) is int for n in numbers):
        raise ValueError(f"table {values['fqn']!r} has sizes that are no integers")
    if type(values["has_identities"]) is not bool or type(values.get("uses", "")) is not str:
        raise ValueError(f"table {values['fqn']!r} has a field of a wrong type")
    spec = TableSpec(
        fqn=values["fqn"],
        num_rows=values["num_rows"],
        dim=values["dim"],
        dtype=DType[values["dtype"]],
        states=tuple(
            StateSpec(name=s["name"], kind=StateKind[s["kind"]], dtype=DType[s["dtype"]], width=s["width"])
            for s in states
        ),
        has_identities=values["has_identities"],
        shape=tuple(values["shape"]) if "shape" in values else None,
        uses=values.get("uses"),
    )
    if spec.fingerprint != values["fingerprint"]:
        raise ValueError(f"table {spec.fqn!r} has another fingerprint")
    return spec
