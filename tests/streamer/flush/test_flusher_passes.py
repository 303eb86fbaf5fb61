"""More dirty rows than a staging buffer holds: in which parts they go out, and what the marks then promise."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scripted_flushes import ScriptedFlushes
from text_scripts import Script, scripts
from trainer_tables import SMALL_BYTES, WIDE, Submitted, Trained, rows_of

from headrace.kernels.dirty_sets import DirtyRows


@scripts(__file__, "passes")
def test_scripts(script: Script) -> None:
    """Parts of a large dirty set are as the scripts say."""
    script.run(ScriptedFlushes())


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 1199), max_size=400), st.booleans(), st.booleans()), min_size=1, max_size=25
    )
)
def test_marks_keep_their_promise(steps: list[tuple[list[int], bool, bool]]) -> None:
    """At an exact mark the store equals the tables; at any mark no row is older than the marked step left it."""
    tables = [Trained("a.weight", 700, 40), Trained("b.weight", 500, 40)]
    for table in tables:
        table.weights.detach().zero_()  # older than any step
    submitted = Submitted(tables, staging_bytes=SMALL_BYTES)
    stored = {table.tapped.spec.fqn: table.weights[:, 0].tolist() for table in tables}
    history: dict[int, dict[str, list[float]]] = {}
    for step, (rows, releases, is_wide) in enumerate(steps, 1):
        tables[0].update([row for row in rows if row < 700] + (list(range(700)) if is_wide else []), float(step))
        tables[1].update([row - 700 for row in rows if row >= 700], float(step))
        now = {table.tapped.spec.fqn: table.weights[:, 0].tolist() for table in tables}
        history[step] = now
        num_before = len(submitted.flushes)
        submitted.flusher.on_step(step)
        for flush in submitted.flushes[num_before:]:
            for _, fqn, row, data in rows_of(flush, 1):
                stored[fqn][row] = float(np.frombuffer(data, "<f4")[0])
            if flush.mark is not None and flush.mark.is_exact_cut:
                assert stored == now
            elif flush.mark is not None:
                then = history[flush.mark.step]
                assert all(s >= t for fqn in then for s, t in zip(stored[fqn], then[fqn], strict=True))
        if releases:
            submitted.release()
    submitted.release()
    for _ in range(5):
        submitted.flusher.on_step(len(steps) + 1)
        submitted.release()
    assert submitted.flusher.num_dirty_rows == 0


def test_a_pass_takes_no_second_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """More dirty rows than a buffer holds go out of the one bitmap that a table has."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    monkeypatch.setattr(DirtyRows, "__init__", lambda *_: pytest.fail("a second bitmap"))
    table.mark(range(3000))
    for step in range(1, 9):
        table.mark(range(1500))
        submitted.flusher.on_step(step)
        submitted.release()
