"""The status page in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Tab, browser_tab
from cluster_nodes import Cluster
from hellos import hello_of_writer
from set_embeddings import request_of
from watched_server import WAIT_S, get, say_hello, watched_server

from headrace.paramserver.observe.status_page import PAGE_FILES
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.tables import DType, TableSpec

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

# Each would run a script if the page treated it as anything but text.
NAMES = (
    "<img src=x onerror=document.title='owned'>.weight",
    "<script>document.title='owned'</script>",
    "\"' onmouseover=document.title='owned' x='",
    "javascript:document.title='owned'",
    "a_very_long_name_without_any_place_to_break_" * 8,
    "żółć & 表 &amp; \u200ftxt",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    with watched_server(tmp_path_factory.mktemp("page") / "data", shards=2) as (running, address):
        specs = [TableSpec(fqn=name, num_rows=100, dim=4, dtype=DType.FLOAT32, states=()) for name in NAMES]
        asyncio.run(say_hello(running.address, specs, run="<b onclick=alert(1)>run</b>", client="<i>rank0</i>"))
        yield running, address


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser_tab() as opened:
        yield opened


def _open(tab: Tab, address: str, *, width: int = 1280, is_dark: bool = False) -> None:
    tab.complaints.clear()
    tab.open(f"http://{address}/", width=width, is_dark=is_dark)
    tab.wait_for("document.body.dataset.ready === 'yes'")


def test_names_are_text(server: tuple[ServerProcess, str], tab: Tab) -> None:
    """Names are shown unchanged, and never become elements or run."""
    _open(tab, server[1])
    shown = tab.evaluate("[...document.querySelectorAll('#tables td:first-child')].map((cell) => cell.textContent)")
    assert sorted(shown) == sorted(NAMES)
    assert tab.evaluate("document.querySelector('#writers td').textContent") == "<b onclick=alert(1)>run</b>"
    assert tab.evaluate("document.querySelectorAll('main img, main script, main b[onclick], main i').length") == 0
    assert tab.evaluate("document.title") == "Headrace"
    assert tab.complaints == []


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_sizes_and_schemes(
    server: tuple[ServerProcess, str], tab: Tab, width: int, is_dark: bool, tmp_path: Path
) -> None:
    """Nothing is wider than the window, and text has enough contrast, in light and dark."""
    _open(tab, server[1], width=width, is_dark=is_dark)
    folder = Path(os.environ.get("HEADRACE_SCREENSHOTS", tmp_path))
    tab.screenshot(folder / f"status-{width}-{'dark' if is_dark else 'light'}.png")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll') && !e.closest('svg')"
    assert tab.evaluate(f"{wide} && e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map((e) => e.outerHTML)") == []
    assert tab.evaluate(_CONTRASTS) >= 4.5
    assert tab.complaints == []


# The least contrast (WCAG 2) of any text on the page.
_CONTRASTS = """(() => {
  const light = (color) => {
    const parts = color.match(/[0-9.]+/g).slice(0, 3).map((c) => c / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    const color = getComputedStyle(e).backgroundColor;
    return color === 'rgba(0, 0, 0, 0)' ? ground(e.parentElement) : color;
  };
  const texts = [...document.querySelectorAll('body *')].filter((e) =>
    e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
  return Math.min(...texts.map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
})()"""


async def _end_step(address: str, stack: contextlib.AsyncExitStack, **request: Any) -> None:
    """Connect as a trainer, for as long as the stack lasts, and end a step."""
    host, port = parse_address(address, default_port=0)
    client = await stack.enter_async_context(await ParamServerClient.connect(host, port, timeout_s=WAIT_S))
    await client.hello(hello_of_writer(run=request["run"], epoch=request["epoch"]), timeout_s=WAIT_S)
    await client.set_embeddings(request_of(**request), timeout_s=WAIT_S)


def test_what_streaming_costs_each_trainer(tmp_path: Path, tab: Tab) -> None:
    """A trainer's line says how old its updates may be that are not here, what streaming costs and which setting binds.

    Of one that does not tell its cost, nothing.
    """
    told = [{"cost_percent": 0.94, "is_cost_bound": True}, {"cost_percent": 2.0, "is_cost_bound": False}, {}]
    with watched_server(tmp_path / "data") as (running, address), asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        for number, cost in enumerate(told):
            ended_us = time.time_ns() // 1000 - 7_200_000_000
            names = {"run": f"run{number}", "epoch": 9 - number}
            runner.run(_end_step(running.address, stack, time_us=ended_us, **names, **cost))
        _open(tab, address)
        cells = (
            "[...document.querySelectorAll('#writers tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        shown = {run: rest for run, _, _, _, *rest in tab.evaluate(cells)}
        runner.run(stack.aclose())
    assert shown == {
        "run": ["age", "cost", "bound by", ""],
        "run0": ["2.0 h", "0.9 %", "max_cost_percent", "connected"],
        "run1": ["2.0 h", "2.0 %", "freshness_s", "connected"],
        "run2": ["2.0 h", "", "", "connected"],
    }
    assert tab.complaints == []


def test_problems_come_first_and_go(server: tuple[ServerProcess, str], tab: Tab) -> None:
    """A killed shard is shown at the top, with advice; figures of the others continue."""
    running, address = server
    _open(tab, address)
    os.kill(running.shard_pids[1], signal.SIGKILL)
    tab.wait_for("document.querySelector('#problems li').textContent.includes('shard 1')")
    assert tab.evaluate("document.querySelector('main section h2').textContent") == "Problems"
    assert tab.evaluate("document.querySelector('#problems li span').textContent.length") > 20
    tab.wait_for(
        "document.querySelector('#shards').textContent.includes('127.0.0.1') && !document.querySelector('.bad')"
    )


def test_nodes_of_a_cluster(tmp_path: Path, tab: Tab) -> None:
    """A node's page names the node of each shard, draws its own, and shows another node that goes away."""
    cluster = Cluster(tmp_path, num_shards=2)
    cluster.place(a=[0], b=[1])
    try:
        running = cluster.start("a", metrics_port=0)
        cluster.start("b")
        (address,) = [f["address"] for f in running.read_log() if f["message"] == "metrics are served"]
        _open(tab, address)
        cells = "[...document.querySelectorAll('#shards tr')].slice(1).map((row) => row.cells[1].textContent)"
        assert tab.evaluate(cells) == ["a", "b"]
        tab.wait_for("!document.querySelector('.bad')")
        assert tab.evaluate("document.querySelector('#charts-title').textContent") == "Last half hour, shards of node a"
        assert tab.evaluate("[...document.querySelectorAll('#legend > span')].map((e) => e.textContent)") == ["shard 0"]
        cluster.stop("b")
        tab.wait_for("document.querySelector('#problems li').textContent.includes('node b does not answer')")
        assert tab.evaluate("document.querySelector('.bad').cells[1].textContent") == "b"
        assert tab.complaints == []
    finally:
        cluster.close()


def test_server_that_is_gone(tmp_path: Path, tab: Tab) -> None:
    """When the server ends, the page keeps its figures and says that they are old."""
    with watched_server(tmp_path / "data") as (_, address):
        _open(tab, address)
    tab.wait_for("document.getElementById('state').className === 'lost'")
    assert "old" in tab.evaluate("document.getElementById('state').textContent")
    assert tab.evaluate("document.querySelectorAll('#shards tr').length") == 2


def test_page_loads_nothing_from_elsewhere(server: tuple[ServerProcess, str]) -> None:
    """The files name no other host, have no inline script or style, and are served unchanged."""
    for name, (content_type, body) in PAGE_FILES.items():
        status, headers, served = get(server[1], "/" if name == "index.html" else f"/{name}")
        assert (status, headers["Content-Type"], served.encode()) == (200, content_type, body)
        assert "://" not in served.replace("http://www.w3.org/2000/svg", "")
    page = PAGE_FILES["index.html"][1].decode()
    assert "style=" not in page and "<style" not in page and "<script>" not in page
    assert "innerHTML" not in PAGE_FILES["status.js"][1].decode()
