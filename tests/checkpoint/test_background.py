"""Background work in its three modes: without ranks, with gaps that the test controls, and on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from hpcdl.checkpoint import background
from hpcdl.checkpoint import folders as checkpoints
from hpcdl.checkpoint.background import GAPS, OFF, THREAD, BackgroundWork, Turn, most_patience_s, way_for
from hpcdl.checkpoint.folders import CheckpointWriter, Snapshot
from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from hpcdl.comm.gaps import IdleCore
from hpcdl.comm.observed import NoRecorder, RankMonitor
from hpcdl.comm.threads import alone
from hpcdl.core.records.run_record import read_record
from hpcdl.strategies.base.strategy import Features
from hpcdl.strategies.table import STRATEGIES
from hpcdl.trace.steps import read_run
from tests.conftest import ROOT
from tests.training_runs import same_run

WAYS = (GAPS, THREAD, OFF)
LONG_S = 1000.0


def work_of(way: str, reported: list[str] | None = None) -> BackgroundWork:
    return BackgroundWork(way, RankMonitor(0, 2, "here"), (reported if reported is not None else []).append)


def slices(done: list[int], number: int) -> Callable[[Turn], None]:
    def work(turn: Turn) -> None:
        for _ in range(number):
            turn()
            sum(range(20_000))
            done.append(threading.get_ident())

    return work


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_in_gaps_nothing_is_done_but_while_the_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleCore, "is_idle", lambda self: True)
    work, done = work_of(GAPS), []
    gaps = work.seen.gaps
    job = work.start("job", slices(done, 3), LONG_S)
    time.sleep(0.1)
    assert not done and gaps.wanted == 1
    gaps.enter(time.monotonic())
    until(lambda: len(done) == 3 and gaps.wanted == 0)
    gaps.leave()
    job.wait()
    assert work.spent.in_gaps_s > 0 == work.spent.outside_s and threading.get_ident() not in done


def test_what_found_no_gap_is_done_at_once_when_somebody_waits_for_it() -> None:
    work, done, reported = work_of(GAPS), [], []
    job = work.start("job", slices(done, 3), LONG_S)
    job.wait()
    assert len(done) == 3 and work.spent.outside_s > 0 == work.spent.in_gaps_s and work.seen.gaps.wanted == 0
    assert not reported, "that somebody hurries it does not say that there are no gaps"


def test_a_step_without_gaps_is_reported_once_and_then_nobody_waits() -> None:
    messages: list[str] = []
    work, done = work_of(GAPS, messages), []
    for number in range(3):
        began_s = time.monotonic()
        job = work.start("job", slices(done, 2), 1.1 if number == 1 else 0.1 if number == 0 else LONG_S)
        job.thread.join(60)
        assert len(done) == 2 * (number + 1) and time.monotonic() - began_s < 60
        assert len(messages) == (number > 0), "a tenth of a second is too short to tell"
    (reported,) = messages
    assert "has no gaps" in reported


def test_off_is_in_the_step_and_a_thread_is_beside_it() -> None:
    done: list[int] = []
    work_of(OFF).start("job", slices(done, 2), LONG_S)
    assert done == [threading.get_ident()] * 2
    work_of(THREAD).start("job", slices(done, 2), LONG_S).wait()
    assert len(done) == 4 and threading.get_ident() not in done[2:]


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_wrong_is_for_who_waits(way: str) -> None:
    def fails(turn: Turn) -> None:
        raise ValueError("as planned")

    job = work_of(way).start("job", fails, LONG_S)
    with pytest.raises(ValueError, match="as planned"):
        job.wait()
    job.wait()


def test_slices_on_end_are_one_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive slices are one span, although the clock advances in between; a pause of a second ends it."""
    now_s, spans = [0.0], []

    def monotonic() -> float:
        now_s[0] += 1e-4
        return now_s[0]

    def halves(turn: Turn) -> None:
        slices([], 5)(turn)
        turn.pause()
        now_s[0] += 1
        slices([], 3)(turn)

    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=monotonic, thread_time=time.thread_time))
    monkeypatch.setattr(NoRecorder, "background", lambda self, *times, in_gap: spans.append((*times, in_gap)))
    work_of(THREAD).start("job", halves).wait()
    (first, second), fits = spans, [in_gap for *_, in_gap in spans]
    assert first[0] < first[1] < second[0] - 0.9 < second[1] and fits == [False, False]


