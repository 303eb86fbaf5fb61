"""Files that a backfill is given: nothing in them runs, and whatever is wrong is one line that names the file."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import CommandLine
from safetensors.numpy import save_file
from table_rows import ITEMS, values_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from headrace.schemas.errors import ConfigError, CorruptionError, HeadraceError, RequestError
from headrace.schemas.tables import DType, StateKind
from headrace.scripts.table_io.columns import Piece, RawColumn
from headrace.scripts.table_io.dcp import METADATA_NAME
from headrace.scripts.table_io.dense import find_states
from headrace.scripts.table_io.source import BackfillConfig, Naming

TABLE = "sparse.items.weight"


class Evil:
    """Leaves a mark where it is run."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def _all_rows(path: Path, *maps: str, tables: tuple[str, ...] | None = None, **known: Any) -> dict[str, Any]:
    """Return every column of the one table of a source, read in small chunks."""
    config = BackfillConfig(maps=maps, tables=tables)
    (table,) = config.open(path, known or None).tables
    chunks = list(table.chunks(500))
    columns = {field: np.concatenate([chunk.columns[field] for chunk in chunks]) for field in chunks[0].columns}
    return {"spec": table.spec, "ids": np.concatenate([chunk.row_ids for chunk in chunks]), **columns}


def _evil_checkpoint(path: Path, content: Any) -> Path:
    dcp.save({TABLE: torch.ones(4, 2)}, checkpoint_id=str(path), no_dist=True)
    (path / METADATA_NAME).write_bytes(pickle.dumps(content))
    return path


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_file_runs_code(tmp_path: Path, run: CommandLine) -> None:
    """A pickle that would run something does not, in a state dict, a checkpoint's metadata or its parts."""
    mark = tmp_path / "mark"
    torch.save({TABLE: torch.ones(4, 2), "evil": Evil(mark)}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({TABLE: Evil(mark)}))
    good = tmp_path / "good"
    dcp.save({TABLE: torch.ones(4, 2)}, checkpoint_id=str(good), no_dist=True)
    metadata = pickle.loads((good / METADATA_NAME).read_bytes())
    metadata.planner_data = Evil(mark)
    part = tmp_path / "part"
    dcp.save({TABLE: torch.ones(4, 2)}, checkpoint_id=str(part), no_dist=True)
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    part_metadata = pickle.loads((part / METADATA_NAME).read_bytes())
    for info in part_metadata.storage_data.values():
        info.offset, info.length = 0, len(buffer.getvalue())
    (part / METADATA_NAME).write_bytes(pickle.dumps(part_metadata))
    (part / "__0_0.distcp").write_bytes(buffer.getvalue())
    sources = [
        tmp_path / "evil.pt",
        tmp_path / "plain.pt",
        _evil_checkpoint(tmp_path / "evil-1", Evil(mark)),
        _evil_checkpoint(tmp_path / "evil-2", metadata),
        _evil_checkpoint(tmp_path / "evil-3", {"a": (np.load, str.__add__)}),
        part,
    ]
    for source in sources:
        assert source.name in run.refused("backfill", source, "--data", tmp_path / "data", "--table", TABLE)
        assert not mark.exists()
        assert not (tmp_path / "data").exists()
    assert pickle.loads(pickle.dumps(Evil(mark))) is None  # it would have
    assert mark.exists()


