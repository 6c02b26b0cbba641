"""A signal at any point of a rank's start reaches the process that started it, as the rank's last message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdl.cluster.supervise import STATUS_VARIABLE
from hpcdl.core.errors import Interrupted
from hpcdl.rank import main


@pytest.mark.parametrize("between", ["set_up_process", "RankMonitor", "Watchdog", "watching"])
def test_a_signal_while_nothing_is_under_way_is_the_ranks_last_word(
    between: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **named: object) -> None:
        raise Interrupted("stopped by a signal")

    monkeypatch.setenv(STATUS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(main, "outlive", lambda stream: None)
    monkeypatch.setattr(main, "set_up_process", lambda local_rank: None)
    monkeypatch.setattr(main, between, interrupted)
    assert main.supervised(lambda communicator, watch: None) == 130
    status = json.loads((tmp_path / "0.json").read_text())
    assert (status["state"], status["exit_code"], status["message"]) == ("failed", 130, "stopped by a signal")