def test_who_has_no_gaps_says_so() -> None:
    ring = STRATEGIES["ring"].features
    assert way_for(GAPS, ring, 2) == (GAPS, "")
    assert [way_for(way, ring, 1) for way in (THREAD, OFF)] == [(THREAD, ""), (OFF, "")]
    for features, workers, word in (
        (ring, 1, "one worker"),
        (STRATEGIES["hogwild-sgd"].features, 2, "nobody sees"),
        (Features(mpi=False), 2, "nobody sees"),
    ):
        way, reported = way_for(GAPS, features, workers)
        assert way == THREAD and word in reported


def test_no_more_than_an_interval_is_ever_lost() -> None:
    """No more than an interval is lost: a checkpoint starts early enough to be durable when the next would start."""
    for asked_s, patience_s in ((100.0, 10.0), (6000.0, 60.0)):
        interval = CheckpointInterval(
            asked_s, node_mtbf_s=1.0, num_nodes=1, most_patience_s=most_patience_s(GAPS, 300.0)
        )
        assert interval.patience_s == patience_s and interval.due_s + interval.patience_s == asked_s
    assert most_patience_s(GAPS, 8.0) == 2.0, "shorter than ranks may wait for each other"
    assert most_patience_s(THREAD, 300.0) == 0 == most_patience_s(OFF, 300.0)


ARRAYS = {
    "weights/0": numpy.arange(200_000, dtype=numpy.float32).reshape(50, 4, 1000),
    "scalar": numpy.array(3, numpy.int64),
    "nothing": numpy.zeros((0, 3)),
    "by columns": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "half": numpy.ones(3, numpy.float16),
}


def test_slices_make_the_file_that_numpy_makes(tmp_path: Path) -> None:
    size, digest = checkpoints.write_arrays(tmp_path / "ours.npz", ARRAYS)
    assert (size, digest) == ((tmp_path / "ours.npz").stat().st_size, checkpoints.digest_of(tmp_path / "ours.npz"))
    found = checkpoints.read_arrays(tmp_path / "ours.npz")
    assert [*found] == [*ARRAYS]
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        numpy.testing.assert_array_equal(found[name], array)


def pending(tmp_path: Path) -> tuple[CheckpointWriter, BackgroundWork]:
    """Return a writer with a checkpoint of step 1, and one of step 2 that waits for a gap."""
    work = work_of(GAPS)
    writer = CheckpointWriter(tmp_path, alone(), 3, work=work)
    writer.start(Snapshot(step=1, shared=ARRAYS, own={}, facts={}))
    writer.wait()
    writer.start(Snapshot(step=2, shared=ARRAYS, own={}, facts={}), LONG_S)
    time.sleep(0.05)
    assert writer.newest == 1
    return writer, work


def test_a_checkpoint_that_waits_for_a_gap_is_whole_as_soon_as_somebody_leaves(tmp_path: Path) -> None:
    writer, work = pending(tmp_path)
    writer.start(Snapshot(step=3, shared=ARRAYS, own={}, facts={}), LONG_S)
    assert writer.newest == 2 == checkpoints.newest_valid(tmp_path, [])
    writer.wait()
    assert writer.newest == 3 == checkpoints.newest_valid(tmp_path, []) and work.seen.gaps.wanted == 0


