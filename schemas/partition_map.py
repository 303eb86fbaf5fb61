"""The partition map: which shard owns each partition of the rows, and in which version of that. No I/O.

A row's partition is its hash (`schemas/routing.py`) modulo P. P is fixed when a server is made. So is the number of
shards N that it has then, of which P is a multiple. At first partition p belongs to shard p modulo N, and because
(hash mod P) mod N = hash mod N, stores from before partitions have their rows where this map says.

Only the owner of a partition can give it away, and then the partition's version rises by one. So of two entries the one
with the higher version is right, and maps may be merged in any order. There is no version of the whole map.

    bytes of a map                                               all little-endian
    byte  0  u8 format version, 3 zero bytes
          4  u32 P
          8  u32 N
         12  u32 number of runs; 0 if no partition has moved, and then the map ends here
         16  ceil(P / 8) bytes: bit p is set if partition p has moved, lowest bit first
          …  u32 per run: a version; u32 per run: how many of the moved partitions, in order, have it
          …  u16 per moved partition: its owner

Equal maps have equal bytes. A map of 16,384 partitions has at most 163 KiB, and 13 KiB when a third of them moved once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ProtocolError, RequestError
from headrace.schemas.routing import hashes_of_rows, shards_of_rows

__all__ = ["MAX_OWNER", "MAX_PARTITIONS", "MAX_VERSION", "PartitionMap", "default_num_partitions"]

# ON DISK and ON THE WIRE: never renumber.
_FORMAT_VERSION = 1
_HEADER = struct.Struct("<B3xIII")
MAX_PARTITIONS = 2**16
"""The most partitions of a map."""
MAX_OWNER = 2**16 - 1
"""The highest number of a shard that a map can hold."""
MAX_VERSION = 2**32 - 1
"""The highest version of a partition."""

# ON DISK, in effect: a directory without a number of its own has this one.
_LEAST_DEFAULT = 1024

_Ids = npt.NDArray[np.int64]


def default_num_partitions(num_shards: int) -> int:
    """Return P of a server that is made with `num_shards` shards: that times a power of two, the least ≥ 1024."""
    num_partitions = num_shards
    while num_partitions < _LEAST_DEFAULT:
        num_partitions *= 2
    return num_partitions


@dataclass(frozen=True, eq=False, slots=True)
class PartitionMap:
    """A map; nobody changes it, a newer one replaces it. Its arrays are read-only.

    Attributes:
        first_shards: N, the number of shards when the server was made, ≥ 1.
        versions: int64[P]: how often each partition has moved.
        owners: int64[P]: the shard that has each partition.
        is_first: No partition has moved. Then `shards_of_rows` with N shards routes as this map does.
        num_shards: One more than the highest owner, and at least 1: the length of a list by shard.
    """

    first_shards: int
    versions: _Ids
    owners: _Ids
    is_first: bool = field(init=False)
    num_shards: int = field(init=False)

    def __post_init__(self) -> None:
        num_partitions = self.versions.size
        if not 1 <= self.first_shards <= num_partitions <= MAX_PARTITIONS or num_partitions % self.first_shards:
            raise RequestError(
                f"{num_partitions} partitions of {self.first_shards} shards: a multiple, at most {MAX_PARTITIONS}"
            )
        if self.owners.shape != self.versions.shape:
            raise RequestError(f"{self.owners.size} owners of {num_partitions} partitions")
        for array, most in ((self.versions, MAX_VERSION), (self.owners, MAX_OWNER)):
            if array.min() < 0 or array.max() > most:
                raise RequestError(f"a version or an owner of a partition is not 0 to {most}")
            array.flags.writeable = False
        object.__setattr__(self, "is_first", not self.versions.any())
        object.__setattr__(self, "num_shards", int(self.owners.max()) + 1)

    @classmethod
    def first(cls, num_shards: int, num_partitions: int | None = None) -> PartitionMap:
        """Return the map of a server that is made with `num_shards` shards; without P, with the default one.

        Raises:
            RequestError: P is no multiple of the shards, or too large.
        """
        num_partitions = num_partitions or default_num_partitions(num_shards)
        return cls(num_shards, np.zeros(num_partitions, np.int64), _first_owners(num_shards, num_partitions))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PartitionMap):
            return NotImplemented
        return (
            self.first_shards == other.first_shards
            and np.array_equal(self.versions, other.versions)
            and np.array_equal(self.owners, other.owners)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_partitions(self) -> int:
        """P."""
        return int(self.versions.size)

    def partitions_of_rows(self, seed: int, row_ids: _Ids) -> _Ids:
        """Return the partition of each row, int64[n], 0 to P - 1.

        Args:
            seed: `TableSpec.seed` of the table.
            row_ids: int64[n], ≥ 0.
        """
        return (hashes_of_rows(seed, row_ids) % np.uint64(self.num_partitions)).view(np.int64)

    def shards_of_rows(self, seed: int, row_ids: _Ids) -> _Ids:
        """Return the shard of each row, int64[n], 0 to `num_shards` - 1; arguments as in `partitions_of_rows`."""
        if self.is_first:
            return shards_of_rows(seed, row_ids, self.first_shards)
        return self.owners[self.partitions_of_rows(seed, row_ids)]

    def partitions_of(self, shard: int) -> _Ids:
        """Return the partitions that a shard owns, int64[k], ascending."""
        return np.flatnonzero(self.owners == shard)

    def moved(self, partitions: npt.ArrayLike, versions: npt.ArrayLike, owner: int) -> PartitionMap:
        """Return the map with entries for some partitions, if they are newer; this map if none is.

        Args:
            partitions: int64[k], 0 to P - 1, each at most once.
            versions: int64[k]: their versions under the new owner.
            owner: The shard that has them.

        Raises:
            RequestError: A partition, a version or the owner is out of range.
        """
        at, new = np.asarray(partitions, np.int64), np.asarray(versions, np.int64)
        if at.shape != new.shape or (at.size and not 0 <= at.min() <= at.max() < self.num_partitions):
            raise RequestError(f"{at.size} partitions with {new.size} versions, of {self.num_partitions}: out of range")
        all_versions, all_owners = self.versions.copy(), self.owners.copy()
        all_versions[at], all_owners[at] = new, owner
        return self.merged(PartitionMap(self.first_shards, all_versions, all_owners))

    def merged(self, other: PartitionMap) -> PartitionMap:
        """Return the map with the newer entry of each partition, from any order of merges the same.

        This map itself is returned if the other one has nothing newer. Owners never give a version to two shards; of
        such entries, which damage or an old copy of a shard could make, the higher shard counts for everybody.

        Raises:
            RequestError: The other map is of a server with other partitions.
        """
        if (other.first_shards, other.num_partitions) != (self.first_shards, self.num_partitions):
            raise RequestError(
                f"a map of {other.num_partitions} partitions and {other.first_shards} first shards; "
                f"this server has {self.num_partitions} and {self.first_shards}"
            )
        is_newer = (other.versions > self.versions) | ((other.versions == self.versions) & (other.owners > self.owners))
        if not is_newer.any():
            return self
        versions = np.where(is_newer, other.versions, self.versions)
        return PartitionMap(self.first_shards, versions, np.where(is_newer, other.owners, self.owners))

    def encode(self) -> bytes:
        """Return the map's bytes."""
        moved = self.versions > 0
        versions = self.versions[moved]
        starts = np.flatnonzero(np.diff(versions, prepend=-1))  # no version is -1, so the first one starts a run
        header = _HEADER.pack(_FORMAT_VERSION, self.num_partitions, self.first_shards, starts.size)
        if not starts.size:
            return header
        counts = np.diff(starts, append=versions.size)
        runs = np.concatenate((versions[starts], counts)).astype("<u4")
        owners = self.owners[moved].astype("<u2")
        return b"".join((header, np.packbits(moved, bitorder="little").tobytes(), runs.tobytes(), owners.tobytes()))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> PartitionMap:
        """Return the map that `encode` has made these bytes of.

        Raises:
            ProtocolError: They are no map.
        """
        try:
            found = _decoded(data)
        except (RequestError, ValueError, struct.error) as exc:
            raise ProtocolError(f"{len(data)} bytes are no partition map: {exc}") from exc
        if found.encode() != data:  # an equal map has other bytes
            raise ProtocolError(f"{len(data)} bytes are no partition map: they are not as they are written")
        return found


