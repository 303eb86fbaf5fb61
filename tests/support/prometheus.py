"""A real Prometheus on a port of its own, and queries to it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from held_ports import hold_ports
from waiting import WAIT_S, wait_until

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


class Prometheus:
    """Asks a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return what an expression gives now."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{self._address}/api/v1/query?{query}", timeout=WAIT_S) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        result: list[dict[str, Any]] = told["data"]["result"]
        return result

    def wait_for(self, expression: str, is_so: Callable[[list[dict[str, Any]]], bool] = bool) -> list[dict[str, Any]]:
        """Return what an expression gives, once it is as wanted."""
        result: list[dict[str, Any]] = []

        def is_as_wanted() -> bool:
            nonlocal result
            with contextlib.suppress(OSError):  # it may not be there yet
                result = self.query(expression)
                return is_so(result)
            return False

        wait_until(is_as_wanted, lambda: f"{expression} is {result}: what is wanted", poll_s=0.1)
        return result


@contextlib.contextmanager
def running_prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Run Prometheus on targets by job, scraped each second."""
    assert PROMETHEUS is not None
    port = hold_ports()
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in targets.items()],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Prometheus(f"127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()
