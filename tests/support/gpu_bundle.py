"""What `scripts/check-gpu` needs on a machine with a GPU that reaches no package index, as one folder of some 60 MB.

    python tests/support/gpu_bundle.py make DIR           # where there is an index
    python3 DIR/gpu_bundle.py install DIR SITE            # there
    PYTHON=python3 PYTHONPATH=SITE scripts/check-gpu OUT  # in a checkout there

That machine brings Python 3.12, torch 2.11 for CUDA 13 with NVRTC and cuda-bindings, compute-sanitizer, numpy, pytest
with xdist and timeout, hypothesis, psutil and the rest of `pyproject.toml`. FBGEMM's wheel has 465 MB, nearly all of
it code for GPUs: the folder keeps what a GPU of compute capability 9.0 runs of it, without what the tests never call.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

__all__ = ["install", "make", "unused_code"]

ARCHITECTURE = 90
FBGEMM = "fbgemm_gpu==1.6.0"
WHEELS = (
    "crc32c==2.9.post0",
    "ply==3.11",
    "pytest-asyncio==1.5.0",
    "rocksdict==0.3.29",
    "thriftpy2==0.7.1",
    # For TorchRec. tensordict needs pyvers; iopath's later releases have no wheel.
    "iopath==0.1.9",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
    "torchmetrics==1.0.3",
    "torchrec==1.6.1",
)
_NEVER_CALLED = ("inference", "training_backward_dense", "training_backward_gwd", "training_backward_vbe")
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
_PACKED, _PAGE, _CHUNK = "fbgemm.packed", 4096, 96 * 2**20
# Of a fat binary: magic number, version, header's and content's bytes; then entries, each with a header of its own.
_FAT_MAGIC, _FAT_HEADER = 0xBA55ED50, struct.Struct("<IHHQ")
_FAT_ENTRY, _FAT_ARCHITECTURE, _IS_CUBIN = struct.Struct("<HHIQ"), 28, 2


def make(folder: Path) -> None:
    """Download the wheels into a new folder, and pack what is needed of FBGEMM's."""
    folder.mkdir(parents=True)
    _download(folder / "wheels", *WHEELS)
    shutil.copy(__file__, folder / "gpu_bundle.py")
    with tempfile.TemporaryDirectory() as name:
        _download(Path(name) / "wheel", FBGEMM)
        unpacked = Path(name) / "unpacked"
        (wheel,) = (Path(name) / "wheel").iterdir()
        zipfile.ZipFile(wheel).extractall(unpacked)
        for library in unpacked.rglob("*.so"):
            is_called = not library.stem.endswith(_NEVER_CALLED)
            _zero_unused(library, {ARCHITECTURE} if is_called else set())
        _pack(unpacked, folder / _PACKED)


def install(folder: Path, site: Path) -> None:
    """Install the folder's wheels and FBGEMM below `site`, and say that Headrace, a checkout, is installed."""
    wheels = [str(path) for path in (folder / "wheels").iterdir()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*pip, "--target", str(site), *wheels], check=True)
    _unpack(folder / _PACKED, site)
    about = site / "headrace-0.1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace\nVersion: 0.1.0\n")


def _download(folder: Path, *wheels: str) -> None:
    platforms = [f"--platform={name}_x86_64" for name in _PLATFORMS]
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, "-d", str(folder), *wheels], check=True
    )


def unused_code(binaries: bytes, architectures: set[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each program in fat binaries (a `.nv_fatbin` section) that is for no kept architecture."""
    at = 0
    while at + _FAT_HEADER.size <= len(binaries):
        magic, _, header_bytes, size_bytes = _FAT_HEADER.unpack_from(binaries, at)
        if magic != _FAT_MAGIC:  # padding
            at += 8
            continue
        entry, at = at + header_bytes, at + header_bytes + size_bytes
        while entry < at:
            kind, _, header_bytes, size_bytes = _FAT_ENTRY.unpack_from(binaries, entry)
            (architecture,) = struct.unpack_from("<I", binaries, entry + _FAT_ARCHITECTURE)
            begin, entry = entry + header_bytes, entry + header_bytes + size_bytes
            if kind != _IS_CUBIN or architecture not in architectures:
                yield begin, entry


def _zero_unused(library: Path, architectures: set[int]) -> None:
    """Zero what a library's user never loads: code for other architectures, and the linker's tables of symbols."""
    with library.open("r+b") as file:
        elf = file.read()
        for offset, size_bytes in _sections(elf, b".nv_fatbin"):
            for begin, end in unused_code(elf[offset : offset + size_bytes], architectures):
                file.seek(offset + begin)
                file.write(bytes(end - begin))
        for name in (b".symtab", b".strtab"):
            for offset, size_bytes in _sections(elf, name):
                file.seek(offset)
                file.write(bytes(size_bytes))


def _sections(elf: bytes, wanted: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and size of an ELF file's sections of one name."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + number * entry_bytes) for number in range(count)]
    for name, _, _, _, offset, size_bytes in headers:
        at = headers[names][4] + name
        if elf[at : elf.index(b"\0", at)] == wanted:
            yield offset, size_bytes


def _pack(folder: Path, packed: Path) -> None:
    """Write a folder's files without their pages of zeros: an index, then compressed chunks of all others."""
    files, content = [], bytearray()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data, pages = path.read_bytes(), []
        for at in range(0, len(data), _PAGE):
            if any(page := data[at : at + _PAGE]):
                pages.append(at)
                content += page.ljust(_PAGE, b"\0")
        files.append((str(path.relative_to(folder)), len(data), pages))
    with ProcessPoolExecutor() as pool:
        chunks = list(
            pool.map(lzma.compress, (bytes(content[at : at + _CHUNK]) for at in range(0, len(content), _CHUNK)))
        )
    index = lzma.compress(json.dumps({"files": files, "chunks": [len(chunk) for chunk in chunks]}).encode())
    packed.write_bytes(b"".join((struct.pack("<Q", len(index)), index, *chunks)))


def _unpack(packed: Path, folder: Path) -> None:
    with packed.open("rb") as file:
        (index_bytes,) = struct.unpack("<Q", file.read(8))
        index = json.loads(lzma.decompress(file.read(index_bytes)))
        with ThreadPoolExecutor() as pool:
            content = b"".join(pool.map(lzma.decompress, [file.read(size_bytes) for size_bytes in index["chunks"]]))
    pages_of = memoryview(content)
    for name, size_bytes, pages in index["files"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            for at in pages:
                file.seek(at)
                file.write(pages_of[: min(_PAGE, size_bytes - at)])
                pages_of = pages_of[_PAGE:]
            os.truncate(file.fileno(), size_bytes)


if __name__ == "__main__":
    if [len(sys.argv), *sys.argv[1:2]] == [3, "make"]:
        make(Path(sys.argv[2]))
    elif [len(sys.argv), *sys.argv[1:2]] == [4, "install"]:
        install(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(__doc__)
