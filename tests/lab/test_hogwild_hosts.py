"""Hogwild between hosts: one-sided if the MPI progresses by itself, otherwise by messages, with a notice."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.shaped_hosts import run_ranks
from hpcdl.cluster.launchers.mpiexec import find_mpiexec
from tests.lab.hogwild_ranks import LENGTH, STEPS

pytestmark = pytest.mark.lab("hosts")

HOSTS = 2


@pytest.mark.parametrize(("settings", "way"), [
    ({"MPIR_CVAR_ASYNC_PROGRESS": "1"}, "RemoteLink"),
    ({}, "HostedLink"),
], ids=["one-sided", "messages"])  # fmt: skip
def test_no_update_is_lost_between_hosts(settings: dict[str, str], way: str) -> None:
    mpiexec = find_mpiexec()
    if mpiexec.flavour != "mpich":
        pytest.skip("only MPICH starts ranks on these hosts")
    command = [sys.executable, "-m", "tests.lab.hogwild_ranks"]
    answer = run_ranks(HOSTS, "1gbit", mpiexec.path, command, timeout_s=280, settings=settings)
    for found in json.loads(answer.splitlines()[-1]).values():
        assert found["way"] == way
        assert found["lost"] < 1e-3 < found["moved"]
        assert found["updates"] == HOSTS * STEPS
        # One-sided, an exchange sends its changes except this rank's own part. By messages that part is sent too, and
        # the server in this rank's process answers all workers with its own part.
        sent = found["megabytes_sent"] / (4e-6 * LENGTH)
        if way == "RemoteLink":
            assert sent == pytest.approx(STEPS * (HOSTS - 1) / HOSTS, rel=0.01)
        else:
            assert 0.99 * STEPS <= sent <= 2.01 * (STEPS + 2)
        if way == "RemoteLink":
            assert not found["warnings"]
        else:
            (warning,) = found["warnings"]
            assert "one-sided" in warning and "MPICH" in warning and "messages instead" in warning
