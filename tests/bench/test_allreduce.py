"""`hpcdl bench allreduce`: on threads, and once as users run it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcdl.bench import allreduce
from hpcdl.collectives import auto
from hpcdl.collectives.auto import CANDIDATES, load_table, table_file
from hpcdl.collectives.slices import Workspace
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.config.schema import AllreduceBenchConfig, AllreduceBenchRun
from hpcdl.core.errors import HpcdlError, UsageError
from tests.conftest import CommandLine


def test_measured_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = AllreduceBenchConfig(run=AllreduceBenchRun(ranks=3, sizes="16MiB,1KiB", repeats=2))
    ticks: list[int] = []
    results = run(
        3, lambda communicator: allreduce.measure_on_rank(config, communicator, lambda done, what: ticks.append(done))
    )
    result = results[0]
    assert results[1] == result and sorted(ticks) == [1, 1, 1, 2, 2, 2]
    assert [(row.bytes, row.algorithm) for row in result.rows] == [
        (size, name) for size in (1024, 16 << 20) for name in CANDIDATES
    ]
    for row in result.rows:
        assert row.bus_bandwidth == pytest.approx(2 * 2 / 3 * row.bytes / row.seconds)
        bound_s = 2 * result.link.latency_s + 4 / 3 * row.bytes * result.link.seconds_per_byte
        assert row.share_of_bound == pytest.approx(bound_s / row.seconds)
    assert set(result.fits) == set(CANDIDATES)
    kept = load_table(table_file("threads", 3, 1, run(1, lambda communicator: communicator.host)[0]))
    assert kept is not None and [row.bytes for row in kept.rows] == [1024, 16 << 20], (
        "auto reads what the bench measured"
    )


def test_only_a_fastest_that_is_distinguishable_is_named() -> None:
    near, far = [1.0, 1.1, 0.9, 1.05, 0.98], [2.0, 2.2, 1.8, 2.1, 50.0]  # one call was disturbed
    assert allreduce.perhaps_fastest({"ring": near, "tree": far, "mpi": near[::-1]}, "ring") == {"ring", "mpi"}
    assert allreduce.perhaps_fastest({"ring": near, "tree": far}, "ring") == {"ring"}
    assert allreduce.perhaps_fastest({"ring": [1.0], "tree": [5.0]}, "ring") == {"ring", "tree"}, "one call each"


def test_a_bench_makes_all_the_calls_that_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is many times slower counts too: two of them would not be distinguishable from the fastest."""
    seconds = {"ring": 1.0, "tree": 5.0}
    monkeypatch.setattr(auto, "_time_once", lambda group, name, num_bytes, workspace: seconds[name])
    (calls,) = run(1, lambda communicator: auto.time_size(communicator, ["ring", "tree"], 8, 10, Workspace()))
    assert [len(times) for times in calls.values()] == [10, 10]
    assert allreduce.perhaps_fastest(calls, "ring") == {"ring"}


def test_the_fewest_calls_are_those_that_can_name_a_fastest() -> None:
    for others in (1, len(CANDIDATES) - 1):
        fewest = allreduce.fewest_calls(others + 1)
        for num_calls, alone in ((fewest, True), (fewest - 1, False)):
            calls = {"ring": [1.0 + call / 100 for call in range(num_calls)]}
            calls |= {f"slow {index}": [time + 5 for time in calls["ring"]] for index in range(others)}
            assert (allreduce.perhaps_fastest(calls, "ring") == {"ring"}) is alone
    assert AllreduceBenchRun(ranks=2).repeats >= allreduce.fewest_calls(len(CANDIDATES))


def test_a_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_a_rank(communicator: ThreadCommunicator, buffer: Any, workspace: Any) -> None:
        communicator.broadcast(buffer)

    monkeypatch.setattr(COLLECTIVES, "load", lambda name: forgets_a_rank)
    with pytest.raises(HpcdlError, match="ring sums 4 KiB wrongly on rank 0"):
        run(2, lambda communicator: allreduce.check(communicator, "ring", 4096, Workspace()))


