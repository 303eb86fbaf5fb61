"""The files that a process may have open: its limit is raised, and divided among those who need them."""

from __future__ import annotations

import logging
import resource

from headrace.paramserver.process.log_format import fact

__all__ = ["FILES_OF_STORE", "allow_open_files", "files_for_store"]

_log = logging.getLogger(__name__)

FILES_OF_STORE = 4096
"""Files that a shard's log and store, or a replica's stores, may have open at once."""

# More than these, and RocksDB opens a file anew for most reads where a store has some thousands: a read of the disk
# and some 30 µs each. 20 is the least that RocksDB takes.
_MOST_OF_STORE, _LEAST_OF_STORE = 2048, 20


def allow_open_files(max_connections: int) -> int:
    """Raise the limit of open files to what the connections and RocksDB may need, as far as this user may.

    Returns:
        The connections that there may be, so that whoever opens many leaves files to the log: without one it stops.
    """
    wanted = max_connections + FILES_OF_STORE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed >= wanted:
        return max_connections
    most = min(max_connections, max(allowed - FILES_OF_STORE, allowed // 2))
    message = "the limit of open files is low: raise it (ulimit -n)"
    fact(_log, logging.WARNING, message, limit=hard, wanted=wanted, max_connections=most)
    return most


def files_for_store(num_stores: int = 1) -> int:
    """Return how many files each of some RocksDBs may hold open: together an eighth of what the process may.

    A replica that begins anew has two copies of each, a shard the log's files and those of snapshots besides; and the
    process may be somebody else's.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    of_all = _MOST_OF_STORE * num_stores if soft == resource.RLIM_INFINITY else soft // 8
    return max(min(of_all // num_stores, _MOST_OF_STORE), _LEAST_OF_STORE)