def test_a_disk_that_fills_up_in_a_gap_costs_the_same_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleCore, "is_idle", lambda self: True)
    writer, work = pending(tmp_path)

    def full(archive: Any, name: str, array: Any, turn: Turn) -> None:
        turn()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write_array", full)
    work.seen.gaps.enter(time.monotonic())
    until(lambda: bool(writer.warnings))
    work.seen.gaps.leave()
    writer.wait()
    (reported,) = writer.warnings
    assert reported.startswith("no checkpoint at step 2: No space left on device (rank 0 on ")
    assert checkpoints.newest_valid(tmp_path, []) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000001"]


SAMPLE = {"ring": WAYS, "async-easgd": (GAPS, OFF)}
"""A synchronous and an asynchronous strategy, in a thread `ring` alone; `make soak` has all others."""
OTHERS = [name for name, info in STRATEGIES.items() if info.features.mpi and name != "ring"]
STEPS, RANKS = 24, 3


def settings(name: str, way: str, run_dir: Path) -> dict[str, Any]:
    own = STRATEGIES[name].features.optimizers
    rule = {"optimizer": own[0], "learning-rate": 0.005} if own else {}
    return rule | {
        "model": "lenet", "data": "synthetic:mnist", "batch-size": 8, "steps": STEPS, "ranks": RANKS, "strategy": name,
        "run-dir": str(run_dir), "trace": "steps", "profile": "none", "background": way, "checkpoint-every": 0.5,
        "local-checkpoint-every": 5, "elastic": True, "local-checkpoint-folder": str(run_dir.parent),
        "deterministic": True, "divergence-check-steps": 7,
    }  # fmt: skip


def run_all(ways: Mapping[str, tuple[str, ...]], folder: Path) -> Path:
    """Return a folder with a run of each strategy in each of its modes, all of them inside one mpiexec."""
    mpiexec = find_mpiexec()
    cases = [settings(name, way, folder / f"{name}-{way}") for name in ways for way in ways[name]]
    (folder / "cases.json").write_text(json.dumps(cases))
    script = ROOT / "tests" / "strategies" / "digits_ranks.py"
    command = [str(mpiexec.path), "-n", str(RANKS), sys.executable, str(script), str(folder / "cases.json")]
    environment = {**os.environ, **environment_for(mpiexec.flavour), "XDG_CACHE_HOME": str(folder)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    (folder / "said").write_text(finished.stderr[-4000:])
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(SAMPLE, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def other_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(dict.fromkeys(OTHERS, WAYS), tmp_path_factory.mktemp("runs"))


def check(folder: Path, name: str, ways: tuple[str, ...]) -> None:
    """Assert equal numbers in all modes, complete checkpoints, and what record and trace say of the work."""
    features = STRATEGIES[name].features
    for way in ways:
        run = folder / f"{name}-{way}"
        assert (run / "record.json").exists(), (folder / "said").read_text()
        record = read_record(run)
        assert record.status == "finished"
        assert not [text for text in record.warnings if "checkpoint" in text or "copies" in text]
        assert checkpoints.newest_valid(run, []) is not None
        assert set(record.background) == {"in_gaps_s", "outside_s"} and sum(record.background.values()) > 0
        spans = {
            kind: sum(len(trace.spans(f"background work {kind}")) for trace in read_run(run))
            for kind in ("in gaps", "outside gaps")
        }
        assert (spans["in gaps"] > 0) == (record.background["in_gaps_s"] > 0)
        assert (spans["outside gaps"] > 0) == (record.background["outside_s"] > 0)
        if way != GAPS or features.lock_free:
            assert record.background["in_gaps_s"] == 0
        if features.deterministic and way != OFF:
            same_run(run, folder / f"{name}-{OFF}")
    reported = (folder / f"{name}-{GAPS}" / "metrics.jsonl").read_text()
    assert ("--background gaps" in reported) == features.lock_free


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "ways"), SAMPLE.items(), ids=SAMPLE)
def test_the_numbers_are_the_same_whatever_the_way(runs: Path, name: str, ways: tuple[str, ...]) -> None:
    check(runs, name, ways)


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_with_each_other_strategy_too(other_runs: Path, name: str) -> None:
    check(other_runs, name, WAYS)
