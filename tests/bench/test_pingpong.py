"""`hpcdl bench pingpong`: between real ranks by both transports, and the pairs of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hpcdl.bench.pingpong import choose_partner, measure_on_rank
from hpcdl.comm.observed import observe
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.config.schema import PingpongBenchConfig, PingpongBenchRun
from hpcdl.core.errors import HpcdlError, UsageError
from tests.conftest import CommandLine

PINGPONG = ["bench", "pingpong", "--sizes", "1B,4KiB,3MiB", "--repeats"]


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["mpi", "grpc"])
def test_as_a_user_runs_it(run_hpcdl: CommandLine, transport: str) -> None:
    allowed = ["--allow-grpc"] if transport == "grpc" else []
    for repeats in (7, 70, 700):  # as the command advises if other work on the node disturbs a few repeats
        finished = run_hpcdl([*PINGPONG, str(repeats), "--transport", transport, *allowed, "--json"])
        if "give more --repeats" not in finished.err:
            break
    assert finished.code == 0, finished.err
    found = finished.json()
    assert (found["transport"], found["ranks"], found["nodes"]) == (transport, [0, 1], 1)
    assert [(row["bytes"], row["repeats"]) for row in found["rows"]] == [(1, repeats), (4096, repeats), (3 << 20, 5)]
    for row in found["rows"]:
        assert row["seconds"] > 0 and row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
    assert found["link"]["latency_s"] >= 0 and found["link"]["seconds_per_byte"] >= 0
    assert (found["call_seconds"] is not None) is (transport == "grpc")
    assert ("authenticate nobody" in finished.err) is (transport == "grpc")
    assert not list(run_hpcdl.home.rglob("hpcdl-bench-*"))


@pytest.mark.mpi
def test_what_it_names_next_is_accepted_here(run_hpcdl: CommandLine) -> None:
    finished = run_hpcdl([*PINGPONG, "7"])
    words = finished.err.partition("next: hpcdl ")[2].split()
    assert words == ["bench", "pingpong", "--transport", "grpc", "--allow-grpc"], "no batch system gave it this node"


@pytest.mark.mpi
def test_two_of_a_launchers_ranks_play_and_the_third_waits(run_hpcdl: CommandLine) -> None:
    from hpcdl.cluster.launchers.mpiexec import find_mpiexec

    line = [find_mpiexec().path, "-n", "3", sys.executable, "-m", "hpcdl", *PINGPONG, "7", "--json"]
    finished = subprocess.run(
        [str(word) for word in line], capture_output=True, text=True, timeout=300, env=run_hpcdl.environment
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["ranks"] == [0, 1], "one document: rank 0's"


def test_partners_are_on_two_nodes_where_there_are_two() -> None:
    assert choose_partner(["a", "a", "b", "c"]) == 2
    assert choose_partner(["a", "a", "a"]) == 1
    with pytest.raises(UsageError, match="needs two ranks"):
        choose_partner(["a"])


class Garbles(ThreadCommunicator):
    """A communicator that changes the last byte of every 64-byte message."""

    def isend(self, buffer: Any, destination: int, tag: int = 0) -> Any:
        sent = buffer.copy()
        if sent.nbytes == 64:
            sent[-1] += 1
        return super().isend(sent, destination, tag)

    def split(self, color: int, key: int = 0) -> ThreadCommunicator:
        group = super().split(color, key)
        group.__class__ = Garbles
        return group


def test_other_bytes_than_were_sent_are_an_error() -> None:
    config = PingpongBenchConfig(run=PingpongBenchRun(sizes="64", repeats=1))

    def body(communicator: ThreadCommunicator) -> None:
        communicator.__class__ = Garbles
        measure_on_rank(config, observe(communicator), lambda done, what: None)

    with pytest.raises(HpcdlError, match="other bytes came of 64 B by threads"):
        run(2, body)


@pytest.mark.parametrize(
    "words, reported",
    [
        (("--transport", "grpc"), "--transport grpc: TensorFlow's gRPC servers authenticate nobody"),
        (("--transport", "tcp"), "--transport: 'tcp'"),
        (("--sizes", "0"), "a size is at least 1 byte;"),
        (("--sizes", "many"), "'many' is not a size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_slips_are_reported_before_ranks_start(words: tuple[str, ...], reported: str, ask_hpcdl: CommandLine) -> None:
    finished = ask_hpcdl(["bench", "pingpong", *words])
    assert finished.code == 2 and reported in finished.err and len(finished.err.splitlines()) == 1, finished.err


def test_a_site_that_forbids_grpc_strategies_forbids_their_messages(ask_hpcdl: CommandLine) -> None:
    (ask_hpcdl.home / "site.toml").write_text('[site]\nforbid-strategies = ["grpc-ps", "grpc-ring"]\n')
    finished = ask_hpcdl(["bench", "pingpong", "--transport", "grpc", "--allow-grpc"])
    assert finished.code == 2 and "this site forbids it" in finished.err, finished.err
