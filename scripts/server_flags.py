"""The flags by which a command gets into a running server, declared once for all commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from headrace.paramserver.metrics.status_client import (
    AuthorityFlag,
    CertificateFlag,
    KeyFlag,
    StatusAccess,
    TlsFlag,
    TokenFlag,
)
from headrace.paramserver.reading.shard_link import Dial

__all__ = ["Access", "dial_of", "with_server_flags"]

Access = Callable[..., StatusAccess]
"""Called with a server's address and `timeout_s`: what the flags and the environment say of it. See `StatusAccess`."""

_FLAGS: dict[str, tuple[Any, Any]] = {
    "tls": (TlsFlag, False),
    "tls_authority": (AuthorityFlag, None),
    "tls_certificate": (CertificateFlag, None),
    "tls_key": (KeyFlag, None),
    "token_file": (TokenFlag, None),
}


def with_server_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags in place of its keyword-only parameter `access`, an `Access`."""

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        shown = {name: given.pop(name) for name in _FLAGS}
        return function(*args, access=functools.partial(StatusAccess.load, **shown), **given)

    own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [
        *(parameter for parameter in own if parameter.name != "access"),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in _FLAGS.items()
        ),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def dial_of(access: StatusAccess, role: int) -> Dial:
    """Return how shards are reached in a role."""
    return Dial(
        ssl_context=access.ssl_context, server_hostname=None, token=access.token, timeout_s=access.timeout_s, role=role
    )
