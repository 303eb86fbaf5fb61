"""The wheel and the sdist: whole, without links, and enough for a server and a replica where nothing else is."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from replica_answers import IDS, SPEC, values, write
from replica_endpoint import replica_endpoint

from headrace import __version__
from headrace.paramserver.shard.launch import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
_ROOMS = ("kernels", "paramserver", "schemas", "scripts", "streamer")
# What the image's build has, so that a folder which is not copied there is found here.
_COPIED = [
    path.rstrip("/")
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    for path in line.split()
]
# Files other than Python that the code reads at run time; `package-data` has each kind.
_DATA = frozenset({".css", ".cu", ".cuh", ".html", ".js", ".thrift", ".typed"})
# Folders that only a checkout has.
_CHECKOUT_ONLY = ("scripts/benches/", "scripts/ranking_demo/")
# What an sdist has and a wheel is not made of.
_SDIST_ONLY = ("CHANGELOG.md", "constraints.txt")
_TIMEOUT_S = 200.0

pytestmark = pytest.mark.timeout(300)  # the first test builds


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a release of the files that the image's build copies, and of what an sdist has besides."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in (*_COPIED, *_SDIST_ONLY, "MANIFEST.in", "tests/test_packaging.py"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            (source / name).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    _git(source, "init", "--quiet")
    _git(source, "add", "--all")
    _git(source, "commit", "--quiet", "--message", "Release")
    done = _release(source, out, f"v{__version__}")
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def _git(source: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, cwd=source, check=True, capture_output=True, text=True, timeout=60).stdout


def _release(source: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [source / "scripts" / "build-release", *arguments]
    environ = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S)


def _wheel(built: Path) -> Path:
    (wheel,) = built.glob(f"headrace-{__version__}-py3-none-any.whl")
    return wheel


def _sources() -> set[str]:
    """Return the files that a wheel must have, under the package's name."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "headrace").rglob("*")  # does not follow the links
        if path.is_file() and path.parent.name != "__pycache__"
    }
    for room in _ROOMS:
        for path in (ROOT / room).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and path.suffix in {".py", *_DATA} and not name.startswith(_CHECKOUT_ONLY):
                found.add(f"headrace/{name}")
    return found


def test_wheel_has_every_file_and_no_link(built: Path) -> None:
    """All modules and data of the five folders are in it as files, under `headrace/`, and nothing else but metadata."""
    with zipfile.ZipFile(_wheel(built)) as wheel:
        infos = wheel.infolist()
    assert not [info.filename for info in infos if (info.external_attr >> 16) & 0o170000 == 0o120000]
    names = {info.filename for info in infos}
    assert _sources() - names == set()
    assert not [name for name in names if name.removeprefix("headrace/").startswith(_CHECKOUT_ONLY)]
    for name in ("py.typed", "schemas/paramserver.thrift", "paramserver/observe/status_page/index.html"):
        assert f"headrace/{name}" in names
    rest = {name.partition("/")[0] for name in names} - {"headrace"}
    assert rest == {f"headrace-{__version__}.dist-info"}


def test_all_pages_name_the_same_pythons() -> None:
    """The versions of the classifiers are those that the set-up looks for and takes, and that every page names."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    named = f"{', '.join(versions[:-1])} or {versions[-1]}"
    pages = ("README.md", "CONTRIBUTING.md", "docs/tutorial.md", "deploy/docker/Dockerfile", "scripts/setup-venv")
    assert not [page for page in pages if named not in (ROOT / page).read_text()]
    setup = (ROOT / "scripts/setup-venv").read_text()
    assert " ".join(f"python{version}" for version in versions) + " python3 python;" in setup
    oldest, newest = (version.replace(".", ", ") for version in (versions[0], versions[-1]))
    assert setup.count(f"not ({oldest}) <= sys.version_info[:2] <= ({newest})") == 2


def test_sdist_has_every_file_and_no_link(built: Path) -> None:
    """The same of the sdist, which needs no link to be built from."""
    (sdist,) = built.glob(f"headrace-{__version__}.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert _sources() - names == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO", *_SDIST_ONLY} <= names
    assert not [name for name in names if name.startswith("tests/")]  # they need folders that are not in it


def test_release_is_the_same_at_any_time(built: Path) -> None:
    """Files in wheel and sdist have one time, mode and owner, whoever builds, and SHA256SUMS has both archives."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert len({(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in members}) == 1
    assert sdist.read_bytes()[4:8] == bytes(4)  # gzip's own time
    with zipfile.ZipFile(_wheel(built)) as wheel:
        assert len({info.date_time for info in wheel.infolist()}) == 1
    sums = dict(reversed(line.split()) for line in (built / "SHA256SUMS").read_text().splitlines())
    archives = (sdist, _wheel(built))
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives}