def test_the_slowest_pair_is_found() -> None:
    class Slow(ThreadCommunicator):
        """A communicator with slow messages between ranks 1 and 3."""

        def isend(self, buffer: Any, destination: int, tag: int = 0) -> Any:
            if {self.rank, destination} == {1, 3}:
                time.sleep(0.03)  # longer than a thread waits for a processor on a busy machine
            return super().isend(buffer, destination, tag)

    def body(communicator: ThreadCommunicator) -> tuple[list[allreduce.Pair], allreduce.SlowestPair]:
        communicator.__class__ = Slow
        pairs = allreduce.sweep(communicator)
        return pairs, allreduce.find_slowest(communicator, pairs)

    pairs, slowest = run(4, body)[2]
    assert sorted(pair.ranks for pair in pairs) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert max(pairs, key=lambda pair: pair.seconds).ranks == slowest.ranks == (1, 3)
    assert slowest.distinguishable and slowest.low_seconds <= slowest.seconds <= slowest.high_seconds


def test_the_slowest_of_equal_pairs_is_slow_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair was disturbed when all were timed; timed again it is like the others."""
    seconds = [1.0, 1.1, 0.9, 1.05, 0.98, 1.02, 0.97, 1.04, 1.0]
    monkeypatch.setattr(allreduce, "one_way", lambda *_, **__: seconds)
    pairs = [
        allreduce.Pair(ranks=ranks, hosts=("a", "a"), latency_s=0.0, seconds_per_byte=per_byte)
        for ranks, per_byte in (((0, 1), 1.0), ((0, 2), 5.0), ((1, 2), 1.0))
    ]
    slowest = run(3, lambda communicator: allreduce.find_slowest(communicator, pairs))[0]
    assert slowest.ranks == (0, 2) and slowest.ratio == 1 and not slowest.distinguishable


@pytest.mark.parametrize("num_ranks", [2, 5, 48, 49, 300])
def test_pairs_cover_every_rank(num_ranks: int) -> None:
    pairs = allreduce.choose_pairs(num_ranks)
    assert {rank for pair in pairs for rank in pair} == set(range(num_ranks))
    assert len(set(pairs)) == len(pairs) and all(low < high for low, high in pairs)
    assert len(pairs) <= max(48 * 47 // 2, num_ranks * 9)


def test_sizes() -> None:
    assert allreduce.parse_sizes("1MiB, 4KiB,4097") == [4096, 1 << 20]
    for wrong in ("", "3", "many", "1KiB;2KiB"):
        with pytest.raises(UsageError, match="--sizes"):
            allreduce.parse_sizes(wrong)


@pytest.mark.mpi
def test_as_a_user_runs_it(run_hpcdl: CommandLine) -> None:
    finished = run_hpcdl(["bench", "allreduce", "--ranks", "2", "--sizes", "4KiB,256KiB", "--repeats", "2", "--json"])
    assert finished.code == 0, finished.err
    document = finished.json()
    assert document["ranks"] == 2 and document["nodes"] == 1
    assert {row["algorithm"] for row in document["rows"]} == set(CANDIDATES)
    assert document["slowest_pair"]["ranks"] == [0, 1]
    assert document["fits"]["ring"]["latency_s"] >= 0
    kept = run_hpcdl.home / "cache" / "hpcdl" / "allreduce"
    assert not kept.exists(), "its sizes say nothing of full buckets"
    shown = run_hpcdl(["bench", "allreduce", "--sizes", "4KiB", "--repeats", "1"])
    assert "time: median of 1 call on the slowest rank" in shown.out and "of bound: the time of one link" in shown.out
    reported = "these times are not kept for --strategy auto, which needs sizes from 64 KiB or less to 16 MiB or more"
    assert reported in shown.err and reported in finished.err
    assert shown.code == 0 and "<- " not in shown.out, "one call of each distinguishes none"
    assert shown.out.count("not distinguishable") == len(CANDIDATES) + 1  # and its explanation
    assert "1 call of each cannot show which is fastest: give --repeats 5 or more" in shown.err
    assert "the only pair: ranks 0 (" in shown.err and "next: hpcdl" in shown.err
    whole = run_hpcdl(["bench", "allreduce", "--sizes", "4KiB,16MiB", "--repeats", "1"])
    assert (
        whole.code == 0 and "<- auto" in whole.out and reported not in whole.err and len(list(kept.glob("*.json"))) == 1
    )


def test_slips_are_reported_before_ranks_start(ask_hpcdl: CommandLine) -> None:
    for arguments in (["--ranks", "1"], ["--sizes", "huge"]):
        finished = ask_hpcdl(["bench", "allreduce", *arguments])
        assert finished.code == 2 and len(finished.err.splitlines()) == 1, finished.err
