"""Which of several statements about a shard's place wins, and which replies come from an old copy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fake_service import batch, hello_request, read, serve
from hypothesis import given
from hypothesis import strategies as st

from headrace.paramserver.rpc.shard_places import (
    DOUBTED,
    HEARSAY,
    OWN_WORD,
    STANDBY,
    ShardPlace,
    ShardPlaces,
    StaleTermError,
)
from headrace.schemas.idl import idl

_NUM_SHARDS = 3
# As claims are: each term of a shard is one start of it, at one address.
_CLAIMED = st.tuples(st.integers(0, _NUM_SHARDS - 1), st.integers(1, 6)).map(
    lambda told: (told[0], ShardPlace("host", 100 * told[0] + told[1], told[1], node=f"n{told[1]}"))
)


def _places(*terms: int) -> ShardPlaces:
    return ShardPlaces("s", [ShardPlace(f"h{shard}", 1, term) for shard, term in enumerate(terms)])


def _hello(shard: int, *places: tuple[str, int, int | None], term: int | None = None, server_id: str = "s") -> Any:
    shards = [idl.ShardAddress(shard=n, host=host, port=port, term=t) for n, (host, port, t) in enumerate(places)]
    return idl.HelloReply(server_id=server_id, shard=shard, shards=shards, term=term)


@given(st.lists(_CLAIMED, max_size=6), st.data())
def test_claims_merge_in_any_order(told: list[tuple[int, ShardPlace]], data: st.DataObject) -> None:
    """Nodes that hear the same claims, in any order and any number of times, know the same places: the newest."""
    ends = []
    for order in (told, data.draw(st.permutations(told)) + told):
        places = _places(0, 0, 0)
        for statement in order:
            places.merge([statement])
        ends.append([places[shard] for shard in range(_NUM_SHARDS)])
    assert ends[0] == ends[1]
    newest = [max((place.term for at, place in told if at == shard), default=0) for shard in range(_NUM_SHARDS)]
    assert [place.term for place in ends[0]] == newest


@given(st.lists(_CLAIMED, max_size=6))
def test_maps_travel_whole(told: list[tuple[int, ShardPlace]]) -> None:
    """A map that is told to a node that knows nothing arrives as it is."""
    there, here = _places(0, 0, 0), ShardPlaces("s", [ShardPlace("?", 1)] * _NUM_SHARDS)
    there.merge(told)
    here.hear([place for place in there.to_idl() if place.term])
    for shard in range(_NUM_SHARDS):
        assert not there[shard].term or here[shard] == there[shard]


def test_without_terms_a_shards_own_word_wins() -> None:
    """At equal terms: the shard, then hearsay, then a place where nobody was found; the first of equals stays.

    A shard's reply says its term twice; either will do."""
    for better, worse in itertools.combinations((OWN_WORD, HEARSAY, DOUBTED), 2):
        a, b = ShardPlace("a", 1, 5, better), ShardPlace("b", 2, 5, worse)
        assert a.is_better_than(b) and not b.is_better_than(a) and not a.is_better_than(a)
    places = ShardPlaces.of_hello(_hello(0, ("a", 1, None), ("b", 2, None)), "a", 1)
    assert not places.learn(_hello(0, ("a", 1, None), ("c", 3, None)), "a", 1)
    assert places.learn(_hello(1, ("a", 1, None), ("c", 3, None)), "c", 3)
    places.doubt(1, ("b", 2))  # of an earlier place: not of this one
    assert places[1].certainty == OWN_WORD
    places.doubt(1, ("c", 3))
    assert places.learn(_hello(0, ("a", 1, None), ("b", 2, None)), "a", 1)
    assert places.addresses == [("a", 1), ("b", 2)]
    places = _places(0, 0)
    assert places.learn(_hello(1, ("h0", 1, None), ("h1", 1, None), term=4), "h1", 1)
    assert (places[0].term, places[1].term) == (0, 4)


_NONSENSE = [
    (7, "x", 1, 9),
    (0, "", 1, 9),
    (0, "0.0.0.0", 1, 9),
    (0, "x", 0, 9),
    (0, "x", 1, -1),
    (0, "x", 1, 2**63 - 1),
]


