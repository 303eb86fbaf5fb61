"""Uses of tables as text, in a spec, and wherever specs are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.paramserver.store.catalog import pack_spec, unpack_spec
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import spec_from_idl, spec_to_idl
from headrace.schemas.table_uses import Divisor, Kind, Output, TableUse, decode_uses, encode_uses
from headrace.schemas.tables import DType, TableSpec

USE = TableUse(
    kind=Kind.BAG_COLLECTION,
    is_sharded=True,
    outputs=(Output(feature="x", position=3), Output(feature="y", position=0, divisor=Divisor.LENGTH)),
    pooling="mean",
    kernel_pooling="sum",
    is_weighted=True,
    dtype="FLOAT16",
)
BAG = TableUse(kind=Kind.BAG, pooling="max", padding_idx=0)
# ON THE WIRE and ON DISK: never change.
GOLDEN = (
    '[{"dtype":null,"is_sharded":false,"is_weighted":false,"kernel_pooling":null,"kind":"EmbeddingBag",'
    '"need_indices":false,"outputs":[],"padding_idx":0,"pooling":"max"}]'
)


def test_uses_come_back_from_text() -> None:
    """What was encoded is decoded, and the text is that of all releases."""
    assert decode_uses("t", encode_uses([USE, BAG])) == (USE, BAG)
    assert encode_uses([BAG]) == GOLDEN


@pytest.mark.parametrize("text", ["", "[{}]", '[{"kind":"Cube","outputs":[]}]', GOLDEN.replace('"pooling"', '"news"')])
def test_what_a_later_release_says_is_refused(text: str) -> None:
    """Nothing is guessed about a use that is not known whole."""
    with pytest.raises(ConfigError, match="table 't': this release does not know how its trainer uses it"):
        decode_uses("table 't'", text)


def test_uses_are_no_part_of_what_a_table_is() -> None:
    """Specs that differ in uses alone are equal, have one fingerprint, and bring their uses wherever they are kept."""
    plain = TableSpec(fqn="t", num_rows=5, dim=4, dtype=DType.FLOAT32)
    used = plain.described(encode_uses([USE]))
    assert used == plain and used.fingerprint == plain.fingerprint and hash(used) == hash(plain)
    for spec in (plain, used, replace(used, fqn="u")):
        assert unpack_spec(pack_spec(spec)) == spec == spec_from_idl(spec_to_idl(spec))
        assert unpack_spec(pack_spec(spec)).uses == spec.uses == spec_from_idl(spec_to_idl(spec)).uses
