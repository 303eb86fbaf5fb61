"""When a shard process is taken to hang: after several looks in a row at which its event loop had not run."""

from __future__ import annotations

__all__ = ["HangWatch"]

_NUM_LOOKS = 10


class HangWatch:
    """Counts looks at one process. Pure: it neither looks nor knows the time.

    It counts looks and not seconds, because a machine that was suspended, or a supervisor that was stopped or had no
    processor, finds much time gone at once in which the process could not run either: that is one look, whatever the
    clocks say.

    Attributes:
        interval_s: Time from one look to the next, seconds; None when nobody shall look.
    """

    def __init__(self, timeout_s: float) -> None:
        """Begin with a process that runs.

        Args:
            timeout_s: How long its event loop may be away, seconds; 0 for ever.
        """
        self.interval_s = timeout_s / _NUM_LOOKS or None
        self._num_missed = 0

    def look(self, *, has_run: bool) -> bool:
        """Return whether the process is to be taken to hang; then the count begins anew.

        Args:
            has_run: Its event loop has run since the last look.
        """
        self._num_missed = 0 if has_run else self._num_missed + 1
        if self._num_missed < _NUM_LOOKS:
            return False
        self._num_missed = 0
        return True
