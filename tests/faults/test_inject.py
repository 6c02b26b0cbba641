"""Injected faults: the syntax of --inject, and runs with --elastic, which continue as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from hpcdl.cluster.launchers import find_launcher
from hpcdl.comm.observed import RankMonitor
from hpcdl.config.load import Layer, ResolvedConfig, flag_layer, load
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import ConfigError, RankError, UsageError
from hpcdl.faults import inject
from hpcdl.faults.inject import Injection
from hpcdl.launch import relaunch
from hpcdl.launch.relaunch import TRIES, until_done
from hpcdl.run.faults import (
    PLANTED,
    STRUCK_FROM_BESIDE,
    check_injected,
    parse_faults,
)
from hpcdl.run.plan import prepare
from hpcdl.strategies.table import STRATEGIES
from hpcdl.supervision.control import time_allowed
from tests.conftest import CommandLine, Undisturbed
from tests.training_runs import NOTED, SHORT, events, images_of, record_of, same_run


def config(**flags: object) -> ResolvedConfig[TrainConfig]:
    return load(TrainConfig, [flag_layer({"model": "lenet", "data": "synthetic:hep", "ranks": 4, **flags})])


def test_what_is_asked_for_is_understood() -> None:
    text = "kill:rank=3@step=50, stop:rank=1@time=30s+20s,slow:rank=2:x3, exit:rank=0:7@step=5"
    kill, stop, slow, leave = parse_faults(text, 4)
    assert (kill.kind, kill.rank, kill.step) == ("kill", 3, 50)
    assert (stop.time_s, stop.duration_s, stop.step) == (30.0, 20.0, None)
    assert (slow.value, leave.value) == (3.0, 7.0)
    assert parse_faults("", 4) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kill", "KIND:rank=R"),
        ("kill:rank=9@step=1", "ranks 0 to 3"),
        ("kill:rank=1", "say when"),
        ("burn:rank=1@step=1", "known: kill"),
        ("slow:rank=1", "how many times slower"),
        ("slow:rank=1:x0.5", "how many times slower"),
        ("kill:rank=1:3@step=1", "takes no value"),
        ("kill:host=1@step=1", "partition, link and skew strike host=N"),
        ("kill:rank=1:3mbit@step=1", "takes no rate"),
        ("partition:host=1:+3s@step=1", "takes no shift"),
        ("partition:host=1", "say when"),
        ("partition:host=2@step=1", "there are hosts 0 to 1"),
        ("partition:rank=4@step=1", "there are ranks 0 to 3"),
        ("partition:host=1@every=9s", "partition:host=random@every"),
        ("link:host=1", "say how fast"),
        ("link:host=1:100", "say how fast"),
        ("link:host=1:0mbit", "say how fast"),
        ("link:host=1:100mbit@step=3", "give no time"),
        ("skew:host=1", "say which node's clock"),
        ("skew:rank=1:+2s", "say which node's clock"),
        ("skew:host=1:+2s@step=3", "give no time"),
        ("skew:host=1:+soon", "KIND:rank=R"),
        ("kill:rank=1@step=1+3s", "only stop"),
        ("nan:rank=1@time=3s", "give @step=N"),
        ("stop:rank=1@time=soon", "--inject stop"),
        ("kill:rank=1@step=1,kill:rank=1", "say when"),
        ("kill:shard=1@step=1", "eio strikes shard=N"),
        ("eio:rank=1", "eio strikes shard=N"),
        ("flip:bucket=2", "give @step=N"),
        ("flip:rank=2@step=3", "flip bucket=N"),
        ("eio:shard=1@step=3", "give no step"),
        ("full:checkpoint@time=3s", "@step=N is possible"),
        ("kill:rank=1@every=3s", "belong to rank=random"),
        ("kill:rank=random@step=3", "rank=random@every=60s"),
        ("kill:rank=random@every=0s", "above 0"),
        ("nan:rank=random@every=3s", "kill, term, stop, exit, partition do"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_each(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(text, 4, 2)
    assert len(caught.value.problems) == 1 and word in caught.value.problems[0]


def test_faults_come_from_the_command_line_alone() -> None:
    check_injected(config(inject="kill:rank=1@step=1"))
    layers = [Layer(origin="site (site.toml)", values={"inject": "kill:rank=1@step=1"})]
    with pytest.raises(UsageError, match="command line alone"):
        check_injected(load(TrainConfig, [*layers, flag_layer({"model": "lenet", "data": "x", "ranks": 2})]))
    with pytest.raises(UsageError, match="not in a script"):
        check_injected(config(inject="nan:rank=1@step=1"), [*STRUCK_FROM_BESIDE], "not in a script")


@pytest.mark.parametrize("kind", [*STRUCK_FROM_BESIDE, *PLANTED])
def test_every_kind_strikes_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind strikes once, also in a resumed run: the second start of the same launch omits it."""
    (tmp_path / "ranks").mkdir()
    value = {"slow": ":x2", "exit": ":3"}.get(kind, "")
    text = f"{kind}:rank=1{value}@step=7"
    struck = threading.Semaphore(0)
    monkeypatch.setattr(inject, "STRIKES", {name: lambda fault: struck.release() for name in inject.STRIKES})
    images = numpy.zeros((2, 4, 4, 1), numpy.uint8)
    for start in range(2):
        seen = RankMonitor(1, 2, "here")
        with Injection(text, seen, tmp_path) as injection:
            seen.doing("reading a batch", 6)
            assert injection.batch(6, images) is images
            assert not struck.acquire(timeout=0.05)
            seen.doing("reading a batch", 7)
            if kind not in PLANTED:
                assert struck.acquire(timeout=20 if start == 0 else 0.1) is (start == 0)
            elif start == 1:
                assert injection.batch(7, images) is images
            elif kind == "nan":
                assert numpy.isnan(injection.batch(7, images)).all()
            else:
                with pytest.raises(ValueError, match="injected"):
                    injection.batch(7, images)
    assert [event["text"] for event in events(tmp_path, "message")] == [f"injected: {text}"]


