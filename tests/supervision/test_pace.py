"""Slow workers are found, reported once and, with --evict-slow, excluded; a healthy run's noise is no reason."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpcdl.cluster.launchers import find_launcher
from hpcdl.comm.observed import PARTS, RankMonitor
from hpcdl.config.load import ResolvedConfig, flag_layer, load
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import RankError, UsageError
from hpcdl.launch.slots import RankSlots
from hpcdl.run.shrink import check_least, with_least
from hpcdl.supervision.pace import WINDOWS, WINDOWS_UNTIL_REPORTED, Eviction, Pace, PaceKeeper, Paces
from hpcdl.supervision.watchdog import Actions, Watchdog
from tests.conftest import CommandLine, patience
from tests.training_runs import PLANTED, SHORT, events, finish, record_of, start, steps_done, wait_for

WINDOW_S, STEP_S = 10.0, 0.1


class Workers:
    """Simulated workers; `takes` gives the seconds of a step by worker and window: computing, and waiting for input."""

    def __init__(self, num_workers: int, takes: Callable[[int, int], tuple[float, float]]) -> None:
        self._num_workers, self._takes = num_workers, takes
        self._spent = {rank: (0.0,) * (1 + len(PARTS)) for rank in range(num_workers)}
        self._window = 0

    def paces(self) -> dict[int, Pace]:
        """Return the workers' paces a window later. All have taken as many steps, each as long as the slowest one's."""
        takes = {rank: self._takes(rank, self._window) for rank in range(self._num_workers)}
        step_s = max(map(sum, takes.values())) + STEP_S / 10
        num_steps = round(WINDOW_S / step_s)
        for rank, (computing_s, input_s) in takes.items():
            parts = {"input": input_s, "compute": computing_s, "exchange": step_s - computing_s - input_s}
            added = [1.0, *(parts.get(name, 0.0) for name in PARTS)]
            self._spent[rank] = tuple(a + num_steps * b for a, b in zip(self._spent[rank], added, strict=True))
        self._window += 1
        return {
            rank: Pace(rank=rank, host=f"n{rank}", at_s=self._window * WINDOW_S, spent=spent, counters={})
            for rank, spent in self._spent.items()
        }


def found(
    takes: Callable[[int, int], tuple[float, float]],
    *,
    num_windows: int = 20,
    factor: float = 1.8,
    num_workers: int = 4,
    shares: Sequence[float] = (1.0,) * 4,
) -> list[tuple[int, int]]:
    """Return window and rank of each worker that is slow for WINDOWS windows."""
    workers, compared, slow = Workers(num_workers, takes), Paces(shares[:num_workers]), []
    for window in range(num_windows):
        compared.take(workers.paces())
        slow += [(window, one.rank) for one in compared.slow(factor, WINDOWS)]
    return slow


def test_a_worker_that_stays_slow_is_found_when_it_has_been_so_for_all_windows() -> None:
    slow = found(lambda rank, window: (STEP_S * (3 if rank == 2 and window >= 4 else 1), 0.0))
    assert slow[0] == (4 + WINDOWS - 1, 2) and {rank for _, rank in slow} == {2}


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_noise_a_slow_start_and_slow_moments_are_no_reason(num_workers: int) -> None:
    """Noise of a third, a slow start, and rare steps of five times the length do not make a worker slow."""
    for seed in range(100):
        chance = random.Random(seed)

        def takes(rank: int, window: int, chance: random.Random = chance) -> tuple[float, float]:
            slow_start = 10 if window < 2 and rank == 1 else 1
            return STEP_S * chance.uniform(0.8, 1.2) * slow_start * (5 if chance.random() < 0.1 else 1), 0.0

        assert not found(takes, num_workers=num_workers)


def test_twice_the_samples_may_take_twice_the_time() -> None:
    shares = (1.6, 0.8, 0.8, 0.8)
    assert not found(lambda rank, window: (STEP_S * shares[rank], 0.0), shares=shares, factor=1.1)


def test_what_costs_the_others_nothing_is_no_reason() -> None:
    """A worker whose own work is slower does not count as slow if nearly all of a step is something else."""
    workers, compared = Workers(3, lambda rank, _: (STEP_S / 1000 * (4 if rank == 1 else 1), 0.0)), Paces([1] * 3)
    for _ in range(10):
        compared.take(workers.paces())
    assert compared.slow(1.8, WINDOWS)[:1], "its work is a good part of these short steps"
    workers = Workers(3, lambda rank, _: (STEP_S / 1000 * (4 if rank == 1 else 1), STEP_S))
    compared = Paces([1] * 3)
    for _ in range(10):
        compared.take(workers.paces())
    assert not compared.slow(1.001, WINDOWS)


def test_waiting_for_input_is_named() -> None:
    workers, compared = Workers(3, lambda rank, _: (STEP_S, STEP_S * 2 * (rank == 1))), Paces([1] * 3)
    for _ in range(10):
        compared.take(workers.paces())
    (slow,) = compared.slow(1.5, WINDOWS)
    assert (slow.rank, round(slow.times, 1)) == (1, 3.0)
    assert slow.why.startswith("input: it waits 200 ms longer for a batch")


def test_steps_beside_a_checkpoint_and_steps_of_the_others_are_not_compared() -> None:
    seen = RankMonitor(0, 2, "here")
    borders = [0.0, 1.0, 3.0, 3.5, 3.5, 3.5]
    seen.step_over(borders)
    seen.step_over(borders, follows=True)
    seen.at_other_work = lambda: True
    seen.step_over(borders)
    assert (seen.spent[0], seen.own_work[:3]) == (3, (1, 1.0, 2.0))


class Keepers:
    """Three workers that record their paces in a folder; worker 1 is three times slower."""

    def __init__(self, folder: Path, least: int) -> None:
        self.said: list[str] = []
        self.left: list[int] = []
        self.seen = [RankMonitor(rank, 3, "here") for rank in range(3)]
        eviction = Eviction(
            factor=2.0,
            enough=lambda rank, others: len(others) >= least,
            leave=lambda rank, text: self.left.append(rank),
        )
        self._keepers = [
            PaceKeeper(
                monitor=seen,
                folder=folder,
                window_s=0.0,
                shares=[1.0] * 3,
                log=self.said.append,
                eviction=eviction if seen.rank == 0 else None,
            )
            for seen in self.seen
        ]

    def window(self) -> None:
        """Take five steps on each worker, and compare; worker 0 compares last."""
        for seen in self.seen:
            for _ in range(5):
                work_s = 3.0 if seen.rank == 1 else 1.0
                seen.step_over([0.0, 0.0, work_s, 3.5, 3.5, 3.5])
        for keeper in reversed(self._keepers):
            keeper.look()


def test_it_is_reported_once_and_then_left_out_once(tmp_path: Path) -> None:
    keepers = Keepers(tmp_path / "watch", least=2)
    for _ in range(1 + WINDOWS_UNTIL_REPORTED):
        keepers.window()
    assert [text[:57] for text in keepers.said] == ["rank 1 (worker) on here takes 3.0 times as long as the ot"]
    assert not keepers.left
    for _ in range(2 * WINDOWS):
        keepers.window()
    assert (len(keepers.said), keepers.left) == (1, [1])


def test_it_stays_where_the_others_would_be_too_few(tmp_path: Path) -> None:
    keepers = Keepers(tmp_path / "watch", least=3)
    for _ in range(3 * WINDOWS):
        keepers.window()
    assert not keepers.left
    assert len(keepers.said) == 2 and "too few" in keepers.said[1]


def test_one_rank_of_a_run_writes_nothing(tmp_path: Path) -> None:
    seen = RankMonitor(0, 1, "here")
    seen.step_over([0.0] * 6)
    PaceKeeper(monitor=seen, folder=tmp_path / "watch", window_s=0.0, shares=[1.0]).look()
    assert not (tmp_path / "watch").exists()


def test_the_watch_hands_it_on_to_the_rank_itself_or_ends_the_start(tmp_path: Path) -> None:
    ended: list[RankError] = []
    reported: list[str] = []
    seen = [RankMonitor(rank, 2, "here") for rank in range(2)]
    actions = Actions(end=ended.append, log=reported.append)
    (tmp_path / "watch").mkdir()
    watches = [Watchdog(monitor=one, folder=tmp_path / "watch", actions=actions) for one in seen]
    watches[0].evict(1, "it is slow", in_place=True)
    for watch in watches:
        watch._look()
    assert (seen[0].evicted, seen[1].evicted) == ("", "it is slow")
    assert (ended, reported) == ([], ["the run continues without rank 1: it is slow"])
    watches[0].evict(1, "it is slow", in_place=False)
    assert [(error.rank, error.lost, error.evicted) for error in ended] == [(1, True, True)]


def config(**flags: object) -> ResolvedConfig[TrainConfig]:
    return load(TrainConfig, [flag_layer({"model": "lenet", "data": "synthetic:hep", "ranks": 4, **flags})])


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ({"strategy": "ring"}, "add --elastic"),
        ({"strategy": "grpc-ps", "elastic": True}, "nobody can tell a slow worker"),
        ({"strategy": "async-sgd", "elastic": True, "ranks": 2}, "one worker"),
    ],
)
def test_where_it_cannot_be_it_is_refused_in_one_line(flags: dict[str, object], reported: str) -> None:
    with pytest.raises(UsageError, match=reported) as caught:
        check_least(config(**{"evict-slow": 2.0, **flags}))
    assert "\n" not in str(caught.value) and "--evict-slow 2" in str(caught.value)


def test_without_a_least_number_one_may_be_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = find_launcher()
    monkeypatch.setattr(type(launcher), "hosts", lambda self, environment: [])
    with_servers = config(**{"evict-slow": 2.0, "elastic": True, "strategy": "ps"})
    assert with_least(with_servers, launcher).config.checkpoint.min_workers == 2
    asked = config(**{"evict-slow": 2.0, "elastic": True, "min-workers": 1})
    assert with_least(asked, launcher) is asked
    without = config(elastic=True)
    assert with_least(without, launcher) is without


def test_the_place_of_a_slow_rank_is_left_out_at_once_where_enough_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = find_launcher()
    error = RankError("rank 1 is slow", rank=1, host="n2", lost=True, evicted=True)
    monkeypatch.setattr(type(launcher), "hosts", lambda self, environment: [])
    alone = RankSlots(launcher, 3)
    assert alone.leave_out(error, 5, lambda ranks: ranks >= 2) and alone.num_ranks == 2
    assert not alone.leave_out(error, 5, lambda ranks: ranks >= 2) and alone.num_ranks == 2
    monkeypatch.setattr(type(launcher), "hosts", lambda self, environment: ["n1", "n2", "n3"])
    nodes = RankSlots(launcher, 6)
    assert nodes.leave_out(error, 5, lambda ranks: ranks >= 4) == "n2 is left out" and nodes.num_ranks == 4


STALL_S = 6
FAMILIES = {"ring": 3, "ps": 4, "sync-easgd": 3, "async-easgd": 4, "easgd": 4, "hogwild-sgd": 3, "auto": 3}
"""A strategy of each family, and the ranks of a run with three workers."""


def line_of(strategy: str, shards: Path, run_dir: Path) -> list[object]:
    line = [*SHORT, "--strategy", strategy, "--ranks", FAMILIES[strategy], "--data", shards, "--run-dir", run_dir]
    line += ["--optimizer", "sgd", "--steps", 1000000, "--schedule", "constant", "--checkpoint-every", "1s"]
    line += ["--elastic", "--stall-timeout", f"{STALL_S}s"]
    line.remove("--deterministic")
    return line


def messages(run_dir: Path) -> str:
    return "\n".join(event["text"] for event in events(run_dir, "message"))


def check_goes_on_without_rank_1(process: subprocess.Popen[str], run_dir: Path, strategy: str, slow: Path) -> None:
    """Assert that the run continues without rank 1; after its exclusion `slow` is removed, so no new rank is slow."""
    wait_for(lambda: "leaves it out" in messages(run_dir) or process.poll() is not None, timeout_s=300)
    slow.unlink(missing_ok=True)
    known = steps_done(run_dir)
    wait_for(lambda: steps_done(run_dir) > known + 20 or process.poll() is not None, timeout_s=300)
    process.send_signal(signal.SIGTERM)
    finished = finish(process)
    assert finished.code == 75, finished.err
    reported = messages(run_dir)
    assert reported.count("; --evict-slow 1.5 leaves it out") == 1
    assert "rank 1 (worker) on" in reported and "times as long as the others" in reported
    in_place = strategy.startswith(("async", "hogwild"))
    assert ("continues without rank 1" in reported) == in_place
    assert ("2 workers in place of 3" in reported) != in_place
    assert record_of(run_dir)["workers"] == (3 if in_place else 2)


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["ring", pytest.param("async-easgd", marks=pytest.mark.soak)])
def test_a_run_continues_without_a_worker_whose_code_is_slow(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """A run continues without a worker whose code is slow; it sleeps, so it is slow however busy the machine is."""
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    slow.touch()
    line = [*line_of(strategy, shards, run_dir), "--model", f"{PLANTED}:build", "--evict-slow", 1.5]
    process = start(session_hpcdl, line, {"SLOW_WHILE": str(slow), "SLOW_S": "0.4", "STEP_S": "0.02"})
    check_goes_on_without_rank_1(process, run_dir, strategy, slow)


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", FAMILIES)
def test_a_run_continues_without_a_worker_whose_processor_is_slow(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    run_dir = tmp_path / "run"
    line = [*line_of(strategy, shards, run_dir), "--evict-slow", 1.5, "--inject", "slow:rank=1:x6@step=20"]
    line += ["--batch-size", 128]  # so that computing takes long compared with random variation
    check_goes_on_without_rank_1(start(session_hpcdl, line), run_dir, strategy, tmp_path / "none")


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", FAMILIES)
def test_a_healthy_run_keeps_its_workers(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """A healthy run keeps its workers, with constant checkpoints, evaluations, and any other load of this machine."""
    run_dir = tmp_path / "run"
    process = start(session_hpcdl, [*line_of(strategy, shards, run_dir), "--evict-slow", 3])
    wait_for(lambda: steps_done(run_dir) > 5 or process.poll() is not None, timeout_s=patience(300))
    began = events(run_dir, "start")[0]["at"]
    wait_for(
        lambda: events(run_dir, "step")[-1]["at"] > began + 4 * STALL_S or process.poll() is not None, patience(120)
    )
    process.send_signal(signal.SIGTERM)
    finished = finish(process)
    assert finished.code == 75, finished.err
    assert "leaves it out" not in messages(run_dir)
