"""The stand-in for FBGEMM's RES streamer: modules made after `install` arrive whole, whatever FBGEMM calls."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import res_calls
import torch
from fake_shard import WAIT_S, FakeStore, hosted
from ranks import run_ranks
from store_comparison import compare_with_store
from stored_rows import read_rows

import headrace.res
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.torch_releases import release_for
from headrace.schemas.errors import ConfigError, HeadraceError, RequestError, UnavailableError, UnsupportedModelError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.world import SoloWorld

ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")

FAST: dict[str, Any] = {
    "freshness_s": 0,
    "max_cost_percent": 100,
    "connect_timeout_s": WAIT_S,
    "flush_timeout_s": WAIT_S,
}
RECORDED = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "res_calls").glob("*.json")}


def make_module(
    specs: list[tuple[int, int]],
    *,
    optimizer: str = "EXACT_ROWWISE_ADAGRAD",
    settings: dict[str, Any] | None = None,
    **res: Any,
) -> Any:
    return ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU) for rows, dim in specs],
        optimizer=ops.OptimType[optimizer],
        learning_rate=0.1,
        enable_raw_embedding_streaming=True,
        res_params=ops.RESParams(**res),
        **(settings or {}),
    )


def train(module: Any, *ids: list[int], **extras: Any) -> None:
    """Look ids up, one bag for each table, and update them."""
    counts = torch.tensor([0, *map(len, ids)])
    indices = torch.tensor([one for of_table in ids for one in of_table])
    (module(indices, counts.cumsum(0), **extras) - 1).pow(2).sum().backward()


@pytest.fixture
def store() -> Iterator[FakeStore]:
    with hosted(FakeStore(num_shards=2)) as store:
        yield store


@pytest.fixture
def streamer(store: FakeStore) -> Iterator[RawEmbeddingStreamer]:
    """Return the streamer of an `install`."""
    streamer = headrace.res.install(store.address, **FAST)
    yield streamer
    streamer.close(flush=False)


def compare(streamer: RawEmbeddingStreamer, address: str) -> dict[str, tuple[int, int]]:
    """Check that all rows of the store are the tables'; return, by table, the rows that it has and that it lacks."""
    result = compare_with_store(streamer.tables, address, only_present=True, timeout_s=WAIT_S)
    assert result.is_equal, str(result)
    return {table.fqn: (table.num_equal, table.num_missing) for table in result.tables}


def test_fbgemm_calls_as_recorded(tmp_path: Path) -> None:
    """The recorded calls are those of the installed version."""
    version = res_calls.fbgemm_version()
    if version not in RECORDED:
        pytest.skip(f"no calls of fbgemm_gpu {version} are recorded")
    # In a process of its own: FBGEMM reads the variable for its lane of HBM rows once.
    command = [sys.executable, str(Path(res_calls.__file__)), str(tmp_path)]
    subprocess.run(command, check=True, timeout=100)
    assert json.loads((tmp_path / f"{version}.json").read_text()) == RECORDED[version]


def as_tensors(value: Any) -> Any:
    """Return a recorded argument; rows of weights are NaN, which nothing may read."""
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"])
    if value["numbers"] is None:
        return torch.full(value["shape"], torch.nan, dtype=dtype)
    return torch.tensor(value["numbers"], dtype=dtype)


