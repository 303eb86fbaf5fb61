"""What all benches share: options, medians and lines for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import cli
from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.harness import Rounds, conclude, say
from headrace.scripts.benches.peers import REDIS_HINT
from headrace.scripts.commands.bench import _BENCHES


def test_ratios_are_of_medians_and_null_without_a_peer() -> None:
    """A ratio is one median over another; without its peer it is None."""
    rounds = Rounds()
    for seconds in (1.0, 2.0, 40.0):
        rounds.add("ours", 600 / seconds)
        rounds.add("peer", 300 / seconds)
    assert rounds.ratio("ours", "peer") == 2.0
    assert rounds.medians() == {"ours": 300, "peer": 150}
    assert rounds.medians(2)["peer"] == 300
    assert rounds.ratio("ours", "absent") is None and rounds.ratio("absent", "ours") is None


def test_hints_are_printed_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """The extra in brackets is not markup of the console's."""
    say(REDIS_HINT)
    assert capsys.readouterr().err == f"{REDIS_HINT}\n"


@pytest.mark.parametrize("name", [name for name, _ in _BENCHES])
@pytest.mark.torchrec
def test_every_bench_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is made of the bench's parameters, in plain sentences."""
    assert cli.main(["bench", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--rounds" in shown and "Raises" not in shown


def test_a_full_disk_under_the_file_of_figures_is_one_line() -> None:
    """A disk that fills up during a bench ends it with the option's name and the reason."""
    with pytest.raises(ConfigError, match=r"^--json /dev/full: No space left on device$"):
        conclude("kernels", {"num_gpu_failures": 0}, Path("/dev/full"))
