"""Small files that say that they are large, for each format that a backfill reads.

Each function writes one into a folder and returns its path. Read naively, each takes a GiB or never ends.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp

__all__ = ["FALSE_SIZES", "TABLE"]

TABLE = "items.weight"
_MANY = 40_000_000


def _varint(number: int, num_bytes: int = 0) -> bytes:
    """Return a number as in the footer of a Parquet file: zigzag, in at least so many bytes."""
    digits, number = bytearray(), 2 * number
    while number >= 128 or len(digits) < num_bytes - 1:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def _long_row(folder: Path) -> Path:
    """One row of forty million equal values, which a few bytes encode."""
    rows = pa.ListArray.from_arrays(pa.array([0, _MANY], pa.int32()), pa.array(np.zeros(_MANY, np.int8)))
    table = pa.table({"row_id": pa.array([0], pa.int64()), "weights": rows})
    pq.write_table(table, folder / "long.parquet", write_statistics=False)
    assert (folder / "long.parquet").stat().st_size < 1000
    return folder / "long.parquet"


def _long_row_with_a_short_footer(folder: Path) -> Path:
    """The same; its footer says that the row has four values, and only the page knows better."""
    path = _long_row(folder)
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    known = _varint(_MANY)
    at = data.find(known, footer)
    while at >= 0:
        data[at : at + len(known)] = _varint(4, len(known))
        at = data.find(known, at + 1)
    assert pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(1).num_values == 4
    path.write_bytes(data)
    return path


def _parquet(folder: Path) -> tuple[Path, bytes, bytes]:
    """Return a sound file's path, what is before its footer, and the footer."""
    weights = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4000, dtype=np.float32)), 4)
    table = pa.table({"row_id": pa.array(range(1000), pa.int64()), "weights": weights})
    path = folder / "false.parquet"
    pq.write_table(table, path, write_statistics=False, compression="zstd", use_dictionary=False)
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return path, data[:footer], data[footer:-8]