def as_fbgemm(call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Make a call as FBGEMM's own code does."""
    space = {"__name__": "fbgemm_gpu.split_table_batched_embeddings_ops_training", "call": call}
    eval("call(*args, **kwargs)", space, {"args": args, "kwargs": kwargs})


@pytest.mark.parametrize("scenario", res_calls.SCENARIOS)
@pytest.mark.parametrize("version", RECORDED)
def test_recorded_calls(store: FakeStore, streamer: RawEmbeddingStreamer, version: str, scenario: str) -> None:
    """Calls of each version are taken: rows arrive as they are in the tables, once, at their own steps."""
    (_, arguments, named), *calls = RECORDED[version][scenario]
    names, offsets, sizes = arguments[4:7]
    specs = [(end - first, 8) for first, end in itertools.pairwise(sizes)]
    module = make_module(specs, table_names=names, table_offsets=offsets)
    self = module  # as in the constructor of a module, which this is instead of
    module._raw_embedding_streamer = torch.classes.fbgemm.RawEmbeddingStreamer(*arguments, **named)
    assert self is module
    train(module, *([[0, 3]] * len(specs)))  # what FBGEMM did before its first call
    num_steps = 1
    for name, args, kwargs in calls:
        tensors = [*map(as_tensors, args), *(as_tensors(value) for value in kwargs.values())]
        before = copy.deepcopy(tensors)
        positional, by_name = tensors[: len(args)], dict(zip(kwargs, tensors[len(args) :], strict=True))
        as_fbgemm(getattr(module._raw_embedding_streamer, name), *positional, **by_name)
        assert str(tensors) == str(before)
        if name == "stream" and not kwargs.get("use_hbm"):
            train(module, *([[num_steps, 3]] * len(specs)))
            num_steps += 1
    streamer.flush()
    rows = len({3, *range(num_steps)})
    assert compare(streamer, store.address) == {name: (rows, 20 + 10 * at - rows) for at, name in enumerate(names)}
    assert streamer.stats().step == num_steps


@pytest.mark.parametrize("scenario", res_calls.SCENARIOS)
def test_prefetches_of_the_installed_version(
    streamer: RawEmbeddingStreamer, monkeypatch: pytest.MonkeyPatch, scenario: str
) -> None:
    """FBGEMM's own Python runs its lanes against the stand-in, which writes none of its tensors."""
    monkeypatch.setenv("FBGEMM_RES_HBM_STREAMING", "1")
    with res_calls.emulated_kernels():
        module = res_calls.make(scenario)
        weights = [each.clone() for each in (module.weights_dev, module.weights_uvm, module.lxu_cache_weights)]
        for step in range(res_calls.NUM_STEPS):
            res_calls.prefetch(module, scenario, step)
    assert not streamer.tables
    for before, now in zip(weights, (module.weights_dev, module.weights_uvm, module.lxu_cache_weights), strict=True):
        assert torch.equal(before, now)


def test_rows_and_states_of_all_modules(store: FakeStore, streamer: RawEmbeddingStreamer) -> None:
    """Rows that were trained arrive under their global ids, with states and the count of steps, and no others."""
    first = make_module([(10, 8), (0, 4), (20, 4)], table_names=["a", "empty", "b"], table_offsets=[0, 0, 100])
    second = make_module([(6, 4)], optimizer="EXACT_ADAGRAD", table_names=["c"], table_offsets=[0])
    with torch.no_grad():
        first(torch.tensor([5, 6]), torch.tensor([0, 1, 1, 2]))
    assert not streamer.tables
    for step in range(3):
        train(first, [9, step], [], [step, 19])
        train(second, [5])
        assert streamer.stats().step == step
    streamer.flush()
    assert streamer.stats().step == streamer.stats().acked_step == 3
    assert compare(streamer, store.address) == {"a": (4, 6), "empty": (0, 0), "b": (4, 16), "c": (1, 5)}
    assert [(t.spec.fqn, t.row_offset, t.spec.dim, len(t.spec.states)) for t in streamer.tables] == [
        ("a", 0, 8, 1),
        ("empty", 0, 4, 1),
        ("b", 100, 4, 1),
        ("c", 0, 4, 1),
    ]
    rows = streamer.fetch("b", torch.tensor([100, 119]))
    assert torch.equal(rows.weights, first.split_embedding_weights()[2][[0, 19]])


AVERAGES = {"emainplace_mode": ops.EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.5)}


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("EXACT_SGD", {}),
        ("EXACT_ADAGRAD", {}),
        ("EXACT_ROWWISE_ADAGRAD", {}),
        ("EMAINPLACE_ROWWISE_ADAGRAD", AVERAGES),
    ],
)
def test_each_fused_optimizer(server: ServerProcess, optimizer: str, settings: dict[str, Any]) -> None:
    """Every row arrives with each fused optimizer of FBGEMM's CPU build: weights and states."""
    run = f"res-{optimizer}"
    with headrace.res.install(server.address, run=run, model=run, publish="all", **FAST) as streamer:
        module = make_module(
            [(101, 8), (20, 4)], optimizer=optimizer, settings=settings, table_names=["a", "b"], table_offsets=[0, 0]
        )
        module.init_embedding_weights_uniform(-0.1, 0.1)  # averages move the rows whose two halves differ
        for step in range(8):
            train(module, [step, 100 - step, 50], [2 * step])
        streamer.flush()
        assert compare(streamer, server.address) == {f"{run}:a": (101, 0), f"{run}:b": (20, 0)}


