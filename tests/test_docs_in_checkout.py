"""The pages of a checkout can be read without the site: none is empty, or it says how to fill it."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import headrace
from headrace.schemas import errors

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\(([^)#\s]+\.\w+)[^)\s]*\)")
# What only the site's build turns into text.
_MADE = re.compile(r"^(?:::: |--8<-- )", re.MULTILINE)
_NOTE = re.compile(r"<!-- in a checkout -->\n(.*?)<!-- on the site -->\n", re.DOTALL)
_TO_DO = re.compile(r"^What to do: (.+?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_SECTIONS = "[the classes](../schemas/errors.py).\n\n"


def _section(error: type[errors.HeadraceError]) -> str:
    """Return the Markdown of one error: when it is raised, and what to do."""
    text = inspect.cleandoc(error.__doc__ or "").partition("\n\nAttributes:")[0]
    to_do = _TO_DO.search(text)
    assert to_do is not None, f"the docstring of {error.__name__} has no paragraph `What to do:`"
    parent = error.__mro__[1].__name__
    kind = "" if parent in ("Exception", "HeadraceError") else f" It is a [`{parent}`](#{parent.lower()})."
    again = " The same call may succeed later." if error.retriable else ""
    return f"## {error.__name__}\n\n{text[: to_do.start()].strip()}{kind}{again}\n\n**What to do.** {to_do[1]}\n"


def test_messages_say_what_to_do_about_every_public_error() -> None:
    """The page of messages has the docstring of each error that users can import, the root first and then by name."""
    page = ROOT / "docs" / "messages.md"
    names = sorted(errors.__all__, key=lambda name: (name != "HeadraceError", name))
    assert set(names) == {name for name in headrace.__all__ if name.endswith("Error")}
    head, at, _ = page.read_text().partition(_SECTIONS)
    expected = head + at + "\n".join(_section(getattr(errors, name)) for name in names)
    if os.environ.get("HEADRACE_REWRITE"):
        page.write_text(expected)
    assert at and page.read_text() == expected, "run HEADRACE_REWRITE=1 scripts/test tests/test_docs_in_checkout.py"


def test_pages_that_the_site_fills_say_so_in_a_checkout() -> None:
    """Each names the extra, the command and files that can be read meanwhile; README.md links to none of them."""
    made = {page for page in (ROOT / "docs").rglob("*.md") if _MADE.search(page.read_text())}
    assert len(made) >= 8
    for page in made:
        note = _NOTE.search(page.read_text())
        assert note is not None, page
        assert "'.[docs]'" in note[1] and "`mkdocs serve`" in note[1], page
        links = _LINK.findall(note[1])
        assert links and all((page.parent / link).is_file() for link in links), page
    linked = {(ROOT / link).resolve() for link in _LINK.findall((ROOT / "README.md").read_text())}
    assert linked and not linked & made
