"""Flags that several commands have, declared once: those to connect to a running server, and others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from headrace.paramserver.observe.status_query import (
    AuthorityFlag,
    CertificateFlag,
    KeyFlag,
    StatusAccess,
    TlsFlag,
    TokenFlag,
)

__all__ = ["Access", "AsJson", "OnlyTables", "ServerAddress", "option", "with_server_flags"]

Access = Callable[..., StatusAccess]
"""Takes a server's address and `timeout_s`, and returns a `StatusAccess` made with the flags and the environment."""


def option(text: str, metavar: str | None = None, *names: str, **settings: Any) -> Any:
    """Return a flag with a help text, and without its default there."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False, **settings)


AsJson = Annotated[bool, option("Print one JSON object.", None, "--json")]
OnlyTables = Annotated[list[str] | None, option("Only this table; may be repeated.", "FQN")]
ServerAddress = Annotated[str | None, option("Any shard of a running server.", "HOST:PORT")]

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
        flags = {name: given.pop(name, default) for name, (_, default) in _FLAGS.items()}
        return function(*args, access=functools.partial(StatusAccess.load, **flags), **given)

    own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [parameter for parameter in own if parameter.name != "access"]
    for name, (annotation, default) in _FLAGS.items():
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
