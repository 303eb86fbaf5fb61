"""The partition map: exact bytes, merges in any order, and that nothing moves until a partition does."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import ProtocolError, RequestError
from headrace.schemas.partition_map import (
    MAX_OWNER,
    MAX_PARTITIONS,
    MAX_VERSION,
    PartitionMap,
    default_num_partitions,
)
from headrace.schemas.routing import shards_of_rows, table_seed

# Of 12 partitions and 3 shards: 1 and 9 have moved once, 10 five times; to shards 3, 3 and 0.
_GOLDEN = "01000000 0c000000 03000000 02000000  0206  01000000 05000000  02000000 01000000  0300 0300 0000"


def _golden() -> PartitionMap:
    moved = PartitionMap.first(3, 12).moved([1, 9], [1, 1], 3)
    return moved.moved([10], [5], 0)


@st.composite
def _maps(draw: st.DrawFn, first_shards: int = 2, num_partitions: int = 22) -> PartitionMap:
    """Maps of one server, with few versions, so that their entries are often equal."""
    found = PartitionMap.first(first_shards, num_partitions)
    moves = st.tuples(st.integers(0, num_partitions - 1), st.sampled_from([1, 2, MAX_VERSION]), st.integers(0, 3))
    for partition, version, owner in draw(st.lists(moves, max_size=40)):
        found = found.moved([partition], [version], owner)
    return found


@pytest.mark.parametrize(
    ("num_shards", "expected"),
    [(1, 1024), (2, 1024), (3, 1536), (5, 1280), (700, 1400), (1023, 2046), (1024, 1024), (1025, 1025)],
)
def test_default_number_of_partitions(num_shards: int, expected: int) -> None:
    """P is the shards times a power of two, and the least from 1024 on. It never changes: directories rely on it."""
    assert default_num_partitions(num_shards) == expected


@given(
    st.integers(1, 1024),
    st.text(max_size=20),
    st.lists(st.integers(0, 2**63 - 1), max_size=20),
)
def test_no_row_moves_with_the_first_map(num_shards: int, fqn: str, ids: list[int]) -> None:
    """Every row of a store from before partitions is on the shard that the first map says, by partition too."""
    row_ids, seed = np.array(ids, np.int64), table_seed(fqn)
    first = PartitionMap.first(num_shards)
    expected = shards_of_rows(seed, row_ids, num_shards).tolist()
    assert first.is_first and first.num_shards == num_shards
    assert first.shards_of_rows(seed, row_ids).tolist() == expected
    assert first.owners[first.partitions_of_rows(seed, row_ids)].tolist() == expected


def test_golden_partitions() -> None:
    """The partition of a row never changes, and only rows of moved partitions have another shard than before."""
    ids = np.array([0, 1, 2, 3, 1000, 2**40, 2**63 - 1], np.int64)
    partitions = PartitionMap.first(4).partitions_of_rows(table_seed("user.weight"), ids)
    assert partitions.tolist() == [589, 416, 459, 859, 596, 233, 254]
    ids, seed = np.arange(5000, dtype=np.int64), table_seed("t")
    first = PartitionMap.first(3)
    moved = first.moved([0, 7, 1000], [1, 1, 1], 5)
    expected = np.where(np.isin(first.partitions_of_rows(seed, ids), [0, 7, 1000]), 5, first.shards_of_rows(seed, ids))
    assert (moved.shards_of_rows(seed, ids) == expected).all() and (expected == 5).any()
    assert moved.partitions_of(5).tolist() == [0, 7, 1000]
    assert (moved.num_shards, moved.is_first, first.num_shards) == (6, False, 3)
    assert moved.moved([7], [1], 1) is moved and moved.moved([7], [2], 1).owners[7] == 1


def test_golden_bytes() -> None:
    """The bytes of a map are these, in both directions; a first map is its header; its arrays are read-only."""
    assert _golden().encode().hex() == bytes.fromhex(_GOLDEN).hex()
    assert PartitionMap.decode(memoryview(bytes.fromhex(_GOLDEN))) == _golden()
    assert PartitionMap.first(3, 12).encode() == bytes.fromhex("01000000 0c000000 03000000 00000000")
    for each in (_golden(), PartitionMap.decode(_golden().encode())):
        for array in (each.owners, each.versions):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


@given(_maps())
def test_round_trip(found: PartitionMap) -> None:
    """Any map comes back, with equal bytes for equal maps."""
    back = PartitionMap.decode(found.encode())
    assert back == found and back.encode() == found.encode()
    assert (back.is_first, back.num_shards) == (found.is_first, found.num_shards)


@given(_maps(), _maps(), _maps())
def test_merges_agree_in_any_order(a: PartitionMap, b: PartitionMap, c: PartitionMap) -> None:
    """Whoever has heard the same maps has the same map, each entry is the newest, and no news gives the same object."""
    merged = a.merged(b).merged(c)
    assert merged == c.merged(b).merged(a) == a.merged(c.merged(b)) == merged.merged(merged)
    entries = [list(zip(each.versions.tolist(), each.owners.tolist(), strict=True)) for each in (a, b, c, merged)]
    assert entries[3] == [max(each) for each in zip(*entries[:3], strict=True)]
    assert (a.merged(b) is a) == (a.merged(b) == a)


def test_what_cannot_be_a_map_is_refused() -> None:
    """P is a multiple of N within bounds; entries are within theirs; and maps of another P or N are not merged."""
    for num_shards, num_partitions in ((3, 4), (0, 4), (5, 4), (1, MAX_PARTITIONS + 1)):
        with pytest.raises(RequestError):
            PartitionMap.first(num_shards, num_partitions)
    first = PartitionMap.first(2, 4)
    for other in (PartitionMap.first(2, 8), PartitionMap.first(4, 4)):
        with pytest.raises(RequestError, match="this server has 4 and 2"):
            first.merged(other)
    for partition, version, owner in (
        (4, 1, 0), (-1, 1, 0), (0, MAX_VERSION + 1, 0), (0, 1, MAX_OWNER + 1), (0, 1, -1)
    ):  # fmt: skip
        with pytest.raises(RequestError):
            first.moved([partition], [version], owner)
    with pytest.raises(RequestError):
        first.moved([0, 1], [1], 0)


@given(st.binary(max_size=80), st.integers(0, 1000), st.integers(1, 255))
def test_any_bytes_are_refused_by_one_error(data: bytes, at: int, bits: int) -> None:
    """Bytes that are no map raise `ProtocolError`; any others are those of the map that they give, and of no other."""
    golden = bytes.fromhex(_GOLDEN)
    changed = bytearray(golden)
    changed[at % len(changed)] ^= bits
    for tried in (data, golden[:16] + data, golden[:4] + data, bytes(changed)):
        with contextlib.suppress(ProtocolError):
            assert PartitionMap.decode(tried).encode() == tried
    for cut in (golden[:-1], golden + b"\0", golden[:16]):
        with pytest.raises(ProtocolError, match="no partition map"):
            PartitionMap.decode(cut)