def test_release_refuses_a_wrong_tag(tmp_path: Path) -> None:
    """A tag of another version is refused, and so is one of a version that the changelog does not date."""
    for name in ("headrace/__init__.py", "scripts/build-release", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", "--all")
    _git(tmp_path, "commit", "--quiet", "--message", "Release")
    done = _release(tmp_path, tmp_path / "dist", "v9.9.9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"build-release: the tag is v9.9.9, and the version is {__version__}: " + (
        f"the tag must be v{__version__}\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(f"## [{__version__}]\n")
    _git(tmp_path, "commit", "--quiet", "--all", "--message", "No date")
    done = _release(tmp_path, tmp_path / "dist", f"v{__version__}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "CHANGELOG.md has no heading" in done.stderr


def test_release_refuses_another_setuptools(tmp_path: Path) -> None:
    """What would build other bytes is refused in one line, before it builds."""
    (tmp_path / "scripts").mkdir()
    shutil.copy2(ROOT / "scripts/build-release", tmp_path / "scripts")
    (tmp_path / "constraints.txt").write_text("rich==15.0.0\nsetuptools==1.0\n")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", "--all")
    _git(tmp_path, "commit", "--quiet", "--message", "Release")
    done = _release(tmp_path, tmp_path / "dist")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "a release is built with 1.0, as constraints.txt says" in done.stderr
    assert not list((tmp_path / "dist").iterdir())


def _closure(name: str) -> set[str]:
    """Return the distributions that one asks for without extras, directly or not, as they are installed here."""
    found: set[str] = set()
    waiting = [(name, frozenset[str]())]
    while waiting:
        current, extras = waiting.pop()
        for text in importlib.metadata.requires(current) or ():
            requirement = Requirement(text)
            wanted = (
                any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""})
                if (requirement.marker)
                else True
            )
            if wanted and canonicalize_name(requirement.name) not in found:
                found.add(canonicalize_name(requirement.name))
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return found


def _lend(distribution: str, site: Path) -> None:
    """Link a distribution's files into another environment."""
    for file in importlib.metadata.files(distribution) or ():
        source = Path(str(file.locate()))
        if ".." in file.parts or "__pycache__" in file.parts or not source.exists():
            continue  # commands, which nothing here calls
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.symlink_to(source)


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and what it asks for, and nothing else; no network is needed.

    The requirements are lent by this environment, so an unlisted one is not there and its import fails.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in _closure("headrace"):
        _lend(distribution, site)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-index"]
    done = subprocess.run(
        [*command, "--no-deps", "--no-compile", "--disable-pip-version-check", str(_wheel(built))],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _run(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(environment / "bin" / "headrace"), *arguments],
        cwd=environment,
        env={"PATH": os.environ["PATH"], "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )


def test_server_runs_from_the_wheel_without_torch(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`headrace --version`, `serve` and `status` work from the wheel alone, with the status page, and stop as told."""
    first, second = _run(environment, "--version").stdout.splitlines()
    assert first == f"headrace {__version__}" and second.endswith("/site-packages") and "without torch; in " in second
    python = str(environment / "bin" / "python")
    code = (
        "import headrace, importlib.util as u; print(headrace.__file__, u.find_spec('torch'), u.find_spec('pyarrow'))"
    )
    told = subprocess.run([python, "-I", "-c", code], cwd=environment, capture_output=True, text=True, timeout=60)
    assert told.stdout.split() == [
        str(next(environment.glob("lib/python*/site-packages/headrace/__init__.py"))),
        *2 * ["None"],
    ]
    monkeypatch.setattr(sys, "executable", python)  # what `ServerProcess` starts
    monkeypatch.chdir(environment)
    with ServerProcess.start(environment / "store", shards=2) as server:
        done = _run(environment, "status", "--server", server.address, "--json")
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["shards"]) == 2
        assert server.stop() == 0


_READ = """
import sys
from headrace import BlockingReader
with BlockingReader(sys.argv[1]) as reader:
    print(reader.get(sys.argv[2], range(1000)).weights.tobytes().hex())
"""


def test_replica_runs_from_the_wheel_without_torch(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server, replica and reader work from the wheel alone, with tables in memory and on disk, bit for bit."""
    python = str(environment / "bin" / "python")
    monkeypatch.setattr(sys, "executable", python)  # what server and replica are started with
    monkeypatch.chdir(environment)
    expected = np.zeros((1000, 3), np.float32)
    expected[IDS] = values(1)
    with ServerProcess.start(environment / "replicated") as server:
        write(server, 1)
        for folder, arguments in (("in-memory", []), ("on-disk", ["--disk-tables=user.*"])):
            with replica_endpoint(environment / folder, server.address, *arguments) as replica:
                command = [python, "-I", "-c", _READ, replica.address, SPEC.fqn]
                done = subprocess.run(command, cwd=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
            assert done.stdout.strip() == expected.tobytes().hex(), done.stderr


def test_a_precision_needs_torch(environment: Path) -> None:
    """Where torch is not installed, a replica that needs it is one line that says how to get it."""
    done = _run(environment, "replica", "--server", "127.0.0.1:1", "--port", "0", "--precision", "int8")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "pip install '" in done.stderr and ".whl[torch]'" in done.stderr


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "ingest", "--help"], ["demo"]], ids=" ".join)
def test_commands_of_a_checkout_say_so(environment: Path, arguments: list[str]) -> None:
    """Benches and the demo are not in the wheel: one line says where they run, with exit code 2."""
    done = _run(environment, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"`headrace {arguments[0]}` needs a checkout of the source: " in done.stderr


def test_extras_come_without_headrace_from_an_index(environment: Path) -> None:
    """`pip install 'headrace[torch]'` looks for torch alone: Headrace is installed."""
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-index"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environ["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        [*command, "--dry-run", "headrace[torch]"], env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert "Requirement already satisfied: headrace[torch] in" in done.stdout
    assert "No matching distribution found for torch" in done.stderr


def test_version_stands_in_one_place(built: Path) -> None:
    """The metadata have the package's version, and images and pages that name a release name this one."""
    with zipfile.ZipFile(_wheel(built)) as wheel:
        metadata = wheel.read(f"headrace-{__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert not re.search(r"^Requires-Dist: torch[^;]*$", metadata, re.MULTILINE)  # only with an extra
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pages += [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    named = re.compile(r"headrace(?:-replica)?[:-]v?(\d+\.\d+\.\d+)")
    assert {version for page in pages for version in named.findall(page.read_text())} == {__version__}
