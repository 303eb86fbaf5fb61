"""Where a server's shards are, as one of them tells a client that has reached it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.paramserver.rpc.shard_map import shard_map
from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl


def hello(*places: tuple[int, str, int], shard: int = 0) -> Any:
    shards = [idl.ShardAddress(shard=number, host=host, port=port) for number, host, port in places]
    return idl.HelloReply(shard=shard, shards=shards)


def test_the_order_is_that_of_the_shards() -> None:
    """However they are told, and whichever was asked."""
    told = hello((1, "b", 2), (0, "a", 1), shard=1)
    assert shard_map(told, "reached", 9) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"], ids=["none", "IPv4", "IPv6"])
def test_a_host_that_leads_nowhere_is_the_one_that_was_reached(host: str) -> None:
    """A server that listens everywhere cannot know by which of its addresses a client comes."""
    assert shard_map(hello((0, host, 1), (1, "b", 2)), "reached", 9) == [("reached", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("told", "listed"),
    [
        (hello(), r"\[\]"),
        (hello((1, "b", 2)), r"\[1\]"),
        (hello((0, "a", 1), (0, "b", 2)), r"\[0, 0\]"),
        (hello((0, "a", 1), shard=1), r"\[0\]"),
        (hello((0, "a", 1), shard=-1), r"\[0\]"),
    ],
    ids=["none", "one is missing", "one is there twice", "it is not in it itself", "it is none"],
)
def test_a_map_that_lacks_a_shard_is_refused(told: Any, listed: str) -> None:
    """Rows are asked for, and sent, only where all shards are known."""
    with pytest.raises(ProtocolError, match=rf"at \[::1\]:9 has an incomplete shard map: .* lists {listed}$"):
        shard_map(told, "::1", 9)