def test_metadata_that_names_other_files_is_refused(tmp_path: Path) -> None:
    """A checkpoint's metadata cannot point out of its directory."""
    dcp.save({TABLE: torch.ones(4, 2)}, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    file = tmp_path / "checkpoint" / METADATA_NAME
    metadata = pickle.loads(file.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../checkpoint/__0_0.distcp"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(RequestError, match="not in this directory"):
        _all_rows(tmp_path / "checkpoint", tables=(TABLE,))


def test_metadata_of_another_python_is_read(tmp_path: Path) -> None:
    """Python 3.13 writes that its paths are of another module than those of all others."""
    weights = torch.randn(4, 2)
    dcp.save({TABLE: weights}, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    file = tmp_path / "checkpoint" / METADATA_NAME
    # By protocol 2, which has no lengths that a longer name would change.
    pickled = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)
    by_another = re.sub(rb"cpathlib(\._local)?\n", b"cpathlib._local\n", pickled)
    assert b"cpathlib._local\nPosixPath\n" in by_another
    file.write_bytes(by_another)
    rows = _all_rows(tmp_path / "checkpoint", tables=(TABLE,))
    assert rows["weights"].tobytes() == weights.numpy().tobytes()


def test_state_dicts(tmp_path: Path) -> None:
    """Nested dicts, views and tied storage are read as they are, states found by their names or by rules."""
    weights, other = torch.randn(50, 6), torch.randn(90, 12)
    content = {
        "model": {TABLE: weights, "view": other[10:60, 3:9], "dense": torch.randn(3, 3), "n": 4},
        "optimizer": {"state": {TABLE: {"items.momentum1": torch.arange(50.0), "step": torch.tensor(3.0)}}},
    }
    torch.save(content, tmp_path / "state.pt")
    rows = _all_rows(tmp_path / "state.pt", f"model.{TABLE}={TABLE}")
    assert rows["weights"].tobytes() == weights.numpy().tobytes()
    assert rows["state:sum"][:, 0].tolist() == list(range(50)), "TorchRec has another name for it"
    assert [state.name for state in rows["spec"].states] == ["sum"]
    rows = _all_rows(tmp_path / "state.pt", "model.v*=x*", tables=("xiew",))
    assert rows["weights"].tobytes() == content["model"]["view"].contiguous().numpy().tobytes()
    with pytest.raises(ConfigError, match=r"which tensors are tables\?.*model\.dense"):
        _all_rows(tmp_path / "state.pt")
    torch.save({"t": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(RequestError, match=r"'t' is sparse; save it as tensor\.to_dense\(\)"):
        _all_rows(tmp_path / "sparse.pt", tables=("t",))


def test_a_tensor_that_cannot_be_read_is_an_error_for_who_wants_it(tmp_path: Path) -> None:
    """What is not row after row, and is in the same file or checkpoint, keeps no other table out."""
    matrix = torch.arange(16.0).reshape(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # in beta, says torch
        compressed = {
            layout: matrix.to_sparse(layout=getattr(torch, layout)) for layout in ("sparse_csr", "sparse_csc")
        }
        compressed["sparse_bsr"] = matrix.to_sparse(layout=torch.sparse_bsr, blocksize=(2, 2))
    others = {"turned": matrix.t(), "sparse": matrix.to_sparse(), **compressed}
    torch.save({TABLE: matrix, **others}, tmp_path / "a.pt")
    dcp.save({TABLE: matrix, "turned": matrix.t()}, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    for source, names in ((tmp_path / "a.pt", others), (tmp_path / "a", ("turned",))):
        assert _all_rows(source, tables=(TABLE,))["weights"].tolist() == matrix.tolist()
        for name in names:
            for rule, table in ((f"{name}=other", "other"), (f"{name}={TABLE}/sum", TABLE)):
                why = "is sparse" if name.startswith("sparse") else "does not lie row after row"
                with pytest.raises(RequestError, match=f"'{name}' {why}"):
                    _all_rows(source, rule, tables=(table,))


def test_checkpoint_in_parts(tmp_path: Path) -> None:
    """A checkpoint's tensor in many parts is read whole; a part that is missing, cut or moved is named."""
    path = tmp_path / "checkpoint"
    tensor = torch.arange(24.0).reshape(8, 3)
    dcp.save({TABLE: tensor, "other": torch.ones(2)}, checkpoint_id=str(path), no_dist=True)
    assert _all_rows(path, tables=(TABLE,))["weights"].tolist() == tensor.tolist()
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-900])
    with pytest.raises(HeadraceError, match="__0_0"):
        _all_rows(path, tables=(TABLE,))
    data.unlink()
    with pytest.raises(CorruptionError, match=r"__0_0\.distcp is missing"):
        _all_rows(path, tables=(TABLE,))
    (path / METADATA_NAME).write_bytes(b"\x80\x04junk")
    with pytest.raises(CorruptionError, match="damaged"):
        _all_rows(path, tables=(TABLE,))
    (path / METADATA_NAME).unlink()
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        _all_rows(path, tables=(TABLE,))
    raw = tmp_path / "raw"
    raw.write_bytes(np.arange(24, dtype="<f4").tobytes())

    def piece(row: int, column: int, num_rows: int, width: int, offset: int) -> Piece:
        return Piece(
            row=row, column=column, num_rows=num_rows, width=width, path=raw, offset=offset, row_bytes=4 * width
        )

    parts = [piece(0, 0, 3, 3, 0), piece(3, 0, 5, 1, 36), piece(3, 1, 5, 2, 56)]
    column = RawColumn("x", DType.FLOAT32, (8, 3), parts)
    expected = np.zeros((8, 3), "<f4")
    expected[:3] = np.arange(9).reshape(3, 3)
    expected[3:, :1] = np.arange(9, 14).reshape(5, 1)
    expected[3:, 1:] = np.arange(14, 24).reshape(5, 2)
    assert column.read(0, 8).tolist() == expected.tolist()
    assert column.read(2, 6).tolist() == expected[2:6].tolist()
    assert column.num_column_shards == 2
    for wrong in (parts[:2], [*parts, parts[2]], [parts[0], parts[1], piece(2, 1, 5, 2, 56)]):
        with pytest.raises(CorruptionError, match="parts"):
            RawColumn("x", DType.FLOAT32, (8, 3), wrong)
    with pytest.raises(CorruptionError, match="it is cut"):
        RawColumn("x", DType.FLOAT32, (8, 3), [*parts[:2], piece(3, 1, 5, 2, 60)])


def test_safetensors(tmp_path: Path) -> None:
    """A file of the library's is read; a cut one, and one with lies in its header, are damaged."""
    values = np.random.default_rng(0).random((40, 6), np.float32)
    save_file({"emb": values, "emb.momentum": np.ones(40, np.float32)}, tmp_path / "a.safetensors")
    rows = _all_rows(tmp_path / "a.safetensors", "emb=t", "emb.momentum=t/momentum")
    assert rows["weights"].tobytes() == values.tobytes()
    assert rows["state:momentum"].tolist() == [[1.0]] * 40
    header = json.dumps({"__metadata__": None, "t": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert _all_rows(tmp_path / "b.safetensors", tables=("t",))["weights"].tolist() == [[0.0]]
    data = (tmp_path / "a.safetensors").read_bytes()
    for wrong in (data[:-1], data[:7], data.replace(b"[40,6]", b"[40,7]"), b"\xff" * 8 + data[8:]):
        (tmp_path / "b.safetensors").write_bytes(wrong)
        with pytest.raises(CorruptionError, match=r"b\.safetensors"):
            _all_rows(tmp_path / "b.safetensors", "emb=t")


def _parquet(path: Path, ids: Any, **changes: Any) -> Path:
    weights = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(len(ids) * 2, dtype=np.float32)), 2)
    columns = {"row_id": pa.array(ids, pa.int64()), "weights": weights} | changes
    pq.write_table(pa.table({name: column for name, column in columns.items() if column is not None}), path)
    return path


def test_parquet_of_others(tmp_path: Path) -> None:
    """A file of somebody else's is a table of virtual ids; repeated ids, wrong types and empty values are refused."""
    path = _parquet(tmp_path / "t.parquet", [3, 9, 2**62])
    rows = _all_rows(path)
    assert (rows["spec"].num_rows, rows["ids"].tolist()) == (0, [3, 9, 2**62])
    for ids in ([3, 3], [4, 2], [-1, 5]):
        (table,) = BackfillConfig().open(_parquet(path, ids), None).tables
        with pytest.raises(RequestError, match=r"t\.parquet: table 't': row"):
            table.check_ids()
    for changes in (
        {"row_id": pa.array([1.0, 2.0])},
        {"weights": pa.array([["a"], ["b"]])},
        {"weights": pa.array([[], [2.0]])},
        {"weights": pa.array([None, [2.0]])},
        {"weights": None},
        {"epoch": pa.array([1, 2])},
        {"deleted": pa.array([False, True])},  # Headrace 0.2 marked rows of zeros so
        {"state:sum": pa.array(["a", "b"])},
    ):
        with pytest.raises(RequestError, match=r"t\.parquet"):
            BackfillConfig().open(_parquet(path, [1, 2], **changes), None)
    with pytest.raises(RequestError, match="empty values"):
        _all_rows(_parquet(path, [1, None]))
    for changes in (
        {"epoch": pa.array([1, 0]), "step": pa.array([0, 0])},
        {"identity": pa.array([1, None])},
    ):
        (table,) = BackfillConfig().open(_parquet(path, [1, 2], **changes), None).tables
        with pytest.raises(RequestError, match=r"t\.parquet: (column 'identity' has empty|.* an epoch)"):
            table.check_ids()
    pq.write_table(pa.table([pa.array([1, 2])] * 2, names=["row_id", "row_id"]), path)
    with pytest.raises(RequestError, match="two columns have the name 'row_id'"):
        BackfillConfig().open(path, None)
    _parquet(path, [1, 2])
    data = path.read_bytes()
    for wrong in (data[:-1], data[:20], b"junk"):
        path.write_bytes(wrong)
        with pytest.raises(CorruptionError, match="no Parquet file"):
            _all_rows(path)


@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_parquet_of_lists_without_a_size(tmp_path: Path, make: Any) -> None:
    """Lists as pandas, Polars and Spark write them are rows, as long as all are as long as the first."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    lists = {
        "weights": pa.array(list(values), make(pa.float32())),
        "state:exp_avg": pa.array(list(values + 1), make(pa.float32())),
        "state:sums": pa.array(list(values[:, :2]), make(pa.float32())),
        "state:sum": pa.array(list(values[:, :1]), make(pa.float32())),
    }
    rows = _all_rows(_parquet(tmp_path / "t.parquet", [1, 2, 3], **lists))
    assert rows["spec"].dim == 4
    assert [(state.name, state.kind, state.width) for state in rows["spec"].states] == [
        ("exp_avg", StateKind.POINTWISE, 0),
        ("sums", StateKind.ROWWISE, 2),
        ("sum", StateKind.ROWWISE, 1),
    ]
    assert rows["weights"].tobytes() == values.tobytes()
    assert rows["state:sum"].tobytes() == values[:, :1].tobytes()
    assert rows["state:sums"].tobytes() == np.ascontiguousarray(values[:, :2]).tobytes()
    known = {"t": dataclasses.replace(rows["spec"], num_rows=5)}
    assert _all_rows(tmp_path / "t.parquet", **known)["spec"].num_rows == 5
    with pytest.raises(HeadraceError, match="dim"):
        _all_rows(tmp_path / "t.parquet", t=dataclasses.replace(rows["spec"], dim=3))
    for wrong, text in (([[1.0] * 4, [1.0] * 3, [1.0] * 5], "other than 4 values"), ([[1.0], None, [1.0]], "empty")):
        path = _parquet(tmp_path / "t.parquet", [1, 2, 3], weights=pa.array(wrong, make(pa.float32())))
        with pytest.raises(RequestError, match=text):
            _all_rows(path)
    sums = pa.array([[1.0], [1.0, 2.0], []], make(pa.float32()))
    with pytest.raises(RequestError, match="other than 1 values"):
        _all_rows(_parquet(tmp_path / "t.parquet", [1, 2, 3], **{"state:sum": sums}))
    with pytest.raises(RequestError, match=r"'row_id' is .*list"):
        _all_rows(_parquet(tmp_path / "t.parquet", [1], row_id=pa.array([[1]], make(pa.int64()))))


def test_shapes_are_checked_against_the_target(tmp_path: Path) -> None:
    """A tensor of other rows, columns or type than the server's table is refused before anything is read."""
    good = values_of(ITEMS, np.arange(500))
    names = {"weights": ITEMS.fqn, "state:momentum1": f"{ITEMS.fqn}/momentum1", "state:exp_avg": f"{ITEMS.fqn}/exp_avg"}
    arrays = {name: good[field] for field, name in names.items()}
    path = tmp_path / "t.safetensors"
    save_file(arrays, path)
    known = {ITEMS.fqn: ITEMS}
    assert BackfillConfig().open(path, known).tables[0].spec == ITEMS
    wrong: list[tuple[dict[str, Any], str]] = [
        ({ITEMS.fqn: good["weights"][:-1]}, "num_rows|shape"),
        ({ITEMS.fqn: good["weights"][:, :-1]}, "exp_avg|dim"),
        ({ITEMS.fqn: good["weights"].astype("<f8")}, "dtype"),
        ({f"{ITEMS.fqn}/momentum1": np.zeros((500, 3), "<f4")}, "momentum1"),
        ({f"{ITEMS.fqn}/exp_avg": np.zeros((499, 6), "<f4")}, "exp_avg"),
        ({f"{ITEMS.fqn}/exp_avg": None}, "no tensor for state 'exp_avg'"),
        ({f"{ITEMS.fqn}/more": np.zeros(500, "<f4")}, "no state 'more'"),
    ]
    for changes, text in wrong:
        save_file({name: array for name, array in (arrays | changes).items() if array is not None}, path)
        with pytest.raises(HeadraceError, match=text):
            BackfillConfig().open(path, known)
    save_file({ITEMS.fqn: good["weights"]}, path)
    (table,) = BackfillConfig(zero_states=True).open(path, known).tables
    chunk = next(table.chunks(1 << 20))
    assert not chunk.columns["state:exp_avg"].any()


def test_damaged_notes(tmp_path: Path) -> None:
    """Notes of an export that do not fit its tensors are damage, not a crash."""
    values = np.zeros((4, 2), np.float32)
    packed = ["t", 4, 2, 1, [], False]
    good = {"spec": packed, "first_row": 0, "precision": None, "weights": "t", "states": {}, "identities": None}
    for note in (
        {**good, "weights": "nowhere"},
        {**good, "spec": packed[:-1]},
        {**good, "first_row": 1},
        {**good, "states": {"a": "t"}, "spec": ["t", 4, 2, 1, [["a", 9, 1, 0]], False]},
        {**good, "states": ["t"]},
        {"spec": packed},
    ):
        notes = json.dumps({"version": 1, "tables": [note]})
        save_file({"t": values}, tmp_path / "t.safetensors", metadata={"headrace": notes})
        with pytest.raises(HeadraceError, match=r"t\.safetensors"):
            BackfillConfig().open(tmp_path / "t.safetensors", None)


def test_deep_nests_are_damage(tmp_path: Path) -> None:
    """Notes and headers that nest deeper than Python goes are damage, not a crash."""
    deep, values = "[" * 100_000, np.zeros((4, 2), np.float32)
    save_file({"t": values}, tmp_path / "t.safetensors", metadata={"headrace": deep})
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 2)
    table = pa.table({"row_id": pa.array(range(4), pa.int64()), "weights": column})
    pq.write_table(table.replace_schema_metadata({"headrace": deep}), tmp_path / "t.parquet")
    for name in ("t.safetensors", "t.parquet"):
        with pytest.raises(CorruptionError, match=name):
            BackfillConfig().open(tmp_path / name, None)


def test_no_name_stands_for_two(tmp_path: Path) -> None:
    """Tensors of one name, and tables that rules make one, are refused: neither is taken for the other."""
    torch.save({"a.b": torch.ones(3, 2), "a": {"b": torch.zeros(3, 2)}}, tmp_path / "t.pt")
    with pytest.raises(RequestError, match=r"two tensors have the name 'a\.b'"):
        BackfillConfig(tables=("a.b",)).open(tmp_path / "t.pt", None)
    notes = [
        {"spec": [fqn, 4, 2, 1, [], False], "first_row": 0, "precision": None}
        | {"weights": fqn, "states": {}, "identities": None}
        for fqn in ("a", "b")
    ]
    values = {fqn: np.zeros((4, 2), np.float32) for fqn in ("a", "b")}
    packed = json.dumps({"version": 1, "tables": notes})
    save_file(values, tmp_path / "t.safetensors", metadata={"headrace": packed})
    with pytest.raises(ConfigError, match="two of its tables would be 'one'"):
        BackfillConfig(maps=("*=one",)).open(tmp_path / "t.safetensors", None)


def test_rules_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    """A rule that is misspelled is said, and not a table made without what it was to bring."""
    save_file(dict(a=np.ones((3, 2), "<f4"), s=np.ones(3, "<f4")), tmp_path / "t.safetensors")
    with pytest.raises(ConfigError, match=r"--map 'S=a/sum': fits nothing in .*t\.safetensors"):
        BackfillConfig(maps=("S=a/sum",), tables=("a",)).open(tmp_path / "t.safetensors", None)
    # One that fits only what an earlier rule has taken is no mistake.
    BackfillConfig(maps=("a=a", "s=a/sum", "*=rest")).open(tmp_path / "t.safetensors", None)


def test_rules() -> None:
    """A rule's star stands for anything, the same on both sides; the first rule that fits counts."""
    naming = Naming(["model.*.weight=*.weight", "a=b", "opt.*.*.m=*/m", "*=rest"])
    assert naming.target_of("model.x.y.weight") == "x.y.weight"
    assert [naming.target_of(name) for name in ("a", "opt.q.r.m", "else")] == ["b", "q/m", "rest"]
    assert Naming([]).target_of("a") is None
    for rule in ("a", "=b", "a=", "a=*"):
        with pytest.raises(ConfigError, match="--map"):
            Naming([rule])
    names = ["t", "t/own", "state.t.x.mom", "optim.state.t.exp_avg", "optim.state.t.step", "state.tt.no"]
    assert find_states("t", "t", names) == {
        "own": "t/own",
        "mom": "state.t.x.mom",
        "exp_avg": "optim.state.t.exp_avg",
    }


def test_identities_are_found_or_mapped(tmp_path: Path) -> None:
    """The raw ids behind rows come from a tensor of that name, or one that a rule names; they are int64, one a row."""
    weights, raw_ids = torch.randn(6, 2), torch.arange(6) * 7
    state = {TABLE: weights, f"state.{TABLE}.items.identities:": raw_ids, "ids": raw_ids, "floats": raw_ids.float()}
    dcp.save(state, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    for maps in ((), (f"ids={TABLE}/identities:",)):
        config = BackfillConfig(maps=maps, tables=(TABLE,))
        (table,) = config.open(tmp_path / "checkpoint", None).tables
        assert (table.spec.has_identities, table.spec.states) == (True, ())
        (chunk,) = table.chunks(10_000)
        assert chunk.identities is not None
        assert chunk.identities.tolist() == raw_ids.tolist()
    config = BackfillConfig(maps=(f"floats={TABLE}/identities:",), tables=(TABLE,))
    with pytest.raises(RequestError, match="are FLOAT32, not INT64"):
        config.open(tmp_path / "checkpoint", None)


@pytest.mark.parametrize("name", ["last.ckpt", "checkpoint"])
def test_an_optimizers_step_comes_with_the_states(tmp_path: Path, name: str) -> None:
    """Of a file of Lightning, or a checkpoint: the count is the table's, and no state of a layer is a table."""
    model = torch.nn.ModuleDict({"user": torch.nn.Embedding(6, 2), "top": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model["top"](model["user"](torch.arange(6))).sum().backward()
        optimizer.step()
    path = tmp_path / name
    if name == "checkpoint":
        weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        dcp.save({"model": weights, "optim": states}, checkpoint_id=str(path), no_dist=True)
        configs = BackfillConfig(maps=("model.*=*",)), BackfillConfig(maps=("model.*=*", "*=*"))
    else:
        torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}, path)
        by_number = "optimizer_states.0.state.0.*=user.weight/*"
        configs = BackfillConfig(maps=("state_dict.*=*", by_number)), BackfillConfig(maps=("state_dict.*=*",))
    source = configs[0].open(path, None)
    (table,) = source.tables
    assert (table.spec.fqn, [state.name for state in table.spec.states]) == ("user.weight", ["exp_avg", "exp_avg_sq"])
    assert table.scalars == (("step", DType.FLOAT32, np.float32(3).tobytes()),)
    again = configs[1].open(path, None)
    assert [each.spec.fqn for each in again.tables] == ["user.weight"]
    assert bool(again.tables[0].scalars) is (name == "checkpoint")  # it has no states without the rule
