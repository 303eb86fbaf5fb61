"""Messages that are almost right: a few fields of a struct with extreme values, or a few bytes that are wrong.

Everything follows from a seed.
"""

from __future__ import annotations

import random
import reprlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from thrift_values import BOOL, DOUBLE, I16, I32, I64, LIST, SPEC_BINARY, STRING, STRUCT, example, field

__all__ = ["Mutator"]

_BITS = {I16: 15, I32: 31, I64: 63}
_EXTREME_IDS = np.array([-1, -(2**63), 2**63 - 1, 0], "<i8").tobytes()
_TEXTS = (
    "",
    "x" * 65_000,
    "\x1b]0;owned\x07\x1b[2J\n\r",
    "../../../../etc/passwd",
    "%s %d {0} {}",
    "\N{RIGHT-TO-LEFT OVERRIDE}table\0",
    "[a-z]*?**" * 20,
    "ttl_s=-1, max_rows=99999999999999999999",
    '{"a":' * 1000,
)
_COUNTS = (2, 100, 20_000)
_MIB = 2**20


class Mutator:
    """Mutates structs and messages; the same ones in the same way for the same seed."""

    def __init__(self, seed: int, *, texts: Sequence[str] = ()) -> None:
        """Begin with a seed.

        Args:
            seed: Any.
            texts: More values of texts, such as names that the peer knows.
        """
        self.random = random.Random(seed)
        self._texts = (*_TEXTS, *texts)

    def mutate(self, value: Any) -> str:
        """Set some fields of a struct, or of structs inside, to other values; return which."""
        changed = []
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            places = list(self._places(value))
            if not places:
                break
            path, owner, (ttype, name, *detail, is_required) = self.random.choice(places)
            old = getattr(owner, name)
            is_left_out = not is_required and old is not None and self.random.random() < 0.2
            new = None if is_left_out else self._other(ttype, detail[0] if detail else None, old)
            setattr(owner, name, new)
            changed.append(f"{path}={_shown(new)}")
        return ", ".join(changed)

    def mutate_bytes(self, message: bytes) -> bytes:
        """Return a message with a few wrong bytes."""
        chance = self.random
        kinds: list[Callable[[bytes], bytes]] = [self._cut, self._counted, self._doubled, self._scattered, self._nested]
        return chance.choice(kinds)(message)

    def _places(self, value: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
        for spec in value.thrift_spec.values():
            name, inner = spec[1], getattr(value, spec[1])
            path = f"{prefix}{name}"
            yield path, value, spec
            is_short = spec[0] == LIST and inner and len(inner) < 100  # what is in a longer one would grow as often
            elements = [inner] if spec[0] == STRUCT else inner[:3] if is_short else []
            for element in elements:
                if hasattr(element, "thrift_spec"):
                    yield from self._places(element, f"{path}.")

    def _other(self, ttype: int, detail: Any, old: Any) -> Any:
        chance = self.random
        if ttype in _BITS:
            most = 2 ** _BITS[ttype] - 1
            near = [old - 1, old + 1, old * 2] if old is not None else []
            value = chance.choice([-most - 1, most, -1, 0, 1, 2**15, most // 2, chance.randrange(-most, most), *near])
            return max(-most - 1, min(most, value))
        if ttype == BOOL:
            return not old
        if ttype == DOUBLE:
            return chance.choice([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e308, 1e18])
        if ttype == STRING:
            return chance.choice([*self._texts, (old or "") + "x"])
        if ttype == SPEC_BINARY:
            was = b"" if old is None else bytes(old)
            size = min(len(was), 65_536)
            shorter, longer = [b"", was[:-1], was[: len(was) // 2]], [was + bytes(8), was * 3]
            others = [b"\xff", bytes(8), _EXTREME_IDS, bytes(_MIB), chance.randbytes(size), b"\xff" * size]
            return chance.choice([*shorter, *longer, *others])
        if ttype == STRUCT:
            value = example(detail)
            self.mutate(value)
            return value
        assert ttype == LIST
        element, inner = detail if isinstance(detail, tuple) else (detail, None)
        new = self._other(element, inner, None)
        some = list(old or ())
        return chance.choice([[], some[:-1], some * 2, [*some, new], [new], [new, *some], self._many(some, new)])

    def _many(self, some: list[Any], new: Any) -> list[Any]:
        """Return many elements of few bytes."""
        count = self.random.choice(_COUNTS)
        one = some[0] if some else new
        is_small = len(repr(one)) < 1000  # also with all that is inside
        return [one] * (count if is_small else 2)

    def _cut(self, message: bytes) -> bytes:
        return message[: self.random.randrange(1, len(message))]

    def _counted(self, message: bytes) -> bytes:
        """Put a length or a count somewhere."""
        changed = bytearray(message)
        value = self.random.choice([-1, -(2**31), 2**31 - 1, 65_537, 0, len(message)])
        struct.pack_into(">i", changed, self.random.randrange(len(message) - 3), value)
        return bytes(changed)

    def _doubled(self, message: bytes) -> bytes:
        start, at = self.random.randrange(len(message)), self.random.randrange(len(message))
        return message[:at] + message[start : start + self.random.randrange(1, 60)] + message[at:]

    def _scattered(self, message: bytes) -> bytes:
        changed = bytearray(message)
        for _ in range(self.random.randint(1, 6)):
            changed[self.random.randrange(len(message))] = self.random.randrange(256)
        return bytes(changed)

    def _nested(self, message: bytes) -> bytes:
        """End the struct with an unknown field: deep, or of many elements."""
        many = struct.pack(">bi", STRUCT, 60_000) + bytes(60_000)
        deep = field(STRUCT, 99) * 1000 + bytes(1000)
        return message[:-1] + self.random.choice([field(LIST, 99) + many, deep, field(STRUCT, 99) * 40_000]) + b"\0"


def _shown(value: Any) -> str:
    text = reprlib.repr(value)  # of long lists the first elements: of twenty thousand it takes half a minute
    return text if len(text) < 60 else f"{text[:57]}..."
