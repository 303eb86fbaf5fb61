"""The guide from files to NATS and back runs as it stands."""

from __future__ import annotations

from pathlib import Path

from documented_blocks import DocumentedPage, blocks_of
from nats_cluster import nats_cluster, needs_nats_server

PAGE = Path(__file__).resolve().parent.parent / "docs" / "files-to-nats.md"


@needs_nats_server
def test_the_guide_runs_as_documented(tmp_path: Path) -> None:
    """Each command succeeds, in order, and prints what stands below it, with servers of the test's own."""
    with nats_cluster(tmp_path / "nats") as servers:
        log = f"{servers.url} --log-monitor {','.join(servers.monitors)} --log-max-bytes 128MiB"
        (work := tmp_path / "work").mkdir()
        with DocumentedPage(work, paths={"nats://127.0.0.1,127.0.0.2,127.0.0.3": log}) as running:
            for block in blocks_of(PAGE.read_text("utf-8")):
                running.run(block)
            assert running.num_run == 9
