"""A hook of the site's build: files of the repository that pages link to become files of the site.

A page is read on a code host as well, where `../schemas/paramserver.thrift` is right. In the site that leads nowhere,
so the file is copied to `source/` and the link is turned there. A link to a file that is not there is left as it is,
and fails the strict build. Pages outside `docs/`, such as the changelog, are linked only by notes that the site leaves
out (`checkout_notes.py`).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def _targets(text: str, root: Path) -> list[str]:
    """Return the linked paths that are files of the repository, relative to its root."""
    paths = [posixpath.normpath(link.removeprefix("../")) for link in _LINK.findall(text)]
    return [path for path in paths if not path.startswith("docs/") and path[-3:] != ".md" and (root / path).is_file()]


def on_files(files: Any, *, config: Any) -> Any:
    """Add each file that a page of the first level links to."""
    root = Path(config.docs_dir).parent
    linked = {
        path
        for page in files.documentation_pages()
        if "/" not in page.src_uri
        for path in _targets(page.content_string, root)
    }
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn links to these files into the site."""
    del config

    def turned(match: re.Match[str]) -> str:
        inside = f"source/{posixpath.normpath(match[0].removeprefix('../'))}"
        return inside if files.get_file_from_path(inside) else match[0]

    return _LINK.sub(turned, markdown) if "/" not in page.file.src_uri else markdown
