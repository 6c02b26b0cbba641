"""A run that lost workers grows again: which nodes come back, who may ask for it, and which samples it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcdl.cluster.launchers.base import LEFT_OUT_VARIABLE
from hpcdl.cluster.launchers.single import LAUNCHER as LOCAL
from hpcdl.cluster.status import RankStatus, raise_for
from hpcdl.config.load import ResolvedConfig
from hpcdl.core.errors import StoppedEarly, UsageError
from hpcdl.core.storage.lock import writing
from hpcdl.launch import relaunch
from hpcdl.launch.relaunch import REQUEST, ask_to_grow, is_own_file, until_done
from hpcdl.launch.slots import RankSlots
from hpcdl.run import rundir
from hpcdl.strategies.table import STRATEGIES
from hpcdl.supervision.control import LEAVE, Room
from tests.conftest import CommandLine, Finished, finish
from tests.launch.test_in_place import library, recoveries
from tests.run.test_shrink import Nodes, config, lost, notes
from tests.training_runs import NOTED, SHORT, events, record_of, start, steps_done, wait_for

Launch = Callable[[Path], None]
"""The work of the ranks of a launch, in their status folder."""
Starts = list[tuple[Any, str]]


def makes_room(folder: Path) -> None:
    """Train until the ranks are asked to make room for more."""
    wait_for(lambda: (folder / LEAVE).exists(), 20)
    raise StoppedEarly("saved", grows=True)


def ends_with(error: Exception) -> Launch:
    def launch(folder: Path) -> None:
        raise error

    return launch


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Starts]:
    """A function that runs `launches` in turn on simulated nodes; returns each start's settings and excluded nodes."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "checkpoints" / "step-0000000007").mkdir(parents=True)
    monkeypatch.setattr(relaunch, "TICK_S", 0.01)
    monkeypatch.setattr(relaunch, "LOOK_S", 0.05)

    def go(resolved: ResolvedConfig[Any], launches: list[Launch], nodes: Any = LOCAL) -> Starts:
        starts: Starts = []

        def launch(now: ResolvedConfig[Any], environment: Mapping[str, str]) -> None:
            starts.append((now.config, environment.get(LEFT_OUT_VARIABLE, "")))
            if len(starts) <= len(launches):
                launches[len(starts) - 1](tmp_path / "ranks")

        until_done(launch, nodes, tmp_path, resolved, {}, lambda text: None)
        return starts

    return go


def told(run_dir: Path) -> list[str]:
    return [event["text"] for event in events(run_dir, "message")]


def test_a_node_that_answers_again_is_used_again(run: Callable[..., Starts], tmp_path: Path) -> None:
    resolved, nodes = config(**{"ranks": 8, "min-workers": 4, "steps": 100}), Nodes("n1", "n2", "n3", "n4")
    nodes.down = {"n2"}

    def comes_back(folder: Path) -> None:
        nodes.down = set()
        makes_room(folder)

    starts = run(resolved, [ends_with(lost("n2", node="n2")), comes_back], nodes)
    assert [(now.run.ranks, left_out) for now, left_out in starts] == [(8, ""), (6, "n2"), (8, "")]
    assert starts[-1][0].data == resolved.config.data and starts[-1][0].optimizer == resolved.config.optimizer
    assert told(tmp_path)[1:] == [
        "n2 can be used again: the ranks save and leave, to continue with 8 workers in place of 6",
        "n2 is back; 8 workers in place of 6, 128 samples a step as before continue after step 7",
    ]


def test_a_node_that_fails_twice_is_left_out_for_good_and_named(run: Callable[..., Starts], tmp_path: Path) -> None:
    """A node that fails twice is excluded for good, even after a request; another that failed once may come back."""
    nodes = Nodes("n1", "n2", "n3", "n4")

    def asked(folder: Path) -> None:
        (folder / REQUEST).touch()
        makes_room(folder)

    fails = ends_with(lost("n2", node="n2"))
    starts = run(
        config(**{"min-workers": 2}), [fails, makes_room, fails, ends_with(lost("n4", node="n4")), asked], nodes
    )
    assert [left_out for _, left_out in starts] == ["", "n2", "", "n2", "n2,n4", "n2"]
    assert any("n2 is left out, n2 for good (it has failed twice)" in text for text in told(tmp_path))


def test_a_node_that_is_silent_and_then_gone_has_failed_once() -> None:
    """A silent node that turns out to be gone counts as one failure; it shows when its ranks cannot restart."""
    places = RankSlots(Nodes("n1", "n2", "n3"), 3)
    assert places.leave_out(lost("n2"), 40, lambda ranks: True) == ""
    assert places.leave_out(lost("n2", node="n2"), 40, lambda ranks: True) == "n2 is left out"
    assert places.take(places.back(asked=False), asked=False) == "n2 is back"
    assert "for good" in places.leave_out(lost("n2", node="n2"), 40, lambda ranks: True)
    places.leave_out(lost("n3"), 40, lambda ranks: True)
    assert "for good" in places.leave_out(lost("n3", node="n3"), 60, lambda ranks: True), "it had worked in between"


