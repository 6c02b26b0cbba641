"""The ranks of a benchmark, from their start."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdl.bench.ranks import REQUEST_FILE, rank_program
from hpcdl.core.errors import Interrupted


def test_a_signal_before_mpi_is_up_interrupts_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unhandled it kills the rank, which is then taken for a crash."""

    def supervised(on_rank: Callable[..., Any]) -> int:
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        handler(signal.SIGTERM, None)
        return 0

    (tmp_path / REQUEST_FILE).write_text("{}")
    monkeypatch.setattr(sys, "argv", ["rank", str(tmp_path)])
    monkeypatch.setattr(importlib.import_module("hpcdl.rank.main"), "supervised", supervised)
    with pytest.raises(Interrupted):
        rank_program(lambda *_: None)