@pytest.mark.parametrize(("shard", "host", "port", "term"), [*_NONSENSE, (0, "x", 1, None)])
def test_nonsense_is_not_heard(shard: int, host: str, port: int, term: int | None) -> None:
    """A place that cannot be one, or that says less than what is known, is ignored.

    So is what another server says of its shards, and a replica that answers as one shard.
    """
    places = _places(1, 1)
    assert not places.hear([idl.ShardAddress(shard=shard, host=host, port=port, term=term)])
    for hello in (_hello(0, ("x", 1, 9), ("y", 2, 9), server_id="other"), _hello(0, ("x", 1, 9))):
        assert not places.learn(hello, "x", 1)
    assert places.addresses == [("h0", 1), ("h1", 1)]


def test_an_old_copys_reply() -> None:
    """A lower term than the known one is an error that may be retried elsewhere; the same and a higher one are not."""
    places = _places(3, 0)
    with pytest.raises(StaleTermError, match=r"^z:1 is an old copy of shard 0, of term 2: one of term 3 .* at h0:1$"):
        places.check_term(0, 2, "z:1")
    assert StaleTermError.retriable
    for shard, term in ((0, 3), (0, 4), (1, 0), (5, 0)):
        places.check_term(shard, term, "z:1")


async def test_every_reply_is_checked() -> None:
    """A connection to a shard that becomes an old copy ends at its next reply, of any kind; a newer copy's does not.

    Terms of one server say nothing about another; who asks checks the id."""
    async with serve() as served:
        served.service.term = 5
        for call in ("hello", "read", "ack", "status"):
            async with await served.connect(says_hello=False) as client:
                client.places = ShardPlaces("fake", [ShardPlace("h", 1, 5)])
                reply = await client.hello(hello_request())
                assert reply.term == 5
                client.places.merge([(0, ShardPlace("elsewhere", 1, 6))])
                with pytest.raises(StaleTermError, match="elsewhere:1"):
                    match call:
                        case "hello":
                            await client.hello(hello_request())
                        case "read":
                            await client.get_embeddings(read("t"))
                        case "ack":
                            await client.set_embeddings(batch(1))
                        case "status":
                            await client.status()
                assert client.is_closed
    async with serve() as served, await served.connect(says_hello=False) as client:
        client.places = ShardPlaces("another", [ShardPlace("h", 1, 9)])
        assert (await client.hello(hello_request())).server_id == "fake"
        await client.get_embeddings(read("t"))


async def test_an_old_server_has_no_term() -> None:
    """Replies without terms are taken as before, and of a lower term once a higher one is known."""
    async with serve() as served, await served.connect(says_hello=False) as client:
        client.places = ShardPlaces("fake", [ShardPlace("h", 1)])
        reply = await client.hello(hello_request())
        assert reply.term is None
        await client.get_embeddings(read("t"))
        client.places = ShardPlaces("fake", [ShardPlace("h", 1, 1)])
        with pytest.raises(StaleTermError, match="of term 0"):
            await client.get_embeddings(read("t"))


def test_a_followers_own_place_is_none_of_its_sources() -> None:
    """What others take for the shard's place is left for any other one, and is not taken again."""
    places = ShardPlaces("s", [ShardPlace("me", 1, 3)])
    places.shunned = ("me", 1)
    assert places.merge([(0, ShardPlace("source", 1))])
    assert not places.merge([(0, ShardPlace("me", 1, 4))])
    assert places.addresses == [("source", 1)]


def test_a_standbys_word_counts_for_more_than_a_statement_that_the_shard_is_where_it_is() -> None:
    """Of two equal statements the one of the process at the other one's place is right: the shard is not there."""
    places = ShardPlaces("s", [ShardPlace("a", 1), ShardPlace("standby", 1)])
    told = [idl.ShardAddress(shard=0, host="a", port=1), idl.ShardAddress(shard=1, host="b", port=1)]
    assert places.learn(idl.HelloReply(server_id="s", shard=STANDBY, shards=told), "standby", 1)
    assert places.addresses == [("a", 1), ("b", 1)]
