"""A hook of the site's build: the page of messages gets a section for each public error, made from its docstring.

An error without a paragraph `What to do:` ends the build.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from headrace.schemas import errors

_PLACE = "<!-- a section for each error -->"
_TO_DO = re.compile(r"^What to do: (.+?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def _section(error: type[errors.HeadraceError]) -> str:
    """Return the Markdown of one error: when it is raised, and what to do."""
    text = inspect.cleandoc(error.__doc__ or "").partition("\n\nAttributes:")[0]
    to_do = _TO_DO.search(text)
    if to_do is None:
        raise ValueError(f"the docstring of {error.__name__} does not say what to do")
    parent = error.__mro__[1].__name__
    kind = "" if parent in ("Exception", "HeadraceError") else f" It is a [`{parent}`](#{parent.lower()})."
    again = " The same call may succeed later." if error.retriable else ""
    return f"## {error.__name__}\n\n{text[: to_do.start()].strip()}{kind}{again}\n\n**What to do.** {to_do[1]}\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Put the sections in their place, the root first and then by name."""
    del page, config, files
    if _PLACE not in markdown:
        return markdown
    names = sorted(errors.__all__, key=lambda name: (name != "HeadraceError", name))
    return markdown.replace(_PLACE, "\n".join(_section(getattr(errors, name)) for name in names))