def test_the_launcher_learns_of_a_node_that_was_left_out_also_when_it_is_back() -> None:
    """The launcher learns of a formerly excluded node, so that it does not wait for Slurm's old step there."""
    places = RankSlots(Nodes("n1", "n2"), 2)
    assert places.environment == {}
    places.leave_out(lost("n2", node="n2"), 0, lambda ranks: True)
    assert places.environment == {LEFT_OUT_VARIABLE: "n2"}
    assert places.take(places.back(asked=False), asked=False) == "n2 is back"
    assert places.environment == {LEFT_OUT_VARIABLE: ""}


def test_whoever_asks_learns_why_there_are_no_more(run: Callable[..., Starts], tmp_path: Path) -> None:
    nodes = Nodes("n1", "n2", "n3", "n4")
    nodes.down = {"n3"}

    def asked(folder: Path) -> None:
        (folder / REQUEST).touch()
        wait_for(lambda: not (folder / REQUEST).exists(), 20)

    def asked_and_lost(folder: Path) -> None:
        asked(folder)
        raise lost("n3", node="n3")

    run(config(**{"min-workers": 2}), [asked_and_lost, asked], nodes)
    assert told(tmp_path)[0] == "more workers were asked for, but all 4 are there"
    assert told(tmp_path)[2] == (
        "more workers were asked for, but n3 cannot be used (no answer, or no more in this job)"
    )


@pytest.mark.parametrize("word", ["message", "signal"])
def test_ranks_that_a_signal_stops_stay_stopped(run: Callable[..., Starts], word: str, tmp_path: Path) -> None:
    statuses = [
        RankStatus(rank=rank, host="a", pid=1, state="stopped", message=word, grows=rank == 0 and word == "message")
        for rank in range(2)
    ]
    with pytest.raises(StoppedEarly) as stopped:
        raise_for(statuses, 2, casualty=None, log=tmp_path)
    assert stopped.value.grows == (word == "message")
    if word == "signal":
        with pytest.raises(StoppedEarly, match=r"^signal$"):
            run(config(), [ends_with(stopped.value)])


def test_ranks_look_for_the_file_and_take_it_away_where_they_cannot_leave(tmp_path: Path) -> None:
    assert not Room(None).wanted()
    room = Room(tmp_path)
    assert not room.wanted()
    (tmp_path / LEAVE).touch()
    assert not room.wanted(), "once in a second is enough"
    assert Room(tmp_path).wanted()
    room.refuse()
    assert not (tmp_path / LEAVE).exists()


def test_only_the_user_whose_run_continues_may_ask(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        ask_to_grow(tmp_path)
    rundir.create(tmp_path, config(elastic=False), {})
    with pytest.raises(UsageError, match="resume it with --elastic"):
        ask_to_grow(tmp_path)
    rundir.create(tmp_path, config(), {})
    with pytest.raises(UsageError, match="is not running"):
        ask_to_grow(tmp_path)
    with writing(tmp_path):
        ask_to_grow(tmp_path)
    request = tmp_path / "ranks" / REQUEST
    assert is_own_file(request) and not is_own_file(tmp_path)
    request.unlink()
    request.symlink_to(tmp_path / "run.toml")
    assert not is_own_file(request)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_what_somebody_else_has_put_there_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / REQUEST).touch()
    os.chown(tmp_path / REQUEST, 65534, 65534)
    assert not is_own_file(tmp_path / REQUEST)
    rundir.create(tmp_path, config(), {})
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another user"):
        ask_to_grow(tmp_path)


