"""Check a pickle before it is loaded: that it takes no more memory and time than its own length explains.

Unpicklers take memory as a pickle says, and only then look whether there are so many bytes: for the bytes of one
opcode, for the table of what it has noted, for `bytearray(n)`, and for text that is encoded again and again. A tuple of
the same tuple twice, and so on, takes little memory, but as the key of a dict all of it is gone through.
"""

from __future__ import annotations

import pickletools
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Any

__all__ = ["check_pickle"]

_PUTS, _GETS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})
# Each makes bytes longer, or needs a library; pickles of bytes have `latin1`.
_TRANSFORMS = frozenset({"base64_codec", "bz2_codec", "hex_codec", "quopri_codec", "uu_codec", "zlib_codec"})
_MAX_CODEC_CHARS = 20
_MARK = 0


def check_pickle(data: bytes) -> None:
    """Check the opcodes of a pickle; nothing of it is run.

    Raises:
        ValueError: It is cut or damaged, or takes memory or time that its length does not explain.
    """
    names, transforms = set[str](), set[str]()
    sizes, num_bytes = _Sizes(), len(data)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _PUTS and int(argument or 0) >= len(data):
            raise ValueError(f"it notes object {argument} in {len(data)} bytes")
        if opcode.name == "GLOBAL":
            names.add(str(argument).rpartition(" ")[2])
        elif isinstance(argument, str) and len(argument) < _MAX_CODEC_CHARS and _codec_of(argument) in _TRANSFORMS:
            transforms.add(argument)
        if sizes.step(opcode.name, argument) > num_bytes:
            raise ValueError(f"it makes a tuple of more objects than its {len(data)} bytes")
    if "bytearray" in names or ("encode" in names and transforms):
        raise ValueError("what it calls takes any amount of memory: bytearray, or an encoding of an encoding")


class _Sizes:
    """How many objects each object on an unpickler's stack has in it, one that is there twice counted twice."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def step(self, name: str, argument: Any) -> int:
        """Follow an opcode; return the size of the tuple, or of the result of a call, that it makes, 0 for others."""
        stack = self._stack
        if name in _PUTS:
            self._memo[int(argument)] = stack[-1]
            return 0
        if name in _GETS:
            stack.append(self._memo[int(argument)])
            return 0
        takes_slice, num_before, num_after, is_counted = _EFFECTS[name]
        taken = 0
        if takes_slice:
            while (size := stack.pop()) != _MARK:
                taken += size
        for _ in range(num_before):
            taken += stack.pop()
        if num_after == 1:
            stack.append(_MARK if name == "MARK" else 1 + taken)
        elif num_after:  # DUP
            stack.extend((taken, taken))
        if name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        return 1 + taken if is_counted else 0


def _effect_of(opcode: pickletools.OpcodeInfo) -> tuple[bool, int, int, bool]:
    """Return whether an opcode takes all down to a mark, how many objects besides, how many it puts, if it counts."""
    before, takes_slice = opcode.stack_before, pickletools.markobject in opcode.stack_before
    num_before = before.index(pickletools.markobject) if takes_slice else len(before)
    return takes_slice, num_before, len(opcode.stack_after), opcode.name.startswith("TUPLE") or opcode.name == "REDUCE"


_EFFECTS = {opcode.name: _effect_of(opcode) for opcode in pickletools.opcodes}


def _codec_of(text: str) -> str:
    name = normalize_encoding(text).lower() if text.isascii() else ""
    return aliases.get(name, name)