class OwnModule(ops.SplitTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """Writes rows in a way that torch does not count, and hands them to the RES streamer itself."""

    def write(self, rows_of_tables: list[list[int]], *, gives_ids: bool = True) -> None:
        first, ids = 0, [-1]
        for rows, weights, (num_rows, *_) in zip(
            rows_of_tables, self.split_embedding_weights(), self.embedding_specs, strict=True
        ):
            weights.detach().numpy()[rows] += 1
            ids += [first + row for row in rows]
            first += num_rows
        self._raw_embedding_streamer.stream(*([torch.tensor([*ids, first + 5])] if gives_ids else []))


@pytest.mark.parametrize("gives_ids", [True, False])
def test_rows_that_a_module_hands_over_itself(
    store: FakeStore, streamer: RawEmbeddingStreamer, gives_ids: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They go out, also those that nothing has trained; those before the first lookup are told, once."""
    place = (ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
    module: Any = OwnModule(
        [(20, 4, *place), (30, 4, *place)],
        learning_rate=0.1,
        table_names=["user", "item"],
        enable_raw_embedding_streaming=True,
        res_params=ops.RESParams(table_names=["user", "item"], table_offsets=[0, 0]),
    )
    for _ in range(2):
        module.write([[1], [2]])
    assert [line for line in caplog.messages if "rows that a module handed" in line] == [
        "rows that a module handed to its RES streamer are not sent: none of its tables is streamed, or not before its "
        "first lookup for training"
    ]
    train(module, [3], [3])
    streamer.flush()
    module.write([[5, 7], [0, 29]], gives_ids=gives_ids)
    streamer.flush()
    found = compare(streamer, store.address)
    assert found == ({"user": (3, 17), "item": (3, 27)} if gives_ids else {"user": (20, 0), "item": (30, 0)})


def test_the_operator_that_public_builds_lack(streamer: RawEmbeddingStreamer) -> None:
    """Other callers of `masked_index_select` get what plain indexing gives: it is registered for the whole process."""
    assert streamer is not None  # install() has defined the operator
    select = torch.ops.fbgemm.masked_index_select
    generator = torch.Generator().manual_seed(0)
    for dtype, index_dtype, num_rows, num_ids, num_out in (
        (torch.float32, torch.int64, 50, 30, 30),
        (torch.bfloat16, torch.int32, 50, 30, 40),
        (torch.int64, torch.int32, 1, 8, 8),
        (torch.float32, torch.int64, 0, 4, 4),
        (torch.float32, torch.int64, 5, 0, 4),
    ):
        values = torch.randint(0, 100, (num_rows, 3), generator=generator).to(dtype)
        ids = torch.randint(-1, max(num_rows, 0) or 1, (num_ids,), generator=generator).to(index_dtype)
        ids = ids if num_rows else torch.full_like(ids, -1)
        for count in {0, num_ids // 2, num_ids}:
            out = torch.full((num_out, 3), 7).to(dtype)
            expected = out.clone()
            for place, row in enumerate(ids[:count].tolist()):
                if row >= 0:
                    expected[place] = values[row]
            result = select(out, ids, values, torch.tensor([count], dtype=torch.int32))
            assert torch.equal(out, expected)
            assert result.data_ptr() == out.data_ptr()


def test_a_module_that_is_updated_twice_in_a_step(streamer: RawEmbeddingStreamer) -> None:
    """Two lookups of one module before one backward are one step, and so is an update without the other module's."""
    first, second = (make_module([(8, 4)], table_names=[name], table_offsets=[0]) for name in "ab")
    for step in range(3):
        outputs = [module(torch.tensor([step]), torch.tensor([0, 1])) for module in (first, first, second)]
        torch.cat(outputs).sum().backward()
        assert streamer.stats().step == step
    train(second, [1])
    assert streamer.stats().step == 3
    streamer.flush()
    assert streamer.stats().step == 4
    streamer.flush()
    assert streamer.stats().step == 4


def is_original() -> bool:
    """Return whether FBGEMM's own class is in place; torch may make another object of it at each use."""
    return type(torch.classes.fbgemm.RawEmbeddingStreamer).__name__ == "ScriptClass"


def test_an_fbgemm_of_another_release(tmp_path: Path) -> None:
    """An FBGEMM whose libraries this torch cannot load is refused in one line, with the release that goes with it."""
    package = tmp_path / "fbgemm_gpu"
    package.mkdir()
    (package / "fbgemm_gpu_config.so").write_bytes(b"no library")
    (package / "__init__.py").write_text(
        "import os, torch\ntorch.ops.load_library(os.path.join(os.path.dirname(__file__), 'fbgemm_gpu_config.so'))\n"
    )
    (tmp_path / "fbgemm_gpu-1.5.0.dist-info").mkdir()
    (tmp_path / "fbgemm_gpu-1.5.0.dist-info" / "METADATA").write_text("Name: fbgemm_gpu\nVersion: 1.5.0\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    code = "import headrace.res; headrace.res.install('127.0.0.1:9')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=100
    )
    release = release_for(torch.__version__)
    assert release is not None
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"headrace.schemas.errors.UnsupportedModelError: fbgemm-gpu 1.5.0 cannot be loaded with torch "
        f"{metadata.version('torch')}: pip install --no-deps fbgemm-gpu=={release.fbgemm} torchrec=={release.torchrec}"
    )


def test_the_class_is_put_back(store: FakeStore) -> None:
    """Only modules made between `install` and `close` are streamed, and a second install is refused."""
    before = make_module([(8, 4)])
    assert is_original()
    with headrace.res.install(store.address, **FAST) as streamer:
        unused = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
        with pytest.raises(ConfigError, match="installed already"):
            headrace.res.install(store.address, **FAST)
        train(before, [1])
        assert not is_original()
    assert is_original()
    for module in (unused, make_module([(8, 4)])):
        train(module, [1])
    assert not streamer.tables
    with headrace.res.install(store.address, run="again", model="again", **FAST) as streamer:
        train(make_module([(8, 4)], table_names=["a"], table_offsets=[0]), [1])
        assert len(streamer.tables) == 1


def test_a_module_is_streamed_once(store: FakeStore, streamer: RawEmbeddingStreamer) -> None:
    """One that is attached first is the model's, and one that is streamed for RES cannot be attached."""
    attached, taken = (make_module([(8, 4)], table_names=[name], table_offsets=[0]) for name in "ab")
    with RawEmbeddingStreamer(store.address, run="other", **FAST) as other:
        other.attach(torch.nn.ModuleDict({"m": attached}), publish="updated")
        train(attached, [1])
        assert not streamer.tables
        train(taken, [1])
        with pytest.raises(UnsupportedModelError, match="module 'm' is streamed already"):
            other.attach(torch.nn.ModuleDict({"m": taken}), publish="updated")
        streamer.close()
        other.attach(torch.nn.ModuleDict({"m2": taken}), publish="updated")


def test_identities_and_runtime_meta(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """Rows arrive with the identity and meta of their last update; -1 and zeros where that had none."""
    with headrace.res.install(server.address, run="res-extras", **FAST) as streamer:
        module = make_module([(8, 4), (6, 4)], table_names=["a", "b"], table_offsets=[0, 2**41])
        raw_ids = torch.tensor([2**45 + 3, 0, 0, 2**45 + 8, 5]).view(-1, 1)
        meta = torch.arange(10, dtype=torch.int32).reshape(5, 2)
        train(module, [3, 1, 1], [4, 0], hash_zch_identities=raw_ids, hash_zch_runtime_meta=meta)
        train(module, [3], [2], hash_zch_identities=raw_ids[3:].flatten(), hash_zch_runtime_meta=meta[:2] + 100)
        with pytest.raises(RequestError, match=r"tables a, b: runtime meta is int32\[1\] a row after int32\[2\] a row"):
            train(module, [2], [], hash_zch_runtime_meta=meta[:1, :1])
        train(module, [1], [0])
        streamer.flush()
        assert compare(streamer, server.address) == {"a": (2, 6), "b": (3, 3)}
        a = read_rows(server.address, "a", [3, 1], with_states=True)
        assert a.identities is not None
        assert a.identities.tolist() == [2**45 + 8, -1]
        assert a.states["runtime_meta"].tolist() == [[100, 101], [0, 0]]
        b = read_rows(server.address, "b", [2**41 + 4, 2**41, 2**41 + 2], with_states=True)
        assert b.identities is not None
        assert b.identities.tolist() == [2**45 + 8, -1, 5]
        assert b.states["runtime_meta"].dtype == np.int32
        assert b.states["runtime_meta"].tolist() == [[6, 7], [0, 0], [102, 103]]
        for name, first in (("late", {}), ("later", {"hash_zch_identities": raw_ids[:1]})):
            late = make_module([(8, 4)], table_names=[name], table_offsets=[0])
            train(late, [1], **first)
            for _ in range(2):
                train(late, [1], hash_zch_identities=raw_ids[:1], hash_zch_runtime_meta=meta[:1])
            assert caplog.text.count(f"tables {name}: identities, or runtime meta with them, came after lookups") == 1
        alone = make_module([(8, 4)], table_names=["alone"], table_offsets=[0])
        for _ in range(2):
            train(alone, [1], hash_zch_runtime_meta=meta[:1])
        assert caplog.text.count("tables alone: runtime meta without identities is not streamed") == 1
        assert "tables alone: identities" not in caplog.text


@pytest.mark.parametrize("enabled", ["x,b", '["x", "b"]', ["x", "b"]])
def test_enabled_tables(store: FakeStore, enabled: Any) -> None:
    """Tables are named as TorchRec does it, whole and exact; those of another module are no error."""
    with headrace.res.install(store.address, enabled_tables=enabled, **FAST) as streamer:
        train(make_module([(8, 4), (8, 4)], table_names=["a", "b"], table_offsets=[0, 0]), [1], [1])
        assert [table.spec.fqn for table in streamer.tables] == ["b"]
        train(make_module([(8, 4)], table_names=["x"], table_offsets=[0]), [1])
        streamer.flush()
        assert compare(streamer, store.address) == {"b": (1, 7), "x": (1, 7)}


def test_tables_that_no_list_names(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """A module without an enabled table, by either list, is not streamed, and the log names its tables."""
    with headrace.res.install(store.address, enabled_tables="users, films", **FAST) as streamer:
        train(make_module([(8, 4)], table_names=["films"], table_offsets=[0]), [1])
        assert "none of the tables 'films' is enabled by ' films', 'users': not streamed" in caplog.text
        own = make_module([(8, 4), (8, 4)], table_names=["users", "shops"], table_offsets=[0, 0])
        own.res_params.res_enabled_tables = ["shops"]  # FBGEMM 1.9's
        train(own, [1], [1])
        assert not streamer.tables
    for wrong in ("[1]", "[", [1], 3):
        with pytest.raises(ConfigError, match="enabled_tables"):
            headrace.res.install(store.address, enabled_tables=wrong, **FAST)


def test_tables_in_each_others_place_are_refused(store: FakeStore) -> None:
    """Two tables of a name, in one module or in two, would write the same rows; parts of one table are told apart."""
    with headrace.res.install(store.address, **FAST) as streamer:
        with pytest.raises(UnsupportedModelError, match="two tables are named 'c' and have the same rows"):
            train(make_module([(8, 4), (8, 4)], table_names=["c", "c"], table_offsets=[0, 0]), [1], [1])
        train(make_module([(8, 4)], table_names=["c"], table_offsets=[8]), [1])
        module = make_module([(8, 4)], table_names=["c"], table_offsets=[15])
        with pytest.raises(UnsupportedModelError, match="two tables are named 'c' and have the same rows"):
            train(module, [1])
        assert len(streamer.tables) == 1


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_modules_that_cannot_be_streamed(store: FakeStore, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    """A module's first lookup raises one clear line, or logs it and trains on; other modules are streamed."""
    with headrace.res.install(store.address, on_error=on_error, **FAST) as streamer:
        shared = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
        shared.weights_host.share_memory_()
        counts = make_module([(8, 4)], table_names=["b"], table_offsets=[0, 0])
        offset = make_module([(8, 4)], table_names=["c"], table_offsets=[-5])
        unknown = make_module([(8, 4)], table_names=["d"], table_offsets=[0])
        del unknown.embedding_specs
        for module, told in (
            (shared, "table 'a' is in memory shared with other processes"),
            (counts, "1 table_names and 2 table_offsets for 1 tables"),
            (offset, "table 'c': rows -5:3 are not in its 3"),
            (
                unknown,
                "this fbgemm_gpu is not known, 1.7 to 1.9 are: its SplitTableBatchedEmbeddingBagsCodegen has no 'emb",
            ),
        ):
            try:
                train(module, [1])
                assert on_error == "log"
            except HeadraceError as exc:
                assert on_error == "raise"
                assert told in str(exc)
            assert (told in caplog.text) == (on_error == "log")
        train(make_module([(8, 4)], table_names=["e"], table_offsets=[0]), [1])
        assert [table.spec.fqn for table in streamer.tables] == ["e"]


def test_a_first_lookup_that_failed_is_tried_again(
    store: FakeStore, streamer: RawEmbeddingStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on after an outage at a module's first lookup trains no module that is not streamed."""
    module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])

    def be_away(*_: Any, **__: Any) -> None:
        raise UnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(streamer._delivery, "add_tables", be_away)
        for _ in range(2):
            with pytest.raises(UnavailableError):
                train(module, [1])
    train(module, [2])
    streamer.flush()
    assert compare(streamer, store.address) == {"a": (1, 7)}


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_errors_of_others_are_theirs(store: FakeStore, on_error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute that is missing elsewhere than in the module passes as it is, for it is a bug."""
    with headrace.res.install(store.address, on_error=on_error, **FAST) as streamer:

        def fail(*_: Any) -> None:
            raise AttributeError("a bug")

        monkeypatch.setattr(streamer, "attach_tap", fail)
        with pytest.raises(AttributeError, match="a bug"):
            train(make_module([(8, 4)], table_names=["a"], table_offsets=[0]), [1])


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_makers_that_are_not_known(store: FakeStore, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    """Who makes the class and is none of FBGEMM's modules, or has none of its settings, is told when it does."""
    with headrace.res.install(store.address, on_error=on_error, **FAST) as streamer:
        module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
        del module.res_params
        for self, told in ((module, "has no 'res_params'"), (streamer, "test_makers_that_are_not_known made a Raw")):
            assert self is not None
            try:
                torch.classes.fbgemm.RawEmbeddingStreamer("uuid", True, 1, 0, [], [], []).stream()
                assert on_error == "log"
            except UnsupportedModelError as exc:
                assert on_error == "raise"
                assert told in str(exc)
            assert (told in caplog.text) == (on_error == "log")
        assert not streamer.tables


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_extras_that_cannot_be_stored(server: ServerProcess, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bad identities or meta of a later lookup raise; or the log names the first, and the rows go out without."""
    run = f"res-bad-{on_error}"
    with headrace.res.install(server.address, run=run, model=run, on_error=on_error, **FAST) as streamer:
        module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
        train(module, [1], hash_zch_identities=torch.tensor([7]))
        wrong: list[tuple[dict[str, torch.Tensor], str]] = [
            ({"hash_zch_runtime_meta": torch.zeros(1, 0)}, r"runtime meta is float32\[0\] a row"),
            (
                {"hash_zch_runtime_meta": torch.zeros(1, 2, dtype=torch.complex64)},
                r"runtime meta is complex64\[2\] a row",
            ),
            ({"hash_zch_runtime_meta": torch.tensor(3)}, r"hash_zch_runtime_meta of shape \(\) for 1 ids"),
            ({"hash_zch_identities": torch.zeros(1, 2, dtype=torch.int64)}, r"identities of shape \(1, 2\)"),
            ({"hash_zch_identities": torch.zeros(2, dtype=torch.int64)}, r"identities of shape \(2,\) for 1 ids"),
        ]
        for row, (extras, told) in enumerate(wrong, start=2):
            if on_error == "raise":
                with pytest.raises(RequestError, match=told):
                    train(module, [row], **extras)
            else:
                train(module, [row], **extras)
        streamer.flush()
        num_rows = 1 if on_error == "raise" else 6
        assert compare(streamer, server.address) == {f"{run}:a": (num_rows, 8 - num_rows)}
        assert caplog.text.count("what a lookup brings is not streamed: tables a: runtime meta") == (on_error == "log")
        assert caplog.text.count("is not streamed") == (on_error == "log")
        other = make_module([(8, 4)], table_names=["first"], table_offsets=[0])
        if on_error == "raise":
            with pytest.raises(RequestError, match="tables first: runtime meta"):
                train(other, [1], **wrong[0][0])
        else:
            train(other, [1], **wrong[0][0])
        train(other, [2])
        streamer.flush()
        num_rows = 1 if on_error == "raise" else 2
        assert compare(streamer, server.address)[f"{run}:first"] == (num_rows, 8 - num_rows)


def test_a_rank_without_streamed_tables_counts_steps(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """Its steps are those of the modules that it trains, and the log says once that nothing is streamed."""
    with headrace.res.install(store.address, enabled_tables=["users"], **FAST) as streamer:
        films = make_module([(8, 4)], table_names=["films"], table_offsets=[0])
        for step in range(3):
            with torch.no_grad():
                films(torch.tensor([1]), torch.tensor([0, 1]))
            train(films, [1])
            assert streamer.stats().step == step
        streamer.flush()
        assert streamer.stats().step == streamer.stats().acked_step == 3
        assert caplog.text.count("no table is streamed on this rank") == 1
        users = make_module([(8, 4)], table_names=["users"], table_offsets=[0])
        for step in range(3, 6):
            for module in (films, users, films):  # from now on only those that are streamed count
                train(module, [1])
            assert streamer.stats().step == step
    assert not torch.nn.modules.module._global_module_registration_hooks


def test_a_checkpoint_before_the_first_lookup(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """After `load_state_dict` a module's rows are compared at its first lookup: rows that differ are sent."""

    def start() -> RawEmbeddingStreamer:
        return headrace.res.install(server.address, run="res-resumed", model="res-resumed", **FAST)

    with start() as streamer:
        module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
        train(module, [1, 2])
        streamer.flush()
        state, saved = streamer.state_dict(), copy.deepcopy(module.state_dict())
        train(module, [2, 3])  # behind the checkpoint
    with start() as streamer:
        module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
        module.load_state_dict(saved)
        assert streamer.load_state_dict(state) == 0
        assert streamer.stats().step == 1
        train(module, [5])
        streamer.flush()
        assert streamer.stats().step == 2
        assert compare(streamer, server.address) == {"res-resumed:a": (4, 4)}
    with start() as streamer, pytest.MonkeyPatch.context() as patch:
        module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
        streamer.load_state_dict(state)

        def be_away(*_: Any) -> None:
            raise UnavailableError("away")

        patch.setattr(streamer, "_ask_store", be_away)
        train(module, [5])
        assert "sending every row of res-resumed:a: they could not be compared with the store's: away" in caplog.text
        streamer.flush()
        assert compare(streamer, server.address) == {"res-resumed:a": (8, 0)}


@pytest.mark.parametrize("on_error", ["raise", "log"])
@pytest.mark.parametrize(
    ("move", "told"),
    [
        (lambda module: module.double(), r"was float32\[8, 4\] when it was attached and is float64\[8, 4\] now"),
        (lambda module: module.to("meta"), "has been moved to the meta device"),
    ],
)
def test_a_module_that_is_moved(
    store: FakeStore, on_error: str, move: Callable[[Any], Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that gets another type, or loses its rows, after it was taken is told at the next flush or step."""
    with headrace.res.install(store.address, on_error=on_error, **FAST) as streamer:
        module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
        train(module, [1])
        move(module)
        if on_error == "raise":
            with pytest.raises(UnsupportedModelError, match=told):
                streamer.step()
        else:
            streamer.step()
            assert re.search(told, caplog.text)
        streamer.close(flush=False)


def test_a_server_that_is_away(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a server `install` raises and changes nothing; if it goes later, training goes on with the log."""
    for on_error in ("raise", "log"):
        with pytest.raises(UnavailableError):
            headrace.res.install("127.0.0.1:1", on_error=on_error, connect_timeout_s=0.1)
        assert is_original()
        assert not torch.nn.modules.module._global_module_registration_hooks
    with headrace.res.install(store.address, on_error="log", **FAST) as streamer:

        def be_away(*_: Any, **__: Any) -> None:
            raise UnavailableError("away")

        with monkeypatch.context() as patch:
            patch.setattr(streamer._delivery, "add_tables", be_away)
            for _ in range(2):
                train(make_module([(8, 4)], table_names=["a"], table_offsets=[0]), [1])
        assert caplog.text.count("a module is not streamed: away") == 2
        assert not streamer.tables


def test_makers_of_modules_are_not_asked(streamer: RawEmbeddingStreamer) -> None:
    """Only TorchRec's kernels are: an attribute of another class may be anything, or raise anything."""

    class Trainer:
        def __init__(self) -> None:
            self._config = type("Config", (), {"embedding_tables": ["users"]})
            self.wrapper = Wrapper()

    class Wrapper:
        def __init__(self) -> None:
            self.module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.module, name)  # until there is one: RecursionError

    train(Trainer().wrapper.module, [1])
    assert len(streamer.tables) == 1


def test_more_ranks_than_at_install(streamer: RawEmbeddingStreamer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.distributed` that is initialized after `install` is told: the ranks would fence one another."""

    class Later(SoloWorld):
        size = 2

    module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
    monkeypatch.setattr("headrace.streamer.res_stand_in.current_world", Later)
    with pytest.raises(ConfigError, match="as one of 1 ranks, and now there are 2"):
        train(module, [1])
    assert not streamer.tables


def test_where_the_address_is_from(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADRACE_SERVER is an address, LOCAL_RES_PORT a port of this machine as for RES; one of them is needed."""
    port = store.address.rpartition(":")[2]
    monkeypatch.delenv("HEADRACE_SERVER", raising=False)
    monkeypatch.setenv("LOCAL_RES_PORT", port)
    headrace.res.install(**FAST).close()
    monkeypatch.setenv("HEADRACE_SERVER", store.address)
    monkeypatch.setenv("LOCAL_RES_PORT", "1")
    headrace.res.install(**FAST).close()
    monkeypatch.delenv("HEADRACE_SERVER")
    with pytest.raises(UnavailableError):
        headrace.res.install(**{**FAST, "connect_timeout_s": 0.1})
    for wrong in ("", "70000", "x"):
        monkeypatch.setenv("LOCAL_RES_PORT", wrong)
        with pytest.raises(ConfigError, match="HEADRACE_SERVER"):
            headrace.res.install(**FAST)
    with RawEmbeddingStreamer(store.address, run="mine", **FAST) as mine:
        assert headrace.res.install(streamer=mine) is mine
        mine.close()
        with pytest.raises(ConfigError, match="not both"):
            headrace.res.install(store.address, streamer=mine)
        with pytest.raises(ConfigError, match="closed"):
            headrace.res.install(streamer=mine)


@pytest.mark.torchrec
def test_sharded_tables(server: ServerProcess) -> None:
    """Modules that `DistributedModelParallel` makes on two ranks stream their rows and columns of each table.

    A rank without any counts the same steps. A table that is moved to another rank is told at the next flush.
    """
    from res_training import NUM_STEPS, ROWS, train_for_res_on_rank

    (first, alone, told), (second, with_all, told_there) = run_ranks(train_for_res_on_rank, 2, server.address)
    assert [(each.differs, each.step) for each in (first, second)] == [("", NUM_STEPS)] * 2
    assert sorted(first.parts) == ["columns 0 0", "columns 0 4", "rows 0 0"]
    assert sorted(second.parts) == ["columns 0 12", "columns 0 8", "rows 51 0", "whole 0 0"]
    assert first.num_compared + second.num_compared == ROWS["rows"] + 4 * ROWS["columns"] + ROWS["whole"]
    assert alone == ("", 0, NUM_STEPS, [])
    assert with_all == ("", ROWS["whole"], NUM_STEPS, ["whole 0 0"])
    assert told == ""
    assert "is not what was attached: the model has another module" in told_there
