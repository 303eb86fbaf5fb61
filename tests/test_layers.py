"""Imports point down: the layers of the source, held by reading every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each folder may import of ours, itself included.
ALLOWED = {
    "schemas": {"schemas"},
    "kernels": {"kernels", "schemas"},
    "paramserver": {"paramserver", "schemas"},
    "streamer": {"streamer", "paramserver", "kernels", "schemas"},
    "scripts": {"scripts", "streamer", "paramserver", "kernels", "schemas", "headrace"},
    "headrace": {"scripts", "streamer", "paramserver", "kernels", "schemas", "headrace"},
}
# The rooms of the two large folders, from the ground up: each may import itself and those before it.
ROOMS = {
    "paramserver": (
        *("system", "rpc", "log", "store", "ingest", "expiry", "config"),
        *("reading", "snapshots", "archive", "reshard", "observe", "shard", "replica"),
    ),
    "streamer": ("config", "stats", "world", "device", "taps", "flush", "delivery"),
}
# Two rooms work without the parts of a server: what each may import of its folder.
WINGS = {
    "reading": {"system", "rpc", "reading"},
    "replica": set(ROOMS["paramserver"]) - {"ingest", "expiry", "reshard", "archive", "shard", "observe", "config"},
}
# Lines of Python in each folder, and files of the product: no more than today. A change that needs more raises the
# number in its commit and says why.
LINES = {
    "schemas": 3_090,
    "kernels": 3_410,
    "paramserver": 45_680,
    "streamer": 17_440,
    "scripts": 11_150,
    "examples": 240,
    "tests": 93_260,
}
NUM_PRODUCT_FILES = 350
TORCH = {"torch", "torchrec", "fbgemm_gpu"}
# A replicated log has none of these: only `log/` itself may know them.
OF_FILE_LOG = {f"headrace.paramserver.log.{name}" for name in ("files", "segments", "segment_reader", "writer", "tail")}
FOREIGN_TO_SCHEMAS = TORCH | {"asyncio", "rocksdict"}


def source_files() -> Iterator[tuple[str, Path]]:
    """Yield each module's name, as it is imported, and its file."""
    for folder in ALLOWED:
        for path in sorted((ROOT / folder).rglob("*.py")):  # does not follow the links in headrace/
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts if parts[0] == "headrace" else ("headrace", *parts)), path


def imported_names(module: str, source: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of all that the source imports, wherever in the file it does so.

    An import under `TYPE_CHECKING` or inside a function counts: it binds the layers all the same.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*origin, alias.name])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def folder_of(name: str) -> str:
    """Return the folder that a dotted name under `headrace` belongs to."""
    second = [*name.split("."), ""][1]
    return second if second in ALLOWED else "headrace"


def opens_upwards(module: str, name: str) -> bool:
    """Return whether a module of a room imports one of its folder that lies in a room above it, or in none."""
    _, folder, room, *_ = [*module.split("."), "", ""]
    _, other_folder, other, *_ = [*name.split("."), "", ""]
    rooms = ROOMS.get(folder, ())
    if room not in rooms or folder != other_folder:
        return False
    return other not in rooms or rooms.index(other) > rooms.index(room)


def leaves_wing(module: str, name: str) -> bool:
    """Return whether a module of a wing imports a room that its wing does not need."""
    _, folder, room, *_ = [*module.split("."), "", ""]
    _, other_folder, other, *_ = [*name.split("."), "", ""]
    return folder == other_folder == "paramserver" and room in WINGS and other not in WINGS[room]


def knows_file_log(name: str) -> bool:
    """Return whether a dotted name is a module of the log in files, or lies in one."""
    return any(name == module or name.startswith(f"{module}.") for module in OF_FILE_LOG)


