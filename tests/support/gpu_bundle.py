"""What `scripts/check-gpu` needs on a machine with a GPU that reaches no package index, as one folder of some 230 MB.

    python tests/support/gpu_bundle.py make DIR           # where there is an index, and a C compiler
    python3 DIR/gpu_bundle.py install DIR SITE            # there
    LD_PRELOAD=SITE/nccl_stub.so PYTHON=python3 PYTHONPATH=SITE scripts/check-gpu OUT  # in a checkout there

That machine brings Python 3.12, torch 2.11 for CUDA 13 with NVRTC and cuda-bindings, compute-sanitizer, numpy, pytest
with xdist and timeout, hypothesis, psutil and the rest of `pyproject.toml`. The folder brings torch 2.14, FBGEMM 1.9
and TorchRec, which use that machine's CUDA libraries; `nccl_stub.so` has the functions that its NCCL lacks, and ends
the process that calls one. The wheels of torch and FBGEMM have 1.1 GB, most of it code for GPUs: the folder keeps what
a GPU of compute capability 9.0 runs of it, without what the tests never call.
"""

from __future__ import annotations

import importlib.util
import io
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
TORCH = ("torch==2.14.1", "fbgemm_gpu==1.9.0")
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
    "torchrec==1.9.2",
)
_NEVER_CALLED = ("inference", "training_backward_dense", "training_backward_gwd", "training_backward_vbe")
_NEVER_USED = ("torch/include/", "torch/share/", "torch/bin/protoc", "torch/lib/libtorch_cuda_linalg.so")
_NCCL_FUNCTIONS = (
    *(f"ncclComm{name}" for name in ("GetUniqueId", "Grow", "MemStats", "Resume", "Suspend")),
    *("ncclGetLsaMultimemDevicePointer", "ncclGetPeerDevicePointer", "ncclWinGetUserPtr"),
    *("ncclPutSignal", "ncclSignal", "ncclWaitSignal"),
)
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
_PACKED, _PART, _PAGE, _CHUNK = "packed", 58 * 10**6, 4096, 16 * 2**20
# Of a fat binary: magic number, version, header's and content's bytes; then entries, each with a header of its own.
_FAT_MAGIC, _FAT_HEADER = 0xBA55ED50, struct.Struct("<IHHQ")
_FAT_ENTRY, _FAT_ARCHITECTURE, _IS_CUBIN = struct.Struct("<HHIQ"), 28, 2


def make(folder: Path) -> None:
    """Download the wheels into a new folder, and pack what is needed of those of torch and FBGEMM."""
    folder.mkdir(parents=True)
    _download(folder / "wheels", *WHEELS)
    shutil.copy(__file__, folder / "gpu_bundle.py")
    stub = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in _NCCL_FUNCTIONS)
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(folder / "nccl_stub.so"), "-"]
    subprocess.run(compiler, input=stub.encode(), check=True)
    with tempfile.TemporaryDirectory() as name:
        _download(Path(name) / "wheels", *TORCH)
        unpacked = Path(name) / "unpacked"
        for wheel in (Path(name) / "wheels").iterdir():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, (each for each in archive.namelist() if not each.startswith(_NEVER_USED)))
        for library in unpacked.rglob("*.so"):
            is_called = not library.stem.endswith(_NEVER_CALLED)
            _zero_unused(library, {ARCHITECTURE} if is_called else set())
        _pack(unpacked, folder)


def install(folder: Path, site: Path) -> None:
    """Install the folder's content below `site`, beside the CUDA libraries of this machine's torch.

    It also says there that Headrace, a checkout, is installed.
    """
    nvidia = importlib.util.find_spec("nvidia")
    if nvidia is None or not nvidia.submodule_search_locations:
        sys.exit("gpu_bundle: this Python has no CUDA libraries of torch (the package nvidia)")
    wheels = [str(path) for path in (folder / "wheels").iterdir()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*pip, "--target", str(site), *wheels], check=True)
    _unpack(folder, site)
    shutil.copy(folder / "nccl_stub.so", site)
    (site / "nvidia").symlink_to(nvidia.submodule_search_locations[0])
    about = site / "headrace-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace\nVersion: 0\n")


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


def _pack(folder: Path, target: Path) -> None:
    """Write a folder's files without their pages of zeros: an index, then compressed chunks of all others, in parts."""
    files, content = [], bytearray()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data, pages = path.read_bytes(), []
        for at in range(0, len(data), _PAGE):
            if any(page := data[at : at + _PAGE]):
                pages.append(at)
                content += page.ljust(_PAGE, b"\0")
        files.append((str(path.relative_to(folder)), len(data), pages))
    with ProcessPoolExecutor() as pool:
        chunks = list(pool.map(_compress, (bytes(content[at : at + _CHUNK]) for at in range(0, len(content), _CHUNK))))
    index = lzma.compress(json.dumps({"files": files, "chunks": [len(chunk) for chunk in chunks]}).encode())
    packed = b"".join((struct.pack("<Q", len(index)), index, *chunks))
    for number, at in enumerate(range(0, len(packed), _PART)):
        (target / f"{_PACKED}.{number}").write_bytes(packed[at : at + _PART])


def _compress(chunk: bytes) -> bytes:
    return lzma.compress(chunk, preset=4)


def _unpack(source: Path, folder: Path) -> None:
    file = io.BytesIO(
        b"".join(
            path.read_bytes() for path in sorted(source.glob(f"{_PACKED}.*"), key=lambda path: int(path.suffix[1:]))
        )
    )
    (index_bytes,) = struct.unpack("<Q", file.read(8))
    index = json.loads(lzma.decompress(file.read(index_bytes)))
    with ThreadPoolExecutor() as pool:
        content = b"".join(pool.map(lzma.decompress, [file.read(size_bytes) for size_bytes in index["chunks"]]))
    pages_of = memoryview(content)
    for name, size_bytes, pages in index["files"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as out:
            for at in pages:
                out.seek(at)
                out.write(pages_of[: min(_PAGE, size_bytes - at)])
                pages_of = pages_of[_PAGE:]
            os.truncate(out.fileno(), size_bytes)
        (folder / name).chmod(0o755)  # among them torch's helper for shared memory


if __name__ == "__main__":
    if [len(sys.argv), *sys.argv[1:2]] == [3, "make"]:
        make(Path(sys.argv[2]))
    elif [len(sys.argv), *sys.argv[1:2]] == [4, "install"]:
        install(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(__doc__)
