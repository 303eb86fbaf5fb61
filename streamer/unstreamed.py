"""What the attached models train as embeddings and a streamer does not send, so that its audits do not say equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.attach import Tap
from headrace.streamer.taps.model_tree import or_without

__all__ = ["find_unstreamed", "list_new_tables", "refuse_new_tables"]

_IS_NEW = "it is trained since attach: call attach(model, optimizer) again, which takes in the tables that are new"


def find_unstreamed(taps: Iterable[Tap], *, is_published: Callable[[str], bool]) -> dict[str, str]:
    """Return by name what is trained and not streamed, with the reason; not what `attach` was told to leave out.

    `is_published` returns whether a name goes out with the dense part.
    """
    taps = list(taps)
    streamed = {name for tap in taps for name in tap.names}
    found: dict[str, str] = {}
    for tap in taps:
        found |= tap.unstreamed
        # A sharded module that is new has the names of its tables in the tap that has taken it in.
        new = [name for name in tap.new_tables() if not any(f"{each}.".startswith(f"{name}.") for each in streamed)]
        found |= dict.fromkeys(new, _IS_NEW)
    return {name: reason for name, reason in found.items() if not is_published(name)}


def list_new_tables(unstreamed: Mapping[str, str]) -> list[str]:
    """Return the names of the tables that another `attach` can take in; the log has named the others."""
    return sorted(name for name, reason in unstreamed.items() if reason is _IS_NEW)


def refuse_new_tables(unstreamed: Mapping[str, str]) -> None:
    """Refuse a flush that would leave out tables which another `attach` can take in.

    Raises:
        UnsupportedModelError: There are some.
    """
    if new := list_new_tables(unstreamed):
        raise UnsupportedModelError(
            f"{first_of([repr(name) for name in new])} is not streamed, though all else is sent: {_IS_NEW}"
            f"{or_without(*new)}"
        )