def broken_rules(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Return one line for each import in the source that its layer forbids."""
    folder = folder_of(module)
    in_replica = module.startswith("headrace.paramserver.replica")
    of_replica = {"kernels"} if in_replica else set()
    found = []
    for line, name in imported_names(module, source, is_package=is_package):
        where = f"{module}:{line} imports {name}"
        top = name.partition(".")[0]
        if top in ALLOWED and top != "headrace":
            found.append(f"{where}: say headrace.{name}, or the file is loaded twice")
        elif top == "headrace" and folder_of(name) not in (allowed := ALLOWED[folder] | of_replica):
            found.append(f"{where}: {folder} may only import {', '.join(sorted(allowed))}")
        elif top == "headrace" and opens_upwards(module, name):
            found.append(f"{where}: rooms are {', '.join(ROOMS[folder])}, and import those before them")
        elif leaves_wing(module, name):
            room = module.split(".")[2]
            found.append(f"{where}: {room} may only import {', '.join(sorted(WINGS[room]))}")
        elif not module.startswith("headrace.paramserver.log.") and knows_file_log(name):
            found.append(f"{where}: outside log/, use open_log and open_source")
        elif folder == "schemas" and top in FOREIGN_TO_SCHEMAS:
            found.append(f"{where}: schemas are formats, without I/O and tensors")
        elif folder == "paramserver" and not module.startswith("headrace.paramserver.replica.api.") and top in TORCH:
            found.append(f"{where}: servers and `headrace replica` are installed without torch")
        elif folder == "paramserver" and not in_replica and name.startswith("headrace.paramserver.replica"):
            found.append(f"{where}: a server knows no replica")
    return found


def test_every_folder_has_a_room() -> None:
    """Each package of the two large folders is a room or lies in one, and says in one line what it holds."""
    for top, rooms in ROOMS.items():
        for path in (ROOT / top).rglob("__init__.py"):
            inner = path.parent.relative_to(ROOT / top).parts
            assert not inner or inner[0] in rooms, path
            assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path


@pytest.mark.parametrize("top", ["schemas", "kernels", "paramserver", "streamer", "scripts"])
def test_file_names_are_unique_and_say_more_than_their_folder(top: str) -> None:
    """A base name occurs once in a top-level folder, and does not repeat the word of the folder that it lies in."""
    paths = [path for path in (ROOT / top).rglob("*.py") if path.name != "__init__.py"]
    stems = [path.stem for path in paths]
    assert not {stem for stem in stems if stems.count(stem) > 1}
    for path in paths:
        folder = path.parent.name.removesuffix("s")
        assert not {folder, f"{folder}s"} & set(path.stem.split("_")), path


@pytest.mark.parametrize("top", LINES)
def test_folders_keep_to_their_budgets(top: str) -> None:
    """No folder has more lines of Python than its budget."""
    num_lines = sum(len(path.read_text("utf-8").splitlines()) for path in (ROOT / top).rglob("*.py"))
    assert num_lines <= LINES[top], f"{top} has {num_lines} lines: cut it, or raise its budget and say why"


def test_the_product_has_no_more_files_than_its_budget() -> None:
    """Half a noun is merged into the file of its noun, not put beside it."""
    assert len(list(source_files())) <= NUM_PRODUCT_FILES


def test_imports_point_down() -> None:
    """Every module imports only what its layer allows."""
    files = list(source_files())
    assert {folder_of(module) for module, _ in files} == set(ALLOWED)
    found = [
        rule
        for module, path in files
        for rule in broken_rules(module, path.read_text("utf-8"), is_package=path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headrace.schemas.bad", "import torch"),
        ("headrace.schemas.bad", "import torch.nn as nn"),
        ("headrace.schemas.bad", "from asyncio import Queue"),
        ("headrace.schemas.bad", "def f():\n    import rocksdict"),
        ("headrace.schemas.bad", "from headrace.paramserver import client"),
        ("headrace.schemas.bad", "from ..kernels import pack"),
        ("headrace.schemas.bad", "import headrace"),
        ("headrace.schemas.bad", "import asyncio.events"),
        ("headrace.kernels.bad", "from headrace.paramserver.rpc.client import Client"),
        ("headrace.kernels.bad", "from headrace import streamer"),
        ("headrace.paramserver.bad", "import torch"),
        ("headrace.paramserver.bad", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("headrace.paramserver.bad", "from fbgemm_gpu import x"),
        ("headrace.paramserver.bad", "importlib.import_module('torch')"),
        ("headrace.paramserver.bad", "from headrace.kernels import pack"),
        ("headrace.paramserver.bad", "from headrace.paramserver.replica.tables import Tables"),
        ("headrace.paramserver.bad", "from . import replica"),
        ("headrace.paramserver.replica.tables.bad", "def f():\n    import torch"),
        ("headrace.paramserver.replica.bad", "from headrace.streamer import tap"),
        ("headrace.paramserver.replica.bad", "from ...streamer import tap"),
        ("headrace.paramserver.log.bad", "from headrace.paramserver.store.applier import Applier"),
        ("headrace.paramserver.store.bad", "from ..shard import shard"),
        ("headrace.paramserver.reading.bad", "from headrace.paramserver.store.catalog import Catalog"),
        ("headrace.paramserver.reading.bad", "from ..config.server_settings import ServerConfig"),
        ("headrace.paramserver.replica.bad", "from ..ingest.feed import UpdateFeed"),
        ("headrace.paramserver.replica.bad", "from ..config.data_dir import DataDir"),
        ("headrace.paramserver.ingest.bad", "from ..log.files import FileUpdateLog"),
        ("headrace.scripts.bad", "from headrace.paramserver.log import segments"),
        ("headrace.streamer.taps.bad", "from headrace.streamer.api import RawEmbeddingStreamer"),
        ("headrace.streamer.bad", "from headrace.scripts.commands.demo import demo"),
        ("headrace.streamer.bad", "from headrace import HeadraceError"),
        ("headrace.scripts.bad", "from schemas.errors import HeadraceError"),
    ],
)
def test_checker_finds_a_broken_layer(module: str, source: str) -> None:
    """The checker reports a module that breaks a rule, so an empty report means something."""
    assert len(broken_rules(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headrace.schemas.good", "import struct\nfrom headrace.schemas.errors import HeadraceError"),
        ("headrace.schemas.good", "from .errors import HeadraceError\nfrom . import errors"),
        ("headrace.kernels.good", "import torch\nfrom headrace.schemas import row_records"),
        ("headrace.paramserver.good", "import asyncio\nimport rocksdict\nfrom ..schemas import errors"),
        ("headrace.paramserver.log.good", "from headrace.paramserver.log.segments import list_segments"),
        ("headrace.paramserver.shard.good", "from ..log.opening import open_log"),
        ("headrace.paramserver.replica.api.good", "import torch\nfrom ...rpc.client import Client"),
        ("headrace.paramserver.store.good", "from ..log import update_log\nfrom .catalog import Catalog"),
        ("headrace.paramserver.reading.good", "from ..rpc.client import Client\nfrom headrace.schemas import errors"),
        ("headrace.streamer.taps.good", "from headrace.streamer.config import StreamerConfig"),
        ("headrace.paramserver.replica.good", "from headrace.kernels.quantization import quantize_rows"),
        ("headrace.streamer.good", "from headrace.paramserver.rpc.client import Client\nimport torchrec"),
        ("headrace.scripts.good", "from headrace.streamer import RawEmbeddingStreamer\nimport headrace"),
    ],
)
def test_checker_lets_a_sound_module_pass(module: str, source: str) -> None:
    """Imports that point down, absolute or relative, are not reported."""
    assert broken_rules(module, source) == []


def test_relative_import_in_a_package_starts_at_the_package() -> None:
    """In an `__init__.py` one dot is the package itself, not its parent."""
    source = "from . import errors\nfrom .. import streamer"
    found = broken_rules("headrace.schemas", source, is_package=True)
    assert len(found) == 1
    assert "headrace.streamer" in found[0]


def test_server_and_schemas_load_without_torch() -> None:
    """Every module of schemas and paramserver, but those that return tensors, imports where torch is not installed."""
    modules = [
        module.removesuffix(".__init__")
        for module, _ in source_files()
        if folder_of(module) in {"schemas", "paramserver"}
        and (not module.startswith("headrace.paramserver.replica.api.") or module.endswith(".api.config"))
        and not module.endswith(".__main__")
    ]
    code = "import importlib, sys\n"
    code += f"sys.modules.update(dict.fromkeys({sorted(TORCH)!r}))\n"  # None: import says it is not there
    code += f"for name in {modules!r}: importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_nothing_but_the_replicated_log_needs_nats() -> None:
    """Every module of server and commands imports where nats-py is not installed, but those that speak to NATS."""
    modules = [
        module.removesuffix(".__init__")
        for module, _ in source_files()
        if folder_of(module) == "paramserver"
        and not module.startswith(("headrace.paramserver.replica", "headrace.paramserver.log.jetstream."))
        and not module.endswith(".__main__")
    ]
    modules += ["headrace.cli", "headrace.scripts.commands.serve", "headrace.scripts.commands.doctor"]
    code = "import importlib, sys\nsys.modules['nats'] = None\n"  # import says it is not there
    code += f"for name in {modules!r}: importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