def _chunk_beyond_the_file(folder: Path) -> Path:
    """A column of 2³¹ - 1 bytes."""
    path, data, footer = _parquet(folder)
    size = pq.ParquetFile(path).metadata.row_group(0).column(1).total_compressed_size
    footer = footer.replace(_varint(size), _varint(2**31 - 1))
    path.write_bytes(data + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


def _page_of_gigabytes(folder: Path) -> Path:
    """A page that is 2³¹ - 1 bytes long once it is decompressed."""
    path, data, footer = _parquet(folder)
    at = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    end = data.index(b"\x15", at + 3)  # the next field: 15 00 is the page's type, 15 and a number its size
    data = data[: at + 3] + _varint(2**31 - 1) + data[end:]
    path.write_bytes(data + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


def _checkpoint(folder: Path, metadata: bytes) -> Path:
    dcp.save({TABLE: torch.ones(4, 2)}, checkpoint_id=str(folder / "checkpoint"), no_dist=True)
    (folder / "checkpoint" / ".metadata").write_bytes(metadata)
    return folder / "checkpoint"


def _bytes_in_eleven(folder: Path) -> Path:
    """Eleven bytes, of which nine say that a GiB follows."""
    data = b"\x80\x04\x8e" + (1 << 30).to_bytes(8, "little")
    assert len(data) == 11
    return _checkpoint(folder, data)


def _far_memo(folder: Path) -> Path:
    """Nine bytes that note an object in place 2²⁶, and those before have to be made."""
    return _checkpoint(folder, b"\x80\x04Nr" + (1 << 26).to_bytes(4, "little") + b".")


def _nested_key(folder: Path) -> Path:
    """A dict whose key is a tuple of a tuple twice, and so on: Python goes through 2⁶⁴ of them."""
    key: tuple[object, ...] = ()
    for _ in range(64):
        key = (key, key)
    pickled = pickle.dumps(key, protocol=4)
    assert pickled[2:3] == b"\x95"  # the length of a frame follows
    return _checkpoint(folder, b"\x80\x04}" + pickled[11:-1] + b"Ns.")


def _false_metadata(folder: Path) -> Path:
    """A tensor, and its only part, of 2⁵⁰ elements."""
    path = _checkpoint(folder, b"")
    dcp.save({TABLE: torch.ones(4, 2)}, checkpoint_id=str(path), no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata[TABLE]
    tensor.size = tensor.chunks[0].sizes = torch.Size((1 << 40, 1 << 10))
    for info in metadata.storage_data.values():
        info.length = 1 << 60
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def _archive(folder: Path, pickled: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(folder / "false.pt", "w") as archive:
        for name, data in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little", **members}.items():
            archive.writestr(f"archive/{name}", data)
    return folder / "false.pt"


def _call(name: str) -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00a" + name.encode()


def _bytearray(folder: Path) -> Path:
    """A dict with `bytearray(2³⁰)`, a call that torch allows."""
    number = b"\x8a\x08" + (1 << 30).to_bytes(8, "little")
    return _archive(folder, _call("cbuiltins\nbytearray\n") + number + b"\x85Rs.")


def _encoded_again(folder: Path) -> Path:
    """A text of 64 bytes, encoded as hex 24 times, which torch allows too."""
    encode, text = b"c_codecs\nencode\n", b"X\x40\x00\x00\x00" + b"a" * 64
    latin, hexed = b"X\x06\x00\x00\x00latin1\x86R", b"X\x03\x00\x00\x00hex\x86R"
    return _archive(folder, _call("") + encode * 25 + text + latin + hexed * 24 + b"s.")


def _same_dicts(folder: Path) -> Path:
    """A dict that holds one dict ten times, which holds one ten times, and so on: 10¹² tensors."""
    content: dict[str, object] = {"w": torch.ones(2, 2)}
    for _ in range(12):
        content = {str(number): content for number in range(10)}
    torch.save(content, folder / "same.pt")
    return folder / "same.pt"


def _false_tensor(folder: Path) -> Path:
    """A tensor of 65535 × 65535 elements in a storage of 16."""
    torch.save({TABLE: torch.ones(4, 4)}, folder / "false.pt")
    with zipfile.ZipFile(folder / "false.pt") as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    pickled, shape = members.pop("data.pkl"), b"K\x04K\x04\x86"
    assert pickled.count(shape) == 1
    return _archive(folder, pickled.replace(shape, b"M\xff\xffM\xff\xff\x86"), **members)


def _false_member(folder: Path) -> Path:
    """An archive whose directory says that a member has 2³¹ - 1 bytes."""
    torch.save({TABLE: torch.ones(4, 4)}, folder / "false.pt")
    data = bytearray((folder / "false.pt").read_bytes())
    at = data.rindex(b"PK\x01\x02", 0, data.index(b"data.pkl", data.index(b"PK\x01\x02")))
    data[at + 20 : at + 28] = (2**31 - 1).to_bytes(4, "little") * 2
    (folder / "false.pt").write_bytes(data)
    return folder / "false.pt"


def _safetensors(folder: Path, shape: list[int], offsets: list[int]) -> Path:
    header = json.dumps({TABLE: {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    (folder / "false.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    return folder / "false.safetensors"


def _false_safetensors(folder: Path) -> Path:
    """A tensor of 2⁴⁰ bytes in 64."""
    return _safetensors(folder, [1 << 30, 256], [0, 1 << 40])


def _false_shape(folder: Path) -> Path:
    """A tensor whose shape is more than its bytes."""
    return _safetensors(folder, [1 << 30, 256], [0, 64])


def _empty_shape(folder: Path) -> Path:
    """A tensor of 2⁴⁰ rows without columns."""
    return _safetensors(folder, [1 << 40, 0], [0, 0])


def _false_header(folder: Path) -> Path:
    """A header of 2⁶² bytes."""
    (folder / "false.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    return folder / "false.safetensors"


FALSE_SIZES: tuple[Callable[[Path], Path], ...] = (
    *(_long_row, _long_row_with_a_short_footer, _chunk_beyond_the_file, _page_of_gigabytes),
    *(_bytes_in_eleven, _far_memo, _nested_key, _false_metadata),
    *(_bytearray, _encoded_again, _same_dicts, _false_tensor, _false_member),
    *(_false_safetensors, _false_shape, _empty_shape, _false_header),
)