def test_a_fault_is_asked_for_then_injected_or_not_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranks").mkdir()
    struck = threading.Semaphore(0)
    monkeypatch.setattr(inject, "STRIKES", {**inject.STRIKES, "term": lambda fault: struck.release()})
    seen = RankMonitor(0, 2, "here")
    with Injection("term:rank=0@step=3,kill:rank=1@step=9,stop:rank=random@every=9h+1s", seen, tmp_path) as injection:
        again = "faults are injected again and again: stop of a random rank every 9h 00m in the mean"
        kill = "kill of rank 1 at step 9"
        asked = ["a fault is asked for: term of rank 0 at step 3", f"a fault is asked for: {kill}", again]
        assert injection.log_lines() == asked
        seen.doing("reading a batch", 3)
        assert struck.acquire(timeout=20)
    assert injection.settled(["something else", *asked]) == [
        "something else",
        again,
        "a fault was injected: term of rank 0 at step 3",
        f"a fault was not reached: {kill}; --inject kill:rank=1@step=9 has done nothing",
    ]


def test_a_fault_goes_by_the_steps_of_a_whole_script() -> None:
    """A fault counts the steps of a whole script, over fits, loops with a commit, and loops that only exchange."""
    seen = RankMonitor(0, 2, "here")
    seen.role, steps = "script", seen.script_steps
    steps.reached(40)
    for _ in range(2):  # fits of three batches, in one of which an optimizer exchanges five times
        steps.counted = True
        for batch in range(3):
            for _ in range(5 if batch == 1 else 1):
                steps.exchange("first")
            steps.over()
            seen.doing("epoch 1", batch + 1)
        steps.counted = False
    assert seen.step == 3 and seen.step_of_run == 46
    for _ in range(4):  # a loop of two optimizers: its last step has begun, but is not over
        steps.exchange("generator")
        steps.exchange("discriminator")
    assert seen.step_of_run == 49
    seen.role = "worker"
    assert seen.step_of_run == 3


