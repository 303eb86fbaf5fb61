"""Settings of a streamer: where they come from and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.schemas.errors import ConfigError
from headrace.streamer.config import StreamerConfig


def test_nearer_source_wins(tmp_path: Path) -> None:
    """Arguments come before the environment, the environment before the file, the file before the default."""
    file = tmp_path / "streamer.yaml"
    file.write_text("policy: block\nstaging_bytes: 1MiB\nretry_max_s: 7\n")
    environ = {"HEADRACE_STREAMER_STAGING_BYTES": "2MiB", "HEADRACE_STREAMER_RETRY_MAX_S": "8s", "OTHER": "x"}
    config = StreamerConfig.load(environ=environ, file=file, retry_max_s=9)
    assert (config.policy, config.staging_bytes, config.retry_max_s) == ("block", 2 * 2**20, 9)
    assert config.message_bytes == 4 * 2**20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"polcy": "block"}, "'polcy' is no setting; did you mean 'policy'"),
        ({"policy": "drop"}, "none of coalesce, block, spool"),
        ({"policy": "spool"}, "spool_dir"),
        ({"staging_bytes": 1}, "less than 64KiB"),
        ({"retry_min_s": 9, "retry_max_s": 1}, "retry_max_s: 1 is less than retry_min_s"),
        ({"window_messages": 0}, "^window_messages: 0 is less than 1"),  # as Python has it, not as a flag
        ({"tls_authority": Path("ca.pem")}, "tls: files for TLS are given, but it is off"),
    ],
)
def test_wrong_setting_is_one_line(settings: dict[str, object], message: str) -> None:
    """Whatever is wrong is said in one line that names the setting."""
    with pytest.raises(ConfigError, match=message) as caught:
        StreamerConfig.load(environ={}, **settings)
    assert "\n" not in str(caught.value)


def test_unknown_variable_is_an_error() -> None:
    """A misspelt variable is refused, with the one that was meant."""
    with pytest.raises(ConfigError, match="did you mean HEADRACE_STREAMER_POLICY"):
        StreamerConfig.load(environ={"HEADRACE_STREAMER_POLICI": "block"})
