"""Check a pickle before it is loaded: that it takes no more memory than its own length explains.

Unpicklers take memory as a pickle says, and only then look whether there are so many bytes: for the bytes of one
opcode, for the table of what it has noted, for `bytearray(n)`, and for text that is encoded again and again.
"""

from __future__ import annotations

import pickletools
from encodings import normalize_encoding
from encodings.aliases import aliases

__all__ = ["check_pickle"]

_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
# Each makes bytes longer, or needs a library; pickles of bytes have `latin1`.
_TRANSFORMS = frozenset({"base64_codec", "bz2_codec", "hex_codec", "quopri_codec", "uu_codec", "zlib_codec"})


def check_pickle(data: bytes) -> None:
    """Check the opcodes of a pickle; nothing of it is run.

    Raises:
        ValueError: It is cut or damaged, or takes memory that its length does not explain.
    """
    names, transforms = set[str](), set[str]()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _MEMO and int(argument or 0) >= len(data):
            raise ValueError(f"it notes object {argument} in {len(data)} bytes")
        if not isinstance(argument, str):
            continue
        if opcode.name == "GLOBAL":
            names.add(argument.rpartition(" ")[2])
        elif _codec_of(argument) in _TRANSFORMS:
            transforms.add(argument)
    if "bytearray" in names or ("encode" in names and transforms):
        raise ValueError("what it calls takes any amount of memory: bytearray, or an encoding of an encoding")


def _codec_of(text: str) -> str:
    name = normalize_encoding(text).lower() if len(text) < 32 and text.isascii() else ""
    return aliases.get(name, name)
