"""Coverage-guided fuzzing of the codec with atheris, which the suite does not need: `pip install atheris`.

    python tests/fuzz/atheris_messages.py -max_total_time=60

Arguments are libFuzzer's. It starts from the golden messages and the nasty ones, and stops with a traceback and the
bytes at the first thing that is neither a message nor a `ProtocolError`, takes more than ten seconds, or more than
512 MiB.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

with atheris.instrument_imports(include=["headrace.schemas.messages"]):
    from headrace.schemas import messages

from thrift_values import METHODS, nasty_messages

from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl

_GOLDEN = Path(__file__).parents[1] / "schemas" / "golden_messages.txt"


def _check(data: bytes) -> None:
    """Decode a message; one that is good must come back the same after it was written and read again."""
    frame = memoryview(data)
    try:
        header = messages.decode_header(frame)
        if header.name not in METHODS:
            return
        part = "args" if header.kind == messages.CALL else "result"
        cls = getattr(idl.ParameterServer, f"{header.name}_{part}")
        value = messages.decode_struct(cls, frame, header.body_offset)
    except ProtocolError:
        return
    again = _encoded(header, value)
    value_again = messages.decode_struct(cls, memoryview(again), messages.decode_header(memoryview(again)).body_offset)
    assert _encoded(header, value_again) == again


def _encoded(header: Any, value: Any) -> bytes:
    segments = messages.encode_message(header.name, header.kind, header.seqid, value)
    return b"".join(bytes(segment) for segment in segments)


def main() -> None:
    """Fuzz until told to stop."""
    with tempfile.TemporaryDirectory() as corpus:
        seeds = [bytes.fromhex(line.split()[2]) for line in _GOLDEN.read_text().splitlines() if line[0] != "#"]
        seeds += [message for _, message in nasty_messages() if len(message) < 4096]
        for number, seed in enumerate(seeds):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        limits = ["-max_len=4096", "-timeout=10", "-rss_limit_mb=512"]
        atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], corpus], _check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
