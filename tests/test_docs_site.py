"""The documentation site builds without a warning, has every page in its navigation, and fetches from nowhere else."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import CHROMIUM, browser_tab

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

pytestmark = pytest.mark.timeout(300)  # the first test builds
ROOT = Path(__file__).resolve().parent.parent
# What a browser fetches by itself, by element; a link that a reader may follow is something else.
_FETCHED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "script": "src",
    "source": "src",
}


# Pages with the longest lines and the widest tables, and those that readers see first.
_SHOWN = ("index", "tutorial", "glossary", "taps", "messages", "benchmarks", "api/streamer")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class _Fetches(HTMLParser):
    """Collects the addresses that a page has a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        address = given.get(_FETCHED.get(tag, ""))
        if address:
            self.addresses.append(address)


def _build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    # No proxy answers at port 9, so a build that asks the network for something fails.
    away = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "all")}
    environ = {**os.environ, **away, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the build is strict."""
    folder = tmp_path_factory.mktemp("site")
    done = _build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not included in the" not in done.stderr, f"pages to add to the navigation of mkdocs.yml:\n{done.stderr}"
    return folder


def test_every_page_is_built(site: Path) -> None:
    """Each page of docs/ is a page of the site, and so are the changelog's and the contributors' text."""
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page.name
    assert "Unreleased" in (site / "changelog.html").read_text()
    assert "scripts/test" in (site / "contributing.html").read_text()
    assert not [page for page in site.rglob("*.html") if "in a checkout -->" in page.read_text()]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """No page has a browser load anything from another host, nor does the style sheet."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        parser = _Fetches()
        parser.feed(page.read_text())
        assert parser.addresses
        assert [address for address in parser.addresses if urlsplit(address).netloc] == [], page.name
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)]*", sheet.read_text()) == [], sheet.name


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address of the built site; from a file the theme shows no search."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_pages_fit_a_phone_and_a_laptop(served: str) -> None:
    """No page is wider than its window, a laptop shows whole tables, and navigation and search can be reached."""
    with browser_tab() as tab:
        for name in _SHOWN:
            for width in (400, 1280):
                tab.open(f"{served}/{name}.html", width=width)
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
                assert tab.evaluate("document.querySelector('.md-header [for=__search]').checkVisibility()") == (
                    width == 400
                )
            tables = "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
            assert tab.evaluate(f"{tables}.every(table => table.scrollWidth <= table.clientWidth)"), name
            assert tab.evaluate("document.querySelector('.md-search__input').checkVisibility()")
        tab.open(f"{served}/tutorial.html", width=400)
        tab.evaluate("document.querySelector('.md-header [for=__drawer]').click()")
        tab.wait_for("document.querySelector('.md-sidebar--primary').getBoundingClientRect().left === 0")
        tab.evaluate(
            "[...document.querySelectorAll('.md-sidebar--primary a')].find(a => a.href.endsWith('faq.html')).click()"
        )
        tab.wait_for("document.title.startsWith('Questions')")
        assert tab.complaints == []


def test_a_fetch_from_elsewhere_is_found() -> None:
    """The check sees a font's style sheet and a script, and passes over links."""
    parser = _Fetches()
    parser.feed(
        '<link rel="stylesheet" href="https://a/b.css"><script src="//c/d.js"></script><a href="https://e">f</a>'
    )
    assert parser.addresses == ["https://a/b.css", "//c/d.js"]


def test_linked_files_are_in_the_site(site: Path) -> None:
    """Links to files of the repository lead to copies of them: the IDL can be taken from the site."""
    idl = site / "source" / "schemas" / "paramserver.thrift"
    assert idl.read_bytes() == (ROOT / "schemas" / "paramserver.thrift").read_bytes()
    assert 'href="source/schemas/paramserver.thrift"' in (site / "wire.html").read_text()


def test_reference_is_of_the_docstrings(site: Path) -> None:
    """The Python pages have every public name, with arguments and what is raised."""
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    for name in (
        "headrace.streamer.api.RawEmbeddingStreamer.attach",
        "headrace.streamer.res_stand_in.install",
        "headrace.streamer.config.StreamerConfig",
        "headrace.paramserver.replica.api.embedding_replica.EmbeddingReplica.lookup",
        "headrace.paramserver.replica.api.config.ReplicaConfig",
        "headrace.paramserver.replica.api.embedding_collections.ReplicaEmbeddingBagCollection",
        "headrace.paramserver.reading.reader.EmbeddingReader.get",
        "headrace.paramserver.shard.launch.ServerProcess.start",
        "headrace.schemas.errors.HeadraceError",
    ):
        assert f'id="{name}"' in text, name
    assert "cannot be streamed exactly" in text


@pytest.mark.parametrize("mistake", ["[x](nowhere.md)", "[x](../nowhere.py)", "[x](#nowhere)", "::: headrace.nowhere"])
def test_a_mistake_fails_the_build(mistake: str, tmp_path: Path) -> None:
    """A link to a page, file or heading that is not there, and a name that is not there, fail the strict build."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{mistake}\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    config = config.replace("docs/assets/", f"{ROOT}/docs/assets/")
    (tmp_path / "mkdocs.yml").write_text(config.replace('paths: ["."]', f'paths: ["{ROOT}"]'))
    done = _build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "nowhere" in done.stderr


def test_runbook_has_every_alert() -> None:
    """What to do about each alert stands in the operations page, and no alert that there is not."""
    alerts = re.findall(r"^ *- alert: (\w+)$", (ROOT / "deploy/prometheus/alerts.yml").read_text(), re.MULTILINE)
    runbook = (ROOT / "docs/operations.md").read_text().partition("## When something fails")[2].partition("\n## ")[0]
    assert set(re.findall(r"\bHeadrace[A-Z]\w+", runbook)) == set(alerts)