def test_random_ones_are_the_same_on_every_rank_and_continue_after_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random faults are the same on every rank, one rank at a time; faults due between two starts are omitted."""
    (tmp_path / "ranks").mkdir()
    struck: list[tuple[int, float]] = []
    text = "kill:rank=random@every=10s:seed=3"
    now_s = [1000.0]
    monkeypatch.setattr(inject.time, "time", lambda: now_s[0])
    monkeypatch.setattr(inject.time, "monotonic", lambda: now_s[0] - 900.0)

    def run_to(end_s: float) -> None:
        rank = [0]
        monkeypatch.setattr(
            inject, "STRIKES", {**inject.STRIKES, "kill": lambda fault: struck.append((rank[0], now_s[0]))}
        )
        injections = [Injection(text, RankMonitor(number, 3, "here"), tmp_path) for number in range(3)]
        schedules = [one._schedule(0, one._all[0]) for one in injections]
        while now_s[0] < end_s:
            for rank[0], schedule in enumerate(schedules):
                next(schedule)
            now_s[0] += 0.25

    run_to(1200.0)
    first = list(struck)
    assert 10 <= len(first) <= 35 and {rank for rank, _ in first} == {0, 1, 2}
    now_s[0] = 1300.0
    run_to(1400.0)
    assert struck[: len(first)] == first and all(at_s >= 1300.0 for _, at_s in struck[len(first) :])
    assert len(struck) > len(first)
    reported = [event["text"] for event in events(tmp_path, "message")]
    assert len(reported) == len(struck) and all(f"as {text} has it" in line for line in reported)


def lost(lost: bool = True) -> None:
    raise RankError("rank 1 is gone", rank=1, lost=lost)


def test_a_run_that_gets_nowhere_is_given_up(tmp_path: Path) -> None:
    reported: list[str] = []
    with pytest.raises(RankError, match=f"lost {TRIES} times after step 0"):
        until_done(lambda *_: lost(), find_launcher(), tmp_path, config(elastic=True), {}, reported.append)
    assert len(reported) == TRIES - 1 and "new ranks continue from the start" in reported[0]
    assert "resume = true" in (tmp_path / "run.toml").read_text()


def test_the_time_limit_of_a_run_that_continues_counts_from_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, allowed = [1000.0], []
    monkeypatch.setattr(relaunch, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def launch(now: ResolvedConfig[TrainConfig], environment: Mapping[str, str]) -> None:
        allowed.append(time_allowed(now.config.checkpoint.time_limit, environment))
        now_s[0] += 40.0
        if len(allowed) < TRIES:
            lost()

    until_done(
        launch, find_launcher(), tmp_path, config(**{"elastic": True, "time-limit": 60.0}), {}, lambda text: None
    )
    assert allowed == [60.0, 20.0, -20.0]


@pytest.mark.parametrize(("elastic", "gone"), [(False, True), (True, False)])
def test_only_a_lost_rank_is_made_up_for_and_only_where_that_is_asked(
    elastic: bool, gone: bool, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"^rank 1 is gone$"):
        until_done(lambda *_: lost(gone), find_launcher(), tmp_path, config(elastic=elastic), {}, pytest.fail)


@pytest.mark.parametrize(
    ("text", "data", "word"),
    [
        ("eio:shard=0", "synthetic:hep", "no shards"),
        ("eio:shard=99", "", "shards 0 to "),
        ("flip:bucket=0@step=3", "synthetic:hep", "have buckets"),
        ("partition:host=1@step=3", "synthetic:hep", "this run is on one node; rank=R is possible there"),
        ("skew:host=0:+2s", "synthetic:hep", r"this run is on one node$"),
    ],
)
def test_what_this_run_has_not_got_cannot_be_struck(text: str, data: str, word: str, shards: Path) -> None:
    with pytest.raises(UsageError, match=word):
        prepare(config(inject=text, epochs="1", data=data or str(shards), strategy="easgd"))


@pytest.mark.long
@pytest.mark.mpi
def test_a_shard_that_cannot_be_read_ends_the_run_and_is_named(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    line = [*SHORT, "--data", shards, "--run-dir", tmp_path / "run", "--epochs", "1", "--inject", "eio:shard=0"]
    finished = session_hpcdl([*line, "--elastic"], timeout_s=300)
    assert finished.code == 1, finished.err
    last = finished.err.splitlines()[-1]
    assert "cannot read" in last and "train/shard-00000.h5" in last and "Input/output error" in last, last
    assert "new ranks" not in finished.err, "a disk that is broken stays broken"
    assert "injected: eio:shard=0" in [event["text"] for event in events(tmp_path / "run", "message")]


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ring", "ps"])
def test_a_flipped_bit_is_found_where_weights_are_compared(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """A flipped bit keeps numbers finite, so only the comparison of weights finds it.

    `make test-all` shows it in test_safety_command.py.
    """
    line = [*SHORT, "--strategy", strategy, "--ranks", "3", "--data", shards, "--run-dir", tmp_path / "run"]
    line += ["--epochs", "1", "--divergence-check-steps", "5", "--inject", "flip:bucket=0@step=7"]
    if strategy == "ps":
        line.remove("--deterministic")
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 1, finished.err
    last = finished.err.splitlines()[-1]
    assert "weights differ over the ranks after step 10" in last and "on rank 1" in last, last
    assert "injected: flip:bucket=0@step=7" in [event["text"] for event in events(tmp_path / "run", "message")]


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("way", ["gaps", "thread", "off"])
def test_no_room_for_a_checkpoint_costs_a_warning(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, way: str
) -> None:
    """A full disk costs a checkpoint and a warning; `make test-all` has a really full disk (test_full_disk.py)."""
    run_dir = tmp_path / "run"
    line = [*SHORT, "--data", shards, "--run-dir", run_dir, "--epochs", "2", "--checkpoint-every", "0.1s"]
    finished = session_hpcdl([*line, "--inject", "full:checkpoint", "--background", way], timeout_s=300)
    assert finished.code == 0, finished.err
    warnings = record_of(run_dir)["warnings"]
    assert sum("No space left on device" in text and "the one before stays" in text for text in warnings) == 1
    assert any((run_dir / "checkpoints").glob("step-*")), "the next one had room"


ELASTIC = ["--elastic", "--checkpoint-every", "0.1s", "--stall-timeout", "10s"]


@pytest.mark.long
@pytest.mark.mpi
def test_killed_at_rank_0_and_stopped_at_rank_1_the_run_is_the_undisturbed_one(
    undisturbed: Undisturbed, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    faults = "kill:rank=0@step=60,stop:rank=1@step=130"
    line = [*NOTED, "--data", shards, "--run-dir", run_dir, *ELASTIC, "--inject", faults]
    finished = session_hpcdl(line, env={"RECORD_DIR": str(tmp_path), "STEP_S": "0.02"}, timeout_s=300)
    assert finished.code == 0, finished.err
    assert finished.err.count("new ranks continue") == 2 and "rank 0 on" in finished.err
    (stopped,) = [line for line in finished.err.splitlines() if "is not responding" in line]
    assert "rank 1 on" in stopped
    same_run(run_dir, undisturbed.run_dir)
    assert images_of(tmp_path) == undisturbed.images
    record = record_of(run_dir)
    assert len(record["resumed_from_steps"]) == 2
    assert sum("a fault was injected" in warning for warning in record["warnings"]) == 2


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("role", ["rank 0", "worker", "last rank"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_every_strategy_continues(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str, role: str
) -> None:
    features = STRATEGIES[strategy].features
    fault = f"kill:rank={['rank 0', 'worker', 'last rank'].index(role)}@step=30"
    line = [*SHORT, "--strategy", strategy, "--ranks", "3", "--data", shards, "--run-dir", tmp_path / "run"]
    line += [*ELASTIC, "--epochs", "3", "--inject", fault]
    line += ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"] if features.optimizers else []
    line += [] if features.mpi else ["--allow-grpc"]
    if not features.keras_optimizer or not features.deterministic:
        line.remove("--deterministic")
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 0, finished.err
    assert record_of(tmp_path / "run")["status"] == "finished"
    assert events(tmp_path / "run", "message")
    assert any(event["text"] == f"injected: {fault}" for event in events(tmp_path / "run", "message"))


def line_of(strategy: str, run_dir: Path, shards: Path, epochs: int = 1) -> list[object]:
    features = STRATEGIES[strategy].features
    line = [*SHORT, "--strategy", strategy, "--ranks", "3", "--data", shards, "--run-dir", run_dir]
    line += ["--epochs", str(epochs)]
    line += ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"] if features.optimizers else []
    if not features.keras_optimizer or not features.deterministic:
        line.remove("--deterministic")
    return line


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy", [name for name, info in STRATEGIES.items() if info.features.mpi and name != "single"]
)
def test_every_strategy_continues_when_a_partition_heals(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """Every strategy continues after a partition of its last rank, a server if it has any, and on a slow link.

    `make test-all` cuts off a rank of a script (keras/test_kept.py) and a node (lab/test_network_faults.py).
    """
    faults = "partition:rank=2@step=20+1s,link:rank=1:500mbit"
    line = [*line_of(strategy, tmp_path / "run", shards), "--stall-timeout", "10s", "--inject", faults]
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 0, finished.err
    assert record_of(tmp_path / "run")["status"] == "finished"
    reported = [event["text"] for event in events(tmp_path / "run", "message")]
    assert reported.count("injected: partition:rank=2@step=20+1s") == 1
    assert "injected: link:rank=1:500mbit (in hpcdl's own messages)" in reported


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ring", "async-easgd"])
def test_a_rank_that_stays_cut_off_is_named(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """A rank that stays cut off is named.

    `make test-all` has it for a node (lab/test_network_faults.py), and for a rank that is stopped (test_faults.py).
    """
    line = [*line_of(strategy, tmp_path / "run", shards), "--stall-timeout", "5s"]
    finished = session_hpcdl([*line, "--inject", "partition:rank=1@step=20"], timeout_s=300)
    assert "rank 1 on" in finished.err and "is not responding" in finished.err, finished.err
    assert finished.code == (1 if strategy == "ring" else 0), "an asynchronous run continues without a worker"


@pytest.mark.mpi
@pytest.mark.soak
def test_new_ranks_continue_in_place_of_one_that_stays_cut_off(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """New ranks replace one that stays cut off; `make test-all` does so for a node (lab/test_network_faults.py)."""
    line = [*line_of("ring", tmp_path / "run", shards), *ELASTIC[:3], "--stall-timeout", "5s"]
    finished = session_hpcdl([*line, "--inject", "partition:rank=1@step=20"], timeout_s=300)
    assert finished.code == 0 and "new ranks continue" in finished.err, finished.err
    assert "rank 1 on" in finished.err and "is not responding" in finished.err


@pytest.mark.mpi
@pytest.mark.soak
def test_partitions_at_random_are_the_same_on_every_rank(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Random partitions are the same on every rank; `make test-all` shows it without ranks, above."""
    line = [*line_of("ring", tmp_path / "run", shards, epochs=3), "--stall-timeout", "10s"]
    finished = session_hpcdl([*line, "--inject", "partition:rank=random@every=1s:seed=3+0.2s"], timeout_s=300)
    assert finished.code == 0, finished.err
    reported = [event["text"] for event in events(tmp_path / "run", "message") if "as partition" in event["text"]]
    assert reported and len({*reported}) > 1, "several, at different ranks"


