"""The least that freshness can cost on a machine: the same bytes to a bare server that syncs them, and to a reader.

Two processes with one blocking socket each. One appends what comes to a file and calls `fdatasync` before it answers;
the other reads all of it and answers. One after the other they are the floor: an update that is durable before it is
visible elsewhere cannot have less.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from headrace.scripts.benches.bench_child import BenchChild, give_answer, orders

__all__ = ["Floor"]


class Floor:
    """Both processes and the connections to them; use it with `with`."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Start and connect.

        Args:
            folder: Where the file goes, on the disk of the server's log.
            size_bytes: Of each message.

        Raises:
            UnavailableError: A process has ended.
        """
        self._data = os.urandom(size_bytes)
        self._children: list[BenchChild] = []
        self._socks: list[socket.socket] = []
        try:
            for what, path in (("floor's writer", str(folder / "floor")), ("floor's reader", None)):
                child = BenchChild(__name__, what, {"size_bytes": size_bytes, "path": path})
                self._children.append(child)
                sock = socket.create_connection(("127.0.0.1", child.ready["port"]))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socks.append(sock)
        except BaseException:
            self.close()
            raise

    def measure(self, num_rounds: int, *, interval_s: float) -> list[float]:
        """Return the time of each round trip to both, one after the other, seconds.

        Args:
            num_rounds: How many.
            interval_s: From one to the next: a machine that sleeps in between is slower than one that does not.
        """
        found = []
        next_s = time.monotonic()
        for _ in range(num_rounds):
            begin_s = time.perf_counter()
            for sock in self._socks:
                sock.sendall(self._data)
                if not sock.recv(1):
                    raise ConnectionError("a process of the floor has ended")
            found.append(time.perf_counter() - begin_s)
            next_s = max(next_s + interval_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
        return found

    def close(self) -> None:
        """End the processes; idempotent."""
        for sock in self._socks:
            sock.close()
        for child in self._children:
            child.close()

    def __enter__(self) -> Floor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _main() -> None:
    order = next(orders())
    buffer = memoryview(bytearray(order["size_bytes"]))
    file = None if order["path"] is None else os.open(order["path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        give_answer({"port": listener.getsockname()[1]})
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            while _receive(sock, buffer):
                if file is not None:
                    os.write(file, buffer)
                    os.fdatasync(file)
                sock.sendall(b"!")


def _receive(sock: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; return whether there was a whole message."""
    filled = 0
    while filled < len(buffer):
        count = sock.recv_into(buffer[filled:])
        if not count:
            return False
        filled += count
    return True


if __name__ == "__main__":
    _main()
