"""The ranks of a benchmark, from their start."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdl.bench.ranks import REQUEST_FILE, crowded, rank_program
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


def test_ranks_that_share_processors_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench allreduce --ranks 64` on two processors printed nothing for minutes, then times of waiting."""
    monkeypatch.setenv("HPCDL_LAUNCHER", "local")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert "64 ranks share 2 processors of this node" in crowded(64) and not crowded(2)
    monkeypatch.setenv("HPCDL_LAUNCHER", "hostfile")
    monkeypatch.setattr("hpcdl.cluster.launchers.hostfile.Hostfile.hosts", lambda self, environment: ["a", "b"])
    assert not crowded(64)
