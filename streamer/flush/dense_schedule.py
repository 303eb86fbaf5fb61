"""When the dense part goes out: by the clock, or at steps that the ranks of a run agree on."""

from __future__ import annotations

import enum
import math

from headrace.streamer.world import World, warn_when_late

__all__ = ["DenseSchedule", "Readiness", "Turn"]

_MAX_STEPS = 2**40


class Turn(enum.Enum):
    """What a rank does with the dense part at a step boundary."""

    NOT_DUE = enum.auto()
    WAIT = enum.auto()  # a rank lacks a staging buffer: no flush before all have one, or rows would take it again
    DUE = enum.auto()


class Readiness(enum.IntEnum):
    """Whether a rank could send the dense part now. ON THE WIRE between ranks of one run."""

    IS_ABSENT = 0  # its last dense part is on its way, it is paused, or its streaming has ended
    LACKS_BUFFER = 1
    IS_READY = 2


class DenseSchedule:
    """Decides at each step boundary. A run of one rank has a clock.

    Several ranks publish at the same steps, because only then their dense parts are of one moment. At a dense step they
    exchange how many steps an interval has and whether they are ready; all publish or none. The next dense step follows
    from what was exchanged, so it is the same on all ranks.
    """

    def __init__(self, world: World) -> None:
        """Begin with the dense part due."""
        self._world = world
        self._last_s = -math.inf
        # The first step at which all are asked, and when and at which step they were.
        self._next_step = -1
        self._asked: tuple[float, int] | None = None

    @property
    def is_agreed(self) -> bool:
        """Whether several ranks have to agree."""
        return self._world.size > 1

    def make_due(self) -> None:
        """Have the dense part go out at the next step. Several ranks go on as they have agreed."""
        self._last_s = -math.inf

    def begin_anew(self) -> None:
        """Make it due at the next step, on all ranks. REQUIRES: all ranks call it between the same two steps."""
        self._next_step = -1
        self.make_due()

    def is_asked(self, step: int, now_s: float, interval_s: float) -> bool:
        """Return whether `turn` must be called at the end of this step. Call it at the end of each."""
        if not self.is_agreed:
            return now_s - self._last_s >= interval_s
        return step >= self._next_step

    def turn(self, step: int, now_s: float, interval_s: float, readiness: Readiness) -> Turn:
        """Return what to do at the end of a step; a call of all ranks.

        Raises:
            HeadraceError: Another rank has ended.
        """
        found = [[int(readiness), self._steps_in(interval_s, now_s, step)]]
        if self.is_agreed:
            call = f"the end of step {step}, where dense parameters are due"
            with warn_when_late(call, rank=self._world.rank, world_size=self._world.size):
                found = self._world.exchange(found[0])
            self._asked = now_s, step
        least = min(readiness for readiness, _ in found)
        self._next_step = step + (1 if least == Readiness.LACKS_BUFFER else max(steps for _, steps in found))
        return {Readiness.IS_READY: Turn.DUE, Readiness.LACKS_BUFFER: Turn.WAIT}.get(Readiness(least), Turn.NOT_DUE)

    def note_sent(self, now_s: float) -> None:
        """Note that the dense part goes out."""
        self._last_s = now_s

    def _steps_in(self, interval_s: float, now_s: float, step: int) -> int:
        """Return the steps of an interval, at the pace since the last exchange; 1 before there was one."""
        if self._asked is None or now_s <= self._asked[0]:
            return 1
        asked_s, asked_step = self._asked
        steps = interval_s * (step - asked_step) / (now_s - asked_s)
        return max(1, math.ceil(min(steps, _MAX_STEPS)))
