"""Outputs of served copies are told apart: sound, wrong, of no step, and older than seen before."""

from __future__ import annotations

from chaos_served import Outputs, Seen


def test_each_kind_is_told() -> None:
    """A copy may skip steps and stay at one; it may not go back, differ, or show what no trainer computed."""
    outputs = Outputs()
    for model in ("ctr", "cvr"):
        for step in (1, 2, 3):
            outputs.note(Seen(model, (4, step), b"%s %d" % (model.encode(), step)))
    assert not outputs.compare(
        [Seen("ctr", (4, 1), b"ctr 1"), Seen("ctr", (4, 3), b"ctr 3"), Seen("ctr", (4, 3), b"ctr 3")]
    )
    assert not outputs.compare([Seen("cvr", (4, 2), b"cvr 2")])
    for seen, kind in (
        (Seen("ctr", (4, 2), b"ctr 2"), "stale"),
        (Seen("cvr", (4, 3), b"ctr 3"), "wrong"),
        (Seen("cvr", (5, 1), b"cvr 1"), "unknown"),
    ):
        (line,) = outputs.compare([seen])
        assert line.startswith(kind)
    assert not outputs.compare([Seen("ctr", (4, 1), b"ctr 1")], may_go_back=True)
    assert not outputs.compare([Seen("ctr", (4, 1), b"ctr 1")], of="another process")
    assert outputs.num_compared == 9
    assert outputs.found == {"stale": 1, "wrong": 1, "unknown": 1}
