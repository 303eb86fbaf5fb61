"""The page about the log's engine: its example starts three servers, and `doctor` prints what stands there."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

from documented_blocks import blocks_of, commands_of, missing_line
from nats_cluster import needs_nats_server

PAGE = Path(__file__).resolve().parent.parent / "docs" / "nats.md"
_DEADLINE_S = 60.0


@needs_nats_server
def test_the_example_works(tmp_path: Path) -> None:
    """Three servers with the page's configuration and commands are fit for a log."""
    # Other addresses of the loopback interface, where nobody else has these ports.
    net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}."
    block = next(each for each in blocks_of(PAGE.read_text("utf-8").replace("127.0.0.", net)))
    install, config, *starts, doctor = commands_of(block)
    assert install.text.startswith("pip install")
    assert config.text == "cat nats.conf"
    (tmp_path / "nats.conf").write_text("\n".join(config.output), "utf-8")
    environ = {**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "COLUMNS": "300"}
    servers = []
    try:
        for start in starts:
            command = start.text.removesuffix(" &").split()
            assert command[0] == "nats-server"
            with (tmp_path / "output").open("ab") as output:
                servers.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=output, stderr=output))
        assert len(servers) == 3
        deadline_s = time.monotonic() + _DEADLINE_S
        while True:  # until they have found each other
            done = subprocess.run(doctor.text.split(), env=environ, capture_output=True, text=True, timeout=60)
            if done.returncode == 0 or time.monotonic() > deadline_s:
                break
    finally:
        for server in servers:
            server.kill()
            server.wait()
    out = re.sub(r"version \d+\.\d+\.\d+", "version 2.15.1", done.stdout)
    assert missing_line(doctor.output, out) is None, done.stdout
