"""Every method of every kind of server, called in every role: docs/security.md says who is answered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from every_kind import SERVER_ID, SPEC, TOKENS, AnyClient, serve_every_kind
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards
from thrift_values import LIST, METHODS, STRUCT, example

from headrace.paramserver.rpc.security import AccessPolicy, Token
from headrace.schemas.errors import HeadraceError, ProtocolError, UnauthorizedError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.tables import DType, TableSpec

_DOCS = Path(__file__).parents[1] / "docs" / "security.md"
_ROLES = {"stranger": None, "READER": idl.Role.READER, "WRITER": idl.Role.WRITER, "ADMIN": idl.Role.ADMIN}
# Bits of an integer, by its type in Thrift.
_BITS = {6: 15, 8: 31, 10: 63}
# A wait that is as long as may be would be waited for.
_WAITS = {"wait_ms", "hold_ms"}


def _documented() -> dict[tuple[str, str, str], bool]:
    """Return whether (method, kind, role) is answered, by the table in the docs."""
    lines = _DOCS.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| method |"))
    columns = [re.fullmatch(r"(\w+), (\w+)", cell.strip()) for cell in lines[start].split("|")[2:-1]]
    found = {}
    for line in lines[start + 2 : start + 2 + len(METHODS)]:
        method, *cells = (cell.strip().strip("`") for cell in line.split("|")[1:-1])
        for column, cell in zip(columns, cells, strict=True):
            assert column is not None and cell in ("yes", "–"), line
            found[method, column[1], column[2]] = cell == "yes"
    return found


def _request(method: str, role: int = idl.Role.ADMIN) -> Any:
    """Return a request that a shard could answer, as far as its fields tell; None for a method without one."""
    if method == "hello":
        return _hello(role)
    request = getattr(example(getattr(idl.ParameterServer, f"{method}_args")), "request", None)
    for name, value in {
        "server_id": SERVER_ID,
        "fqn": SPEC.fqn,
        "row_ids": bytes(8),
        "identities": bytes(8),
        "more": None,
        "from_seq": 1,
        "body_offset": None,
        "wait_ms": 0,
        "run_number": None,
        "policy": None,
        "files": None,
        "uploads": None,
        "removes": None,
        "manifest": None,
        "change": None,
        "path": "",
        "name": "" if method == "fetchSnapshot" else "two",
    }.items():
        if hasattr(request, name):
            setattr(request, name, value)
    if method == "setEmbeddings":
        return request_of(delta_of(SPEC, [1], 2.0), client_seq=1)
    return request


async def _is_answered(client: AnyClient, method: str, role: int | None) -> bool:
    try:
        await (client.hello(role) if method == "hello" else client.call(method, _request(method)))
    except UnauthorizedError:
        return False
    except HeadraceError as exc:
        assert not isinstance(exc, ProtocolError), f"{method} is not known"
    return True


async def _answered(address: str, role: int | None, *, registers: bool) -> set[str]:
    """Return the methods that a role is answered, after its hello; None is a stranger, who is closed each time."""
    answered = set()
    async with AnyClient(address, registers=registers) as client:
        if role is not None and await _is_answered(client, "hello", role):
            others = [method for method in METHODS if method != "hello"]
            answered = {"hello", *[method for method in others if await _is_answered(client, method, role)]}
    for method in METHODS if role is None else ():
        async with AnyClient(address) as stranger:
            if await _is_answered(stranger, method, role):
                answered.add(method)
    return answered


async def test_methods_by_role_and_kind(tmp_path: Path) -> None:
    """A method answers the roles that the table names, and all others alike: they are not authorized."""
    found = {}
    async with serve_every_kind(tmp_path) as (addresses, _):
        for kind, address in addresses.items():
            for name, role in _ROLES.items():
                answered = await _answered(address, role, registers=kind != "follower")
                found.update({(method, kind, name): method in answered for method in METHODS})
        async with AnyClient(addresses["shard"]) as client:
            await client.hello(idl.Role.READER)
            status = await client.call("status")
        assert status.num_refused >= sum(not found[method, "shard", "stranger"] for method in METHODS)
        assert {client.client for client in status.clients} == {f"c{idl.Role.ADMIN}", f"c{idl.Role.WRITER}"}
    for method in METHODS:
        # Replicas refuse writers and administrators when they say hello.
        assert not (found.pop((method, "replica", "WRITER")) or found.pop((method, "replica", "ADMIN")))
        # What a follower leaves to its source is answered with an error that says so.
        assert {name: found.pop((method, "follower", name)) for name in _ROLES} == {
            name: found[method, "shard", name] for name in _ROLES
        }, method
    assert found == _documented()


def _places(value: Any) -> Iterator[tuple[str, int, Any, str]]:
    """Yield each integer of a struct: its path, its bits, the struct that has it, and its name there."""
    if value is None:
        return
    for ttype, name, *_ in value.thrift_spec.values():
        inner = getattr(value, name)
        if ttype in _BITS:
            yield name, _BITS[ttype], value, name
        elif ttype == STRUCT and inner is not None:
            yield from ((f"{name}.{path}", *rest) for path, *rest in _places(inner))
        elif ttype == LIST and inner and hasattr(inner[0], "thrift_spec"):
            yield from ((f"{name}[0].{path}", *rest) for path, *rest in _places(inner[0]))


@pytest.mark.parametrize("extreme", ["lowest", "-1", "0", "highest"])
async def test_extreme_numbers(tmp_path: Path, extreme: str) -> None:
    """A number that is out of range in any field of any method is refused: no bug, no failed disk, no path of ours."""
    async with serve_every_kind(tmp_path) as (addresses, shard):
        for kind in ("replica", "follower", "shard"):  # last, the one that does all that an administrator asks for
            role = idl.Role.READER if kind == "replica" else idl.Role.ADMIN
            async with AnyClient(addresses[kind], registers=kind != "follower") as client:
                await client.hello(role, epoch=1)
                for method in METHODS:
                    for path, request in _extreme_requests(method, role, extreme):
                        what = f"{method} of the {kind} with {path} {extreme}"
                        if method != "hello":
                            await _check_call(client, method, request, what, tmp_path)
                            continue
                        async with AnyClient(addresses[kind]) as stranger:
                            await _check_call(stranger, method, request, what, tmp_path)
                await client.call("status")
        stats = shard.sampler.server.stats
        assert (stats.num_failed, stats.num_storage) == (0, 0)


def _extreme_requests(method: str, role: int, extreme: str) -> Iterator[tuple[str, Any]]:
    """Yield requests each of which has one integer that is extreme, with where it is."""
    for number in range(len(list(_places(_request(method, role))))):
        request = _request(method, role)
        path, bits, struct, name = list(_places(request))[number]
        if name in _WAITS and extreme == "highest":
            continue
        value = {"lowest": -(2**bits), "highest": 2**bits - 1}.get(extreme)
        setattr(struct, name, int(extreme) if value is None else value)
        yield path, request


async def test_a_failed_log_names_no_file(tmp_path: Path) -> None:
    """Readers and writers of a shard whose log has failed do not learn where its files are, whatever they call."""
    access = AccessPolicy({role: Token(secret) for role, secret in TOKENS.items()})
    wide = TableSpec(fqn="wide", num_rows=100, dim=4096, dtype=DType.FLOAT32)
    data = tmp_path / "data"
    options = {"access": access, "server_id": SERVER_ID, "log_segment_bytes": 1 << 20}
    async with (
        serve_shards(data, 1, **options) as (port,),
        AnyClient(f"127.0.0.1:{port}") as reader,
        AnyClient(f"127.0.0.1:{port}") as writer,
    ):
        await reader.hello(idl.Role.READER)
        hello = hello_of_writer(wide, SPEC, role=idl.Role.WRITER, token=TOKENS[idl.Role.WRITER])
        await writer.call("hello", hello)
        (data / "shard-0000" / "log").rename(tmp_path / "gone")
        with pytest.raises(UnavailableError) as failed:  # this does not fit into the segment that is open
            await writer.call("setEmbeddings", request_of(delta_of(wide, range(100), 1.0)))
        assert str(tmp_path) not in str(failed.value)
        for client, role in ((reader, idl.Role.READER), (writer, idl.Role.WRITER)):
            for method in METHODS:
                try:
                    await client.call(method, _request(method, role))
                except HeadraceError as exc:
                    assert str(tmp_path) not in str(exc), method


def _hello(role: int) -> Any:
    """Return a hello with something in every field, which makes two tables; its client is not the one of others."""
    tables = [spec_to_idl(TableSpec(fqn="more.weight", num_rows=9, dim=4, dtype=DType.FLOAT32))]
    tables.append(spec_to_idl(TableSpec.of_tensor("bias", [3, 5], DType.FLOAT32)))
    for table in tables:
        table.fingerprint = None
    hello = example(idl.HelloRequest)
    known = {"protocol_version": PROTOCOL_VERSION, "role": role, "token": TOKENS[role], "tables": tables, "epoch": 3}
    known |= {"run": "other", "client": "c", "rank": 0, "world_size": 1}
    for name, value in (known | {"dropped_tables": None}).items():
        setattr(hello, name, value)
    return hello


async def _check_call(client: AnyClient, method: str, request: Any, what: str, folder: Path) -> None:
    try:
        await client.call(method, request)
    except asyncio.IncompleteReadError as exc:
        raise AssertionError(f"{what}: the connection was closed") from exc
    except HeadraceError as exc:
        assert type(exc) is not HeadraceError, f"{what}: {exc}"
        assert str(folder) not in str(exc), what
