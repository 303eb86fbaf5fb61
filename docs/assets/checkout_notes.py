"""A hook of the site's build: what pages say to readers of a checkout, who see no docstrings there, is left out.

It stands between two comments, which a code host does not show.
"""

from __future__ import annotations

import re
from typing import Any

_NOTE = re.compile(r"<!-- in a checkout -->\n.*?<!-- on the site -->\n", re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Leave the notes out."""
    del page, config, files
    return _NOTE.sub("", markdown)