def _decoded(data: bytes | memoryview) -> PartitionMap:
    """Return the map; raise RequestError, ValueError or struct.error if the bytes are out of range."""
    version, num_partitions, first_shards, num_runs = _HEADER.unpack_from(data)
    if version != _FORMAT_VERSION:
        raise ValueError(f"format version {version}, this build reads {_FORMAT_VERSION}")
    if not 1 <= first_shards <= num_partitions <= MAX_PARTITIONS:
        raise ValueError(f"{num_partitions} partitions of {first_shards} shards")
    first = PartitionMap.first(first_shards, num_partitions)
    if not num_runs:
        return first
    bitmap_bytes = -(-num_partitions // 8)
    runs_at = _HEADER.size + bitmap_bytes
    bitmap = np.frombuffer(data, np.uint8, bitmap_bytes, _HEADER.size)
    moved = np.unpackbits(bitmap, count=num_partitions, bitorder="little").view(np.bool_)
    runs = np.frombuffer(data, "<u4", 2 * num_runs, runs_at).astype(np.int64)
    num_moved = int(moved.sum())
    if runs[num_runs:].sum() != num_moved:
        raise ValueError(f"versions of {runs[num_runs:].sum()} partitions, and {num_moved} have moved")
    versions, owners = first.versions.copy(), first.owners.copy()
    versions[moved] = np.repeat(runs[:num_runs], runs[num_runs:])
    owners[moved] = np.frombuffer(data, "<u2", num_moved, runs_at + 8 * num_runs)
    return PartitionMap(first_shards, versions, owners)


def _first_owners(num_shards: int, num_partitions: int) -> _Ids:
    if num_shards < 1:
        raise RequestError(f"{num_shards} shards")
    return np.arange(num_partitions, dtype=np.int64) % num_shards
