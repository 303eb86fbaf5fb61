"""Which steps are complete when two parts of the tables go round at their own pace."""

from __future__ import annotations

from typing import Any

from text_scripts import Script, scripts

from headrace.streamer.flush.step_marks import NO_REMAINDER, FlushOutcome, Remainder, StepMarkPolicy

_REMAINDERS = {
    "clean": NO_REMAINDER,
    "begins": Remainder(is_clean=False, has_wrapped=False, began_at_start=True),
    "goes_on": Remainder(is_clean=False, has_wrapped=False, began_at_start=False),
    "wraps": Remainder(is_clean=False, has_wrapped=True, began_at_start=False),
}


class _Marks:
    def __init__(self) -> None:
        self._policy = StepMarkPolicy()
        self._step = 0

    def flush(self, host: str, device: str, *, changed_s: float | None = None, is_sent: bool = True, **how: Any) -> str:
        """Judge a flush; accept it if it is sent."""
        self._step += 1
        step, remainders = self._step, (_REMAINDERS[host], _REMAINDERS[device])
        changed_s = step if changed_s is None else changed_s
        judgment = self._policy.judge(
            FlushOutcome(step=step, time_us=step, now_s=step, changed_s=changed_s, remainders=remainders, **how)
        )
        if is_sent:
            self._policy.accept(judgment)
        if (mark := judgment.mark) is None:
            return f"no mark, dirty since {judgment.dirty_since_s:g}"
        assert mark.time_us == mark.step
        kinds = " exact" * mark.is_exact_cut + " recorded" * mark.is_recorded
        return f"mark {mark.step}{kinds}, dirty since {judgment.dirty_since_s:g}"

    def is_in_pass(self) -> str:
        return "yes" if self._policy.is_in_pass else "no"


@scripts(__file__, "step_marks")
def test_scripts(script: Script) -> None:
    """Marks are as the scripts say."""
    script.run(_Marks())
