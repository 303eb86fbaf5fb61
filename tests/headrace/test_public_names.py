"""The front door: every public name is there (that none costs torch before it is used: `test_cli.py`)."""

from __future__ import annotations

import headrace


def test_every_public_name_is_there() -> None:
    """Each name of `__all__` can be imported and is listed; others are not."""
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None and name in dir(headrace)
    assert not hasattr(headrace, "Nothing")
