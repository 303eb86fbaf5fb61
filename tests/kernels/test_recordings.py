"""Recordings: structures of tensors and back, the file's format, and what differs."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from headrace.kernels.recordings import Recording, RecordingName, difference, flatten
from headrace.schemas.errors import ConfigError, CorruptionError

GOLDEN = (
    "+AEAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJoZWFkcmFjZSI6ImQ1NThlODExIHtcInJ1blwiOiBcImN0ci12N1wiLCBcIm1vZGVsXCI6IFwi"
    "Y3RyXCIsIFwiZXBvY2hcIjogMywgXCJzdGVwXCI6IDEwMDAsIFwidGltZV91c1wiOiAxNzAwMDAwMDAwMDAwMDAwLCBcImZvcm1hdFwiOiAx"
    "LCBcImlucHV0c1wiOiB7XCJ0dXBsZVwiOiBbe1widGVuc29yXCI6IFwiaW5wdXRzWzBdXCJ9LCB7XCJkaWN0XCI6IHtcImFcIjoge1widGVu"
    "c29yXCI6IFwiaW5wdXRzWzFdWydhJ11cIn19fV19LCBcIm91dHB1dHNcIjoge1widGVuc29yXCI6IFwib3V0cHV0c1wifX0ifSwiaW5wdXRz"
    "WzFdWydhJ10iOnsiZHR5cGUiOiJJNjQiLCJzaGFwZSI6WzIsM10sImRhdGFfb2Zmc2V0cyI6WzAsNDhdfSwiaW5wdXRzWzBdIjp7ImR0eXBl"
    "IjoiRjMyIiwic2hhcGUiOlsyLDNdLCJkYXRhX29mZnNldHMiOls0OCw3Ml19LCJvdXRwdXRzIjp7ImR0eXBlIjoiRjMyIiwic2hhcGUiOlsy"
    "XSwiZGF0YV9vZmZzZXRzIjpbNzIsODBdfX0AAAAAAAAAAAEAAAAAAAAAAgAAAAAAAAADAAAAAAAAAAQAAAAAAAAABQAAAAAAAAAAAAAAAACA"
    "PwAAAEAAAEBAAACAQAAAoEAAAEBAAABAQQ=="
)
FIRST = torch.arange(6, dtype=torch.float32).view(2, 3)


BATCH = (FIRST, {"a": FIRST.long()})


def recording(inputs: Any = BATCH) -> Recording:
    return Recording(
        run="ctr-v7",
        model="ctr",
        epoch=3,
        step=1000,
        time_us=1_700_000_000_000_000,
        inputs=flatten(inputs, "inputs"),
        outputs=flatten(FIRST.sum(1), "outputs"),
    )


@pytest.mark.parametrize(
    "value",
    [
        FIRST,
        [FIRST, (FIRST.half(), [])],
        {"b": FIRST.bfloat16(), "a": {"x.y": FIRST.T, "tensor": torch.tensor(True)}},
        (torch.zeros(0, 4), torch.tensor(2.5, dtype=torch.float64), None, 7, "text", False, 0.1),
        (),
    ],
    ids=["tensor", "lists", "dicts", "leaves", "empty"],
)
def test_structures_come_back_from_the_file(value: Any) -> None:
    """Nested values come back with their types, orders and bits, and share no memory with the given ones."""
    found = Recording.decode(recording(inputs=value).encode(), "file").inputs
    given = flatten(value, "inputs")
    assert difference(given, found) == (0.0, True, "")
    assert json.dumps(found.structure) == json.dumps(given.structure), "also the order of keys"
    assert difference(flatten(found.build(), "inputs"), given)[1]
    kept = flatten(FIRST, "inputs").build()
    assert kept.data_ptr() != FIRST.data_ptr()


@pytest.mark.torchrec
def test_containers_of_torchrec_come_back() -> None:
    """Keyed and jagged tensors come back; one with a batch size per feature is refused."""
    torchrec = pytest.importorskip("torchrec")
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

    kjt = torchrec.KeyedJaggedTensor
    lengths = torch.tensor([1, 2, 0, 3])
    value = (
        kjt(["b", "a"], torch.arange(6), lengths=lengths),
        kjt(["a"], torch.arange(6), weights=torch.rand(6), lengths=lengths),
        JaggedTensor(torch.rand(6, 2), lengths=lengths),
        KeyedTensor(keys=["x", "y"], length_per_key=[1, 2], values=FIRST),
    )
    found = Recording.decode(recording(inputs=value).encode(), "file").inputs
    plain, weighted, jagged, keyed = found.build()
    assert difference(flatten((plain, weighted, jagged, keyed), "inputs"), found)[1]
    assert (plain.keys(), plain.stride(), plain.weights_or_none()) == (["b", "a"], 2, None)
    assert torch.equal(plain["a"].values(), torch.arange(3, 6)) and torch.equal(weighted.weights(), value[1].weights())
    assert torch.equal(jagged.values(), value[2].values()) and torch.equal(keyed["y"], FIRST[:, 1:])
    varying = kjt(["a", "b"], torch.arange(3), lengths=torch.ones(3).long(), stride_per_key_per_rank=[[1], [2]])
    with pytest.raises(ConfigError, match=r"inputs\['x'\]: a KeyedJaggedTensor with a batch size per feature"):
        flatten({"x": varying}, "inputs")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([FIRST, {"user": {1, 2}}], r"inputs\[1\]\['user'\]: set cannot be recorded"),
        ({"a": [FIRST.numpy()]}, r"inputs\['a'\]\[0\]: ndarray cannot be recorded"),
        ({"a": {3: FIRST}}, r"inputs\['a'\]: key 3 of a dict is no text"),
        ((FIRST.to_sparse(),), r"inputs\[0\]: Tensor of torch.float32 and torch.sparse_coo cannot be recorded"),
    ],
    ids=["set", "array", "key", "sparse"],
)
def test_what_cannot_be_recorded_is_named_by_its_place(value: Any, message: str) -> None:
    """Another type is refused; the message says where in the structure it is."""
    with pytest.raises(ConfigError, match=message):
        flatten(value, "inputs")


def test_the_format_stays() -> None:
    """A file of the first build with this format is read, and its header is what is written now."""
    given, data = recording(), base64.b64decode(GOLDEN)
    found = Recording.decode(data, "file")
    assert difference(found.inputs, given.inputs)[1] and difference(found.outputs, given.outputs)[1]
    assert found.name == given.name and found.time_us == given.time_us and found.run == given.run
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert sorted(header) == ["__metadata__", "inputs[0]", "inputs[1]['a']", "outputs"]
    assert json.loads(header["__metadata__"].pop("headrace")[9:]) == {
        **{"run": "ctr-v7", "model": "ctr", "epoch": 3, "step": 1000, "time_us": 1_700_000_000_000_000, "format": 1},
        "inputs": {"tuple": [{"tensor": "inputs[0]"}, {"dict": {"a": {"tensor": "inputs[1]['a']"}}}]},
        "outputs": {"tensor": "outputs"},
    }


def test_torn_altered_and_alien_files_are_refused_by_name() -> None:
    """Every torn file and every flipped byte is found, and so is a file of another kind, or with fields of no use."""
    data = recording().encode()
    for size in range(len(data)):
        with pytest.raises(CorruptionError, match=r"^s3://b/r: "):
            Recording.decode(data[:size], "s3://b/r")
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1
        with pytest.raises(CorruptionError, match=r"^s3://b/r: "):
            Recording.decode(bytes(flipped), "s3://b/r")
    from safetensors.torch import save

    aliens = [b"", b"PK\x03\x04" * 100, save({"w": FIRST})]
    aliens += [save({"w": FIRST}, {"headrace": text}) for text in ("{}", "00000000 " + "[" * 100_000)]
    aliens += [
        dataclasses.replace(recording(), **fields).encode()
        for fields in ({"run": 7}, {"model": None}, {"epoch": "3"}, {"step": True}, {"time_us": 0.5})
    ]
    for alien in aliens:
        with pytest.raises(CorruptionError, match=r"^s3://b/r: "):
            Recording.decode(alien, "s3://b/r")


def test_names_of_files() -> None:
    """A name says model, epoch and step, and sorts by step; models with odd names have names of their own."""
    name = RecordingName.of("ctr", 3, 1000)
    assert str(name) == "ctr-00000003-000000001000.safetensors" == str(recording().name)
    odd = [RecordingName.of(model, 1, 2) for model in ("a b", "a/b", "ä", "a-b", "../a")]
    assert len({str(each) for each in odd}) == 5 and all("/" not in str(each) for each in odd)
    for each in (name, *odd):
        assert RecordingName.parse(str(each)) == each
    assert RecordingName.parse("model.safetensors") is None


_SPECIAL = torch.tensor([math.nan, math.inf, 0.0])
_PAIR = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (_PAIR, _PAIR.clone(), (0.0, True, "")),
        (_PAIR, torch.tensor([1.0, 2.5]), (0.5, False, "outputs")),
        *((_PAIR, torch.tensor([1.0, value]), (math.inf, False, "outputs")) for value in (math.nan, math.inf)),
        (_PAIR, _PAIR[None], (math.inf, False, "outputs: [1, 2] torch.float32 instead of [2] torch.float32")),
        (_PAIR, torch.tensor([1, 2]), (math.inf, False, "outputs: [2] torch.int64 instead of [2] torch.float32")),
        ({"a": _SPECIAL, "b": FIRST}, {"a": _SPECIAL.clone(), "b": FIRST}, (0.0, True, "")),
        ({"a": _SPECIAL}, {"a": torch.tensor([math.nan, math.inf, -0.0])}, (0.0, False, "outputs['a']")),
        ({"a": _SPECIAL, "b": FIRST}, {"a": _SPECIAL + 0.25, "b": FIRST + 2}, (2.0, False, "outputs['b']")),
        ([3], [4], (math.inf, False, None)),
        ([FIRST], (FIRST,), (math.inf, False, None)),
    ],
)
def test_differences(ours: Any, theirs: Any, expected: tuple[float, bool, str | None]) -> None:
    """The largest absolute difference, and where it is; NaN, another shape, type or structure are infinitely far.

    Equal NaN and infinity are no difference; signed zeros are other bits.
    """
    found = difference(flatten(ours, "outputs"), flatten(theirs, "outputs"))
    assert found[:2] == expected[:2] and expected[2] in (found[2], None)
