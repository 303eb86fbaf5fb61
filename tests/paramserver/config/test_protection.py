"""TLS and tokens as settings, and when they suffice for other machines."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.paramserver.config.protection import Protection
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=headrace"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", chain, "-keyout", key],
        check=True,
        capture_output=True,
    )
    return chain, key


def test_nothing() -> None:
    """Without settings everybody who can connect may call, and the protection is incomplete."""
    protection = Protection.load(ServerConfig(data=Path("d")), {})
    assert (protection.ssl_context, protection.is_complete) == (None, False)


def test_token_alone_is_not_complete() -> None:
    """A token without TLS can be read on its way."""
    assert not Protection.load(ServerConfig(data=Path("d")), {"HEADRACE_TOKEN": TOKEN}).is_complete


def test_tls(certificate: tuple[Path, Path]) -> None:
    """TLS alone admits everybody; with a token or client certificates it is complete."""
    chain, key = certificate
    config = ServerConfig(data=Path("d"), tls_certificate=chain, tls_key=key)
    assert not Protection.load(config, {}).is_complete
    assert Protection.load(config, {"HEADRACE_TOKEN": TOKEN}).is_complete
    mutual = ServerConfig(data=Path("d"), tls_certificate=chain, tls_key=key, tls_client_authority=chain)
    assert Protection.load(mutual, {}).is_complete


@pytest.mark.parametrize("name", ["writer_token_file", "reader_token_file"])
def test_a_roles_token_is_its_own(name: str, tmp_path: Path) -> None:
    """A role's token needs the token that opens every role, and must differ from it."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(TOKEN)
    config = ServerConfig(data=Path("d"), **{name: file})  # type: ignore[arg-type]
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} needs --token-file or HEADRACE_TOKEN"):
        Protection.load(config, {})
    with pytest.raises(ConfigError, match=f"{flag} {file}: holds a token that opens a higher role too") as caught:
        Protection.load(config, {"HEADRACE_TOKEN": TOKEN})
    assert TOKEN not in str(caught.value)
    assert Protection.load(config, {"HEADRACE_TOKEN": "another-token-of-some-length"}).access is not None


def test_readers_have_another_token_than_writers(tmp_path: Path) -> None:
    """A reader's token that is also the writers' is refused: every reader could write."""
    files = {name: tmp_path / name for name in ("writer", "reader")}
    for file in files.values():
        file.touch(mode=0o600)
        file.write_text(TOKEN)
    config = ServerConfig(data=Path("d"), writer_token_file=files["writer"], reader_token_file=files["reader"])
    environ = {"HEADRACE_TOKEN": "another-token-of-some-length"}
    refused = f"--reader-token-file {files['reader']}: holds a token that opens a higher role too"
    with pytest.raises(ConfigError, match=refused):
        Protection.load(config, environ)
    files["reader"].write_text("a-third-token-of-some-length")
    assert Protection.load(config, environ).access is not None


def test_half_a_pair(certificate: tuple[Path, Path]) -> None:
    """A certificate without its key, and an authority without both, are errors."""
    with pytest.raises(ConfigError, match="go together"):
        Protection.load(ServerConfig(data=Path("d"), tls_certificate=certificate[0]), {})
    with pytest.raises(ConfigError, match="needs --tls-certificate"):
        Protection.load(ServerConfig(data=Path("d"), tls_client_authority=certificate[0]), {})


def test_server_with_tls(
    tmp_path: Path,
    certificate: tuple[Path, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A protected server may listen on every address, and answers only TLS clients with the token."""
    chain, key = certificate
    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
    with ServerProcess.start(
        tmp_path / "data", host="0.0.0.0", advertise_host="127.0.0.1", tls_certificate=chain, tls_key=key
    ) as server:
        assert main(["status", server.address, "--tls-authority", str(chain)]) == 0
        assert main(["status", server.address, "--timeout-s", "2"]) == 1
        monkeypatch.delenv("HEADRACE_TOKEN")
        assert main(["status", server.address, "--tls-authority", str(chain)]) == 1
        assert "a token is required" in capfd.readouterr().err
