"""What callers hand to the streamer, checked before anything is done with it: later it would fail far from the call."""

from __future__ import annotations

import operator
import threading
from typing import SupportsFloat, SupportsIndex

from headrace.paramserver.config.server_config import DEFAULT_PORT
from headrace.paramserver.ingest.sessions import MAX_NAME_BYTES
from headrace.paramserver.rpc.address import parse_address
from headrace.schemas.errors import ConfigError

__all__ = ["check_run", "host_and_port", "step_number", "timeout_seconds"]

# Of 64 bits with a sign, and steps count on from it.
_MAX_STEP = 2**62


def host_and_port(address: str) -> tuple[str, int]:
    """Return where the server is.

    Raises:
        ConfigError: It is no address.
    """
    if not isinstance(address, str):
        raise ConfigError(f"address {address!r} is no text: give one such as '127.0.0.1:{DEFAULT_PORT}'")
    return parse_address(address, default_port=DEFAULT_PORT)


def check_run(run: str) -> None:
    """Check a run's name.

    Raises:
        ConfigError: It is not a printable line, or too long.
    """
    if not isinstance(run, str):
        raise ConfigError(f"run {run!r} is no text: give the run a name")
    # Half of a surrogate pair is not printable either, and cannot be encoded.
    if not run.isprintable() or not 1 <= len(run.encode()) <= MAX_NAME_BYTES:
        raise ConfigError(f"run {run[:40]!r} is empty, over {MAX_NAME_BYTES} bytes or has control characters")


def step_number(step: SupportsIndex, *, after: int) -> int:
    """Return a step's number as a plain int, which is what messages and checkpoints can hold.

    Args:
        step: An integer, also numpy's, or a tensor of one.
        after: The last step's number.

    Raises:
        ConfigError: It is no integer, or below the last one.
    """
    try:
        number = int(operator.index(step))
    except TypeError as exc:
        raise ConfigError(f"step {step!r} is not a whole number: give an int") from exc
    if not after <= number <= _MAX_STEP:
        raise ConfigError(f"step {number} after step {after}: steps only rise")
    return number


def timeout_seconds(timeout_s: SupportsFloat) -> float:
    """Return how long to wait, seconds.

    Raises:
        ConfigError: It is no number, or longer than a thread can wait.
    """
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"timeout_s {timeout_s!r} is no number: give seconds") from exc
    if not seconds <= threading.TIMEOUT_MAX:  # NaN neither
        raise ConfigError(f"timeout_s {timeout_s!r} cannot be waited for: give seconds")
    return seconds
