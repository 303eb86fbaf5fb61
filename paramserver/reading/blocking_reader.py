"""`EmbeddingReader` for code that has no event loop: scripts, notebooks, debuggers."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.system.event_loop import LoopThread
from headrace.schemas.tables import TableSpec

__all__ = ["BlockingReader"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_CLOSE_S = 10.0


def _blocking(
    method: Callable[Concatenate[EmbeddingReader, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[BlockingReader, _P], _T]:
    def call(self: BlockingReader, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._run(method(self._connected, *args, **kwargs))

    return functools.update_wrapper(call, method)


class BlockingReader:
    """A reader of all shards of one server, whose calls block. Use it in a `with` block, or call `close`.

        with BlockingReader("127.0.0.1:7601") as reader:
            print(reader.get("users.weight", [1, 2, 3]).weights)

    Arguments, results and errors of the calls are those of `EmbeddingReader`, which runs in a thread of its own; an
    interrupt ends a call. Thread: any, also several at a time.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        token: Token | None = None,
    ) -> None:
        """Find and connect to every shard, as `EmbeddingReader.connect` does."""
        self._thread = LoopThread("headrace-reader", owner="the reader")
        self._reader: EmbeddingReader | None = None
        try:
            self._reader = self._run(
                EmbeddingReader.connect(
                    address,
                    model=model,
                    timeout_s=timeout_s,
                    ssl_context=ssl_context,
                    server_hostname=server_hostname,
                    token=token,
                )
            )
        except BaseException:
            self.close()
            raise

    get = _blocking(EmbeddingReader.get)
    get_many = _blocking(EmbeddingReader.get_many)
    get_by_identity = _blocking(EmbeddingReader.get_by_identity)
    find_rows = _blocking(EmbeddingReader.find_rows)
    dense = _blocking(EmbeddingReader.dense)
    scalars = _blocking(EmbeddingReader.scalars)
    digest = _blocking(EmbeddingReader.digest)
    status = _blocking(EmbeddingReader.status)

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """By fqn; updated when a call names an unknown table."""
        return dict(self._connected.tables)

    def close(self) -> None:
        """Close all connections and end the thread. Idempotent."""

        async def end() -> None:
            if self._reader is not None:
                await self._reader.close()

        self._thread.close(end, _CLOSE_S)

    def __repr__(self) -> str:
        return repr(self._reader).replace(EmbeddingReader.__name__, type(self).__name__, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _connected(self) -> EmbeddingReader:
        assert self._reader is not None, "the constructor connects"
        return self._reader

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._thread.run(work, late="no answer in time")