def test_the_command_says_what_to_type(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    for words in (["jobs", "grow"], ["jobs", "4711", "run"]):
        asked = session_hpcdl(words)
        assert asked.code == 2 and "type `hpcdl jobs grow RUN`" in asked.err
    unknown = session_hpcdl(["jobs", "grow", tmp_path / "nowhere"])
    assert unknown.code == 2 and "was not submitted by `hpcdl submit`" in unknown.err


def grows(
    hpcdl: CommandLine,
    run_dir: Path,
    line: list[Any],
    smaller: Callable[[], bool],
    env: Mapping[str, str] | None = None,
    ask: Callable[[Path], None] = ask_to_grow,
) -> Finished:
    """Run `line`, ask for more workers once the run is `smaller`, and return how it ended."""
    job = start(hpcdl, [*line, "--run-dir", run_dir], env=env)
    wait_for(lambda: smaller() or job.poll() is not None, 240)
    assert job.poll() is None, finish(job, 10).err
    ask(run_dir)
    return finish(job, 400)


@pytest.mark.mpi
def test_every_sample_of_an_epoch_comes_once_where_a_run_grows_back(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Three workers become two at the start, and three in the first epoch; each sample is taken once per epoch."""
    run_dir, note = tmp_path / "run", {"RECORD_DIR": str(tmp_path), "STEP_S": "0.1"}
    line = [*NOTED, "--data", shards, "--ranks", "3", "--batch-size", "17", "--keep-batch", "33", "--epochs", "2"]
    line += ["--elastic", "--min-workers", "2", "--inject", "kill:rank=2@step=1,kill:rank=2@step=1"]
    line += ["--checkpoint-every", "1h"]

    finished = grows(
        session_hpcdl, run_dir, line, lambda: record_exists(run_dir, workers=2) and steps_done(run_dir) > 3, note
    )
    assert finished.code == 0, finished.err
    assert "more workers were asked for; 3 workers in place of 2, 33 samples a step as before" in finished.err
    record = record_of(run_dir)
    (grown,) = record["resumed_from_steps"][-1:]
    samples = record["num_samples"]
    per_epoch = samples // 33
    assert record["workers"] == 3 and 3 < grown < 2 * per_epoch
    taken = {rank: dict(lines) for rank, lines in notes(tmp_path, 3).items()}
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            for rank in range(2 if step < grown else 3):
                seen += taken[rank][step]
        assert len(seen) == len(set(seen)) == per_epoch * 33


def record_exists(run_dir: Path, workers: int) -> bool:
    """Return whether the run continues with `workers` workers."""
    return (run_dir / "record.json").exists() and record_of(run_dir)["workers"] == workers


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_every_strategy_grows_back(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:  # fmt: skip
    """Every strategy goes from three workers to two and back; `make test-all` does so with `ring`, above."""
    run_dir = tmp_path / "run"
    features = STRATEGIES[strategy].features
    servers = 1 if features.servers else 0
    line = [*SHORT, "--model", "emulated:lenet:0.05s", "--strategy", strategy, "--ranks", f"{3 + servers}"]
    line += ["--data", shards, "--epochs", "8"]
    line += ["--elastic", "--min-workers", "2", "--checkpoint-every", "1h", "--stall-timeout", "20s"]
    line += ["--inject", "kill:rank=2@step=2,kill:rank=2@step=2"]
    line += ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"] if features.optimizers else []
    line += [] if features.mpi else ["--allow-grpc"]
    if not features.keras_optimizer or not features.deterministic:
        line.remove("--deterministic")

    def ask(folder: Path) -> None:
        asked = session_hpcdl(["jobs", "grow", folder])
        assert asked.code == 0, asked.err

    def smaller() -> bool:
        return record_exists(run_dir, 2) and steps_done(run_dir) > 5

    finished = grows(session_hpcdl, run_dir, line, smaller, ask=ask)
    assert finished.code == 0, finished.err
    assert "more workers were asked for; 3 workers in place of 2" in finished.err
    record = record_of(run_dir)
    assert (record["status"], record["workers"], record["servers"]) == ("finished", 3, servers)
    assert record["resumed_from_steps"][-1] > 5


@pytest.mark.lab
@pytest.mark.soak
def test_a_run_that_shrank_in_place_grows_back(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """A run that shrank in place grows back; `make test-all` has one that shrank with new ranks, above."""
    run_dir = tmp_path / "run"
    line = [*SHORT, "--model", "emulated:lenet:0.05s", "--data", shards, "--ranks", "3", "--epochs", "8"]
    line += ["--checkpoint-every", "1h", "--elastic", "--min-workers", "2", "--inject", "kill:rank=0@step=20"]
    finished = grows(session_hpcdl, run_dir, line, lambda: bool(recoveries(run_dir)), library(open_mpi_5))
    assert finished.code == 0, finished.err
    assert "more workers were asked for; 3 workers in place of 2" in finished.err
    record = record_of(run_dir)
    assert (record["status"], record["workers"], record["ranks"]) == ("finished", 3, 3)
    assert len(record["resumed_from_steps"]) == 2 and len(record["history"]) == 8


def test_what_is_lost_while_ranks_make_room_is_a_loss(run: Callable[..., Starts], tmp_path: Path) -> None:
    """A loss while ranks make room is handled as a loss; the request remains, and the next launch reads it."""

    def lost_instead(folder: Path) -> None:
        (folder / REQUEST).touch()
        wait_for(lambda: (folder / LEAVE).exists(), 20)
        raise lost(rank=1)

    twice = [ends_with(lost(rank=2))] * 2
    starts = run(config(**{"min-workers": 2}), [*twice, lost_instead, makes_room])
    assert [now.run.ranks for now, _ in starts] == [4, 4, 3, 3, 4]
    assert not (tmp_path / "ranks" / REQUEST).exists() and not (tmp_path / "ranks" / LEAVE).exists()