@pytest.mark.parametrize("fault", ["partition:rank=1@step=3", "link:rank=1:10mbit"])
def test_messages_that_hpcdl_does_not_see_cannot_stand_still(fault: str) -> None:
    with pytest.raises(UsageError, match="does not see them"):
        prepare(config(inject=fault, epochs="1", data="synthetic:hep", strategy="grpc-ring", allow_grpc=True))


SPIN, SLEEP = "while True: pass", "import time\nwhile True: time.sleep(0.01)"


def used_s(pid: int) -> float:
    """Return the processor time of a process, by its clock (clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def slowed(program: str, neighbours: int) -> tuple[float, float]:
    """Return the processor time of a process under `slow:rank=R:x3`, and of what takes its share, on one core."""
    core = sorted(os.sched_getaffinity(0))[0]
    python = ["taskset", "-c", str(core), sys.executable, "-S", "-c"]
    with contextlib.ExitStack() as stack:

        def begin(text: str, *values: object) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([*python, text, *map(str, values)])
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        for _ in range(neighbours):
            begin(SPIN)
        struck = begin(program)
        time.sleep(0.3)
        before_s = used_s(struck.pid)
        slower = begin(inject._SLOWS, struck.pid, 3, inject.PERIOD_S / 3)
        time.sleep(2.5)
        return used_s(struck.pid) - before_s, used_s(slower.pid)


@pytest.mark.parametrize("neighbours", [0, 1])
def test_a_slow_rank_is_slow_on_a_busy_core_too(neighbours: int) -> None:
    """A slow rank gets a third of what both get on a busy core too, as if its processor had a third of its speed."""
    own_s, taken_s = slowed(SPIN, neighbours)
    assert own_s > 0.05 and own_s / (own_s + taken_s) == pytest.approx(1 / 3, rel=0.2)


def test_who_only_sleeps_is_not_slowed() -> None:
    own_s, taken_s = slowed(SLEEP, 0)
    assert own_s < 0.2 and taken_s < 1.0
