"""A run continues in place with the remaining ranks: which runs can, and what happens to their steps and samples."""

from __future__ import annotations

import functools
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdl.cluster.launchers import hostfile, single
from hpcdl.cluster.launchers.base import Casualty
from hpcdl.cluster.launchers.hostfile import LAUNCHER as HOSTFILE
from hpcdl.cluster.launchers.mpiexec import Mpiexec
from hpcdl.cluster.launchers.single import LAUNCHER as LOCAL
from hpcdl.cluster.launchers.slurm import LAUNCHER as SLURM
from hpcdl.cluster.status import RankStatus, StatusReport, failed_of, raise_for, read_statuses
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.mpi.communicator import MpiCommunicator
from hpcdl.comm.observed import RankMonitor
from hpcdl.config.load import Layer, ResolvedConfig, load
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import BrokenGroup, RankError, carried, original
from hpcdl.core.protocols import LaunchPlan
from hpcdl.rank.shrink import Recovery, SurvivorState
from hpcdl.run import shrink as in_place
from hpcdl.run.plan import prepare
from hpcdl.run.shrink import describe_change, shrunk_of, way_of
from hpcdl.strategies.elastic.methods import METHODS
from hpcdl.strategies.table import STRATEGIES
from hpcdl.supervision.regroup import surviving_ranks, surviving_roles
from hpcdl.supervision.watchdog import Actions, Watchdog
from tests.conftest import CommandLine, finish
from tests.training_runs import (
    NOTED,
    SHORT,
    events,
    kill_rank,
    model_weights,
    record_of,
    start,
    steps_done,
    wait_for,
)


def config(**flags: object) -> ResolvedConfig[TrainConfig]:
    fixed = {"model": "lenet", "data": "synthetic:mnist", "ranks": 4, "batch-size": 16, "elastic": True}
    # As a file's: a flag that synthetic data do not take (--stage) would be refused.
    return load(TrainConfig, [Layer(origin="file (test)", values={**fixed, "min-workers": 2, **flags})])


def mpi(monkeypatch: pytest.MonkeyPatch, flavour: str = "openmpi", version: str = "5.0.11") -> None:
    found = Mpiexec(path=Path("mpiexec"), flavour=flavour, library=Path("libmpi.so"), version=version)
    monkeypatch.setattr(in_place, "find_mpiexec", lambda: found)


IN_PLACE = [name for name, info in STRATEGIES.items() if info.features.in_place]
SERVED = [name for name, method in METHODS.items() if not method.lock_free]
"""Methods whose servers hold the center."""
PERIODIC = ["local-sgd", "slowmo", "diloco"]
"""Methods whose workers exchange all weights at once, every few steps."""


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_strategies_whose_state_no_rank_knows_alone_continue_in_place(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi(monkeypatch)
    continues, reported = way_of(prepare(config(strategy=strategy, **{"allow-grpc": True})), LOCAL)
    able = {*COLLECTIVES, "ps", "sync-easgd", *SERVED, *PERIODIC}
    assert continues == (strategy in IN_PLACE) == (strategy in able)
    assert ("in place (ULFM), down to 2 workers" if continues else f"{strategy} cannot continue in place") in reported


@pytest.mark.parametrize(
    ("flags", "launcher", "library", "why"),
    [
        ({"min-workers": None}, LOCAL, ("openmpi", "5.0.11"), "--min-workers N says how few may continue"),
        ({"min-workers": 4}, LOCAL, ("openmpi", "5.0.11"), "no worker may be missing"),
        ({"stage": "/tmp"}, LOCAL, ("openmpi", "5.0.11"), "--stage shares the data out"),
        ({"evict-slow": 2.0}, LOCAL, ("openmpi", "5.0.11"), "--evict-slow starts ranks again"),
        (
            {"local-checkpoint-every": 5, "local-checkpoint-redundancy": "xor"},
            SLURM,
            ("openmpi", "5.0.11"),
            "keeps parity over all nodes",
        ),
        ({"strategy": "ps", "ranks": 6, "backup-workers": 1}, LOCAL, ("openmpi", "5.0.11"), "--backup-workers lets"),
        ({"strategy": "sync-easgd", "variant": "1"}, LOCAL, ("openmpi", "5.0.11"), "--variant 1 keeps the center on"),
        ({"strategy": "sync-easgd", "period": 4}, LOCAL, ("openmpi", "5.0.11"), "--period 4 has workers take several"),
        ({"strategy": "easgd", "period": 4}, LOCAL, ("openmpi", "5.0.11"), "--period 4 has workers take several"),
        ({"strategy": "diloco", "period": "auto"}, LOCAL, ("openmpi", "5.0.11"), "--period auto is found by all"),
        (
            {"strategy": "diloco", "period-within": 2, "period-between": 8},
            LOCAL,
            ("openmpi", "5.0.11"),
            "--period-within 2 goes by the workers of a node",
        ),
        ({"strategy": "hogwild-easgd"}, LOCAL, ("openmpi", "5.0.11"), "hogwild-easgd cannot continue in place"),
        ({}, SLURM, ("openmpi", "5.0.11"), "the launcher slurm ends all ranks"),
        ({}, HOSTFILE, ("mpich", "5.0.2"), "mpich 5.0.2 has no ULFM"),
        ({}, LOCAL, ("openmpi", "4.1.6"), "openmpi 4.1.6 has no ULFM"),
        ({}, LOCAL, ("mpich", "5.0.2"), "mpich 5.0.2 has no ULFM"),
    ],
)
def test_where_it_cannot_new_ranks_continue_and_the_start_says_why(
    flags: dict[str, Any], launcher: Any, library: tuple[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi(monkeypatch, *library)
    continues, reported = way_of(prepare(config(**flags)), launcher)
    assert not continues and reported.startswith("where a rank is lost, all are started again") and why in reported


def test_workers_that_do_not_step_together_may_exchange_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi(monkeypatch)
    assert way_of(prepare(config(strategy="async-easgd", period=4)), LOCAL)[0]


def test_the_launcher_gets_the_option_that_ranks_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Mpiexec(path=Path("mpiexec"), flavour="openmpi", library=Path("libmpi.so"), version="5.0.11")
    monkeypatch.setattr(single, "find_mpiexec", lambda: found)
    for continues, words in ((True, ["--with-ft", "ulfm"]), (False, [])):
        plan = LaunchPlan(num_ranks=3, ranks_per_node=3, continues=continues)
        assert LOCAL.line(plan, ["rank"], mpi=True, environment={})[0] == ["mpiexec", *words, "-n", "3", "rank"]


def test_mpiexec_over_hosts_gets_the_option_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Mpiexec(path=Path("mpiexec"), flavour="openmpi", library=Path("libmpi.so"), version="5.0.11")
    monkeypatch.setattr(hostfile, "find_mpiexec", lambda: found)
    (tmp_path / "hosts").write_text("a\nb\n")
    for continues, words in ((True, ["--with-ft", "ulfm"]), (False, [])):
        plan = LaunchPlan(num_ranks=2, ranks_per_node=1, continues=continues)
        line, _ = HOSTFILE.line(plan, ["rank"], mpi=True, environment={"HPCDL_HOSTFILE": str(tmp_path / "hosts")})
        assert line[: 1 + len(words)] == ["mpiexec", *words]


def test_what_the_launcher_says_of_ranks_that_the_others_did_without_counts_for_nothing(tmp_path: Path) -> None:
    states = ["done", "left behind", "done"]
    statuses = [RankStatus(rank=rank, host=f"n{rank}", pid=1, state=state) for rank, state in enumerate(states)]
    raise_for(statuses, 3, casualty=Casualty(lost_host="n1"), log=tmp_path)
    with pytest.raises(RankError, match="n1 with rank 1 went down"):
        raise_for(
            [*statuses[:2], RankStatus(rank=2, host="n2", pid=1, state="running")],
            3,
            casualty=Casualty(lost_host="n1"),
            log=tmp_path,
        )


def test_fewer_ranks_have_the_settings_of_a_run_that_is_resumed_on_them() -> None:
    shrunk = shrunk_of(config(inject="kill:rank=3@step=5")).on(3).on(2)
    config_now = shrunk.resolved.config
    assert (config_now.run.ranks, config_now.data.keep_batch, shrunk.least) == (2, 64, 2)
    assert config_now.checkpoint.resume and not config_now.safety.inject
    assert shrunk.run_plan().global_batch == 64


def test_those_that_are_left_keep_their_roles() -> None:
    """In place every rank keeps its role; new ranks are workers and servers in the proportion of the start."""
    before = shrunk_of(config(strategy="ps", ranks=8, servers=4))
    for ranks, servers in ((7, 3), (6, 4), (5, 1)):
        now = before.on(ranks, servers)
        assert (now.resolved.config.run.ranks, now.resolved.config.exchange.servers) == (ranks, servers)
        assert now.run_plan().num_workers == ranks - servers and now.run_plan().global_batch == 64
    assert describe_change(before.resolved, before.on(7, 3).resolved).startswith(
        "4 workers and 3 servers in place of 4 and 4, 64 samples"
    )
    assert describe_change(before.resolved, before.on(6, 4).resolved).startswith("2 workers in place of 4, 64 samples")


def test_a_rank_that_was_left_behind_alive_cannot_be_shrunk_away(tmp_path: Path) -> None:
    """A silent worker whose process still exists prevents shrinking: the smaller group would wait for it."""
    monitor = RankMonitor(0, 3, "a")
    watch = Watchdog(monitor=monitor, folder=tmp_path, actions=Actions(end=lambda error: None))
    monitor.lost = frozenset({2})
    left = SimpleNamespace(lane=SimpleNamespace(members=(0,)))
    dead = {1}
    played: Any = SimpleNamespace(
        monitor=monitor, size=3, revoke=lambda: None, survivors=lambda: left, dead=lambda: dead
    )
    with pytest.raises(RankError, match="rank 2 was left behind alive") as caught:
        surviving_ranks(played, watch)
    assert caught.value.lost
    dead.add(2)
    assert surviving_ranks(played, watch) == (left, {1: "a host unknown yet"})


def left_of(lost: dict[int, str], size: int) -> Any:
    """Return the group that remains of a world without `lost`."""
    members = tuple(rank for rank in range(size) if rank not in lost)
    seen = SimpleNamespace(lost=frozenset(lost))
    return SimpleNamespace(lane=SimpleNamespace(members=members), size=len(members), monitor=seen)


def test_too_few_workers_and_no_server_end_the_launch() -> None:
    assert surviving_roles(left_of({1: "a", 4: "b"}, 6), 4, 2, {1: "a"}) == (3, 1)
    assert surviving_roles(left_of({1: "a"}, 4), 4, 2, {1: "a"}) == (3, 0)
    with pytest.raises(RankError, match="rank 0 on a and rank 1 on a were lost: 2 workers are left, --min"):
        surviving_roles(left_of({0: "a", 1: "a"}, 6), 4, 3, {0: "a", 1: "a"})
    with pytest.raises(RankError, match="rank 5 on b was lost: no server is left") as caught:
        surviving_roles(left_of({4: "b", 5: "b"}, 6), 4, 2, {5: "b"})
    assert caught.value.lost


def test_a_rank_that_has_failed_ends_the_run_and_is_not_lost_to_it(tmp_path: Path) -> None:
    """A failed rank ends the run and keeps its message, although Open MPI ends the other ranks only later."""
    StatusReport(folder=tmp_path, rank=2).publish("failed", message="no luck")
    monitor = RankMonitor(0, 3, "a")
    actions = Actions(end=lambda error: None, failed=lambda ranks: failed_of(tmp_path, ranks))
    watch = Watchdog(monitor=monitor, folder=tmp_path / "watch", actions=actions, hosts={1: "b", 2: "c"})
    for members, expected in ((frozenset({0, 2}), {1: "b"}), (frozenset({0}), None)):
        left = SimpleNamespace(lane=SimpleNamespace(members=members))
        played: Any = SimpleNamespace(
            monitor=monitor, size=3, revoke=lambda: None, survivors=lambda left=left: left, dead=lambda: {1, 2}
        )
        if expected is not None:
            assert surviving_ranks(played, watch) == (left, expected)
            continue
        with pytest.raises(RankError, match="rank 2 on c has failed"):
            surviving_ranks(played, watch)
    (status,) = read_statuses(tmp_path)
    assert (status.state, status.message) == ("failed", "no luck")


@pytest.mark.parametrize(
    ("step", "evaluated", "owes"),
    [(0, [], False), (9, [], False), (10, [], True), (10, [10], False), (25, [10, 20], True)],
)
def test_an_epoch_without_evaluation_is_evaluated_later(step: int, evaluated: list[int], owes: bool) -> None:
    facts = {"steps_per_epoch": 10, "num_steps": 25, "history": [{"step": at} for at in evaluated]}
    standing = SurvivorState(leader=0, step=step, facts=facts, saved=None, seconds_to_target=None, apart=False)
    assert standing.owes_epoch_end == owes


def test_messages_of_a_recovery_name_the_lost_ranks_and_each_part() -> None:
    recovery = Recovery(began_s=0.0, lost={2: "b", 1: "a"}, continues="2 workers in place of 4", step=7)
    recovery.seconds = {"detect": 0.25, "shrink": 0.5}
    heard: list[dict[str, Any]] = []

    class Kept:
        def write(self, kind: str, **values: Any) -> None:
            heard.append({"kind": kind, **values})

    recovery.log_to(Kept())  # type: ignore[arg-type]
    (event,) = heard
    assert event["text"] == (
        "rank 1 on a and rank 2 on b were lost; 2 workers in place of 4; in place, after step 7, in 0.75 s "
        "(detect 0.25, shrink 0.50)"
    )
    assert event["recovery"] == {"lost": [1, 2], "step": 7, "seconds": {"detect": 0.25, "shrink": 0.5}}


def test_a_broken_group_comes_through_a_graph_as_itself() -> None:
    def fail() -> None:
        raise BrokenGroup("rank 1 on a: MPI failed in wait: revoked", rank=1, host="a")

    with pytest.raises(Exception, match="revoked") as caught:
        carried(fail)()
    found = original(caught.value)
    assert isinstance(found, BrokenGroup) and isinstance(found, RankError) and found.rank == 1


def played_group(made: list[str]) -> SimpleNamespace:
    """Return a simulated MPI group that does not yet know of a dead rank; `made` records what is done to it."""
    revoked: list[bool] = []

    def revoke() -> None:
        made.append("revoked")
        revoked.append(True)

    def shrink() -> SimpleNamespace:
        made.append("shrunk")
        return played_group(made)

    return SimpleNamespace(
        Get_rank=lambda: 0,
        Get_size=lambda: 3,
        Is_revoked=lambda: bool(revoked),
        Revoke=revoke,
        Dup=lambda: played_group(made),
        Shrink=shrink,
    )


def test_a_rank_that_does_not_know_of_the_dead_yet_shrinks_the_group_with_the_others() -> None:
    """Each group of the family is revoked once, and already revoked groups are left alone."""
    made: list[str] = []
    played = SimpleNamespace(Exception=OSError, get_vendor=lambda: ("played", (5, 0)))
    group = MpiCommunicator(played, played_group(made))
    group.duplicate()
    group.revoke()
    left = group.survivors()
    left.duplicate()
    assert made == ["revoked", "revoked", "shrunk"]
    group.revoke()
    assert made[3:] == ["revoked", "revoked"]


def test_a_barrier_over_a_group_in_which_a_rank_died_meanwhile_does_not_return_well() -> None:
    """A barrier fails if a rank died before its end; Open MPI's own succeeds if that rank had already reached it."""
    died: list[int] = []
    handle = SimpleNamespace(
        Get_rank=lambda: 0,
        Get_size=lambda: 2,
        Barrier=lambda: None,
        Get_group=lambda: None,
        Get_failed=lambda: SimpleNamespace(Translate_ranks=lambda ranks, group: died),
    )
    group = MpiCommunicator(SimpleNamespace(Exception=OSError, get_vendor=lambda: ("played", (5, 0))), handle)
    group.barrier()
    died.append(1)
    with pytest.raises(BrokenGroup, match="a barrier has lost 1 of 2 ranks"):
        group.barrier()


def library(prefix: Path) -> dict[str, str]:
    """Return the environment of a run under this Open MPI."""
    return {"MPI4PY_LIBMPI": str(prefix / "lib" / "libmpi.so.40")}


def recoveries(run_dir: Path) -> list[dict[str, Any]]:
    """Return each recovery in the journal."""
    return [event["recovery"] for event in events(run_dir, "message") if "recovery" in event]


FOUR = [*SHORT, "--ranks", "4", "--keep-batch", "36", "--epochs", "2"]
FOUR += ["--elastic", "--min-workers", "2", "--checkpoint-every", "1h"]


BY_STRATEGY = {"ring": FOUR, "ps": [*FOUR, "--strategy", "ps", "--servers", "2", "--ranks", "6"]}


@pytest.fixture(scope="module")
def whole(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Runs of four workers without losses, by strategy."""

    @functools.cache
    def trained(strategy: str) -> Path:
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        line = [*BY_STRATEGY[strategy], "--data", shards, "--run-dir", run_dir]
        finished = session_hpcdl(line, env=library(open_mpi_5), timeout_s=300)
        assert finished.code == 0, finished.err
        assert not recoveries(run_dir)
        return run_dir

    return trained


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("strategy", "victims"),
    [
        ("ring", (0, 2)),
        *(
            pytest.param(*one, marks=pytest.mark.soak)
            for one in (("ps", (0, 5)), ("ring", (1,)), ("ring", (0,)), ("ps", (1,)), ("ps", (4,)))
        ),
    ],
    ids=str,
)
def test_the_run_that_loses_ranks_has_the_weights_of_the_undisturbed_one(
    open_mpi_5: Path,
    session_hpcdl: CommandLine,
    shards: Path,
    whole: Callable[[str], Path],
    tmp_path: Path,
    strategy: str,
    victims: tuple[int, ...],
) -> None:
    """Weights after a loss equal the undisturbed run's, within the rounding of sums over fewer workers.

    Two ranks are lost at once: rank 0 and another one, with ps a server.
    """
    faults = ",".join(f"kill:rank={rank}@step=30" for rank in victims)
    line = [*BY_STRATEGY[strategy], "--data", shards, "--inject", faults, "--run-dir", tmp_path / "struck"]
    finished = session_hpcdl(line, env=library(open_mpi_5), timeout_s=300)
    assert finished.code == 0, finished.err
    reported = recoveries(tmp_path / "struck")
    assert sorted(rank for one in reported for rank in one["lost"]) == sorted(victims)
    assert all(set(one["seconds"]) == {"detect", "shrink", "state", "trace"} for one in reported)
    record, left = record_of(tmp_path / "struck"), 4 - sum(victim < 4 for victim in victims)
    left_in_all = (6 if strategy == "ps" else 4) - len(victims)
    assert (record["status"], record["workers"], record["ranks"]) == ("finished", left, left_in_all)
    assert [row["role"] for row in record["rank_records"]] == ["worker"] * left + ["server"] * (left_in_all - left)
    assert record["resumed_from_steps"] == [one["step"] for one in reported]
    for mine, other in zip(model_weights(tmp_path / "struck"), model_weights(whole(strategy)), strict=True):
        assert abs(mine - other).max() <= 1e-5 * abs(other).max() + 1e-7
    states = {status.rank: status.state for status in read_statuses(tmp_path / "struck" / "ranks")}
    assert {rank for rank, state in states.items() if state == "left behind"} == set(victims)


@pytest.mark.lab
@pytest.mark.mpi
def test_every_sample_of_an_epoch_comes_once(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Each sample is taken once per epoch; the interrupted step is counted once, as its survivors took it."""
    run_dir, env = tmp_path / "run", {"RECORD_DIR": str(tmp_path), "STEP_S": "0.02", **library(open_mpi_5)}
    line = [*NOTED, "--epochs", "2", "--data", shards, "--run-dir", run_dir, "--ranks", "3", "--batch-size", "17"]
    line += ["--keep-batch", "33", "--elastic", "--min-workers", "2", "--inject", "kill:rank=1@step=20"]
    finished = session_hpcdl(line, env=env, timeout_s=300)
    assert finished.code == 0, finished.err
    (recovery,) = recoveries(run_dir)
    noted: dict[tuple[int, int], list[int]] = {}
    for rank in range(3):
        for text in (tmp_path / f"rank-{rank}.jsonl").read_text().split("\n"):
            if text.endswith("}"):
                taken = json.loads(text)
                noted[rank, taken["step"]] = taken["images"]
    per_epoch = record_of(run_dir)["num_samples"] // 33
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            for rank in range(3) if step < recovery["step"] else (0, 2):
                seen += noted[rank, step]
        assert len(seen) == len(set(seen)) == 33 * per_epoch
    assert max(step for _, step in noted) == 2 * per_epoch - 1


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("moment", ["evaluation", "last step", "checkpoint"])
def test_ranks_may_be_lost_between_steps(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path, moment: str
) -> None:
    """Ranks may be lost during a checkpoint after a step, in the last step, and during evaluation."""
    run_dir = tmp_path / "run"
    line = [*SHORT, "--data", shards, "--ranks", "3", "--batch-size", "16", "--run-dir", run_dir, "--elastic"]
    line += ["--min-workers", "2", "--steps", "58"]  # two epochs
    line += ["--checkpoint-every", "0.001s" if moment == "checkpoint" else "1h"]
    step = {"evaluation": 29, "last step": 57, "checkpoint": 20}[moment]
    line += ["--inject", f"kill:rank=1@step={step}"]
    finished = session_hpcdl(line, env=library(open_mpi_5), timeout_s=300)
    assert finished.code == 0, finished.err
    record = record_of(run_dir)
    assert record["steps"] == 58 and [point["step"] for point in record["history"]] == [29, 58]
    assert record["workers"] == 2 or not recoveries(run_dir)


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.soak
def test_below_the_least_number_of_workers_new_ranks_continue(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Below --min-workers new ranks start. `make test-all` has two losses with enough workers left, above.

    It also has new ranks if none can continue in place.
    """
    run_dir = tmp_path / "run"
    line = [*SHORT, "--data", shards, "--ranks", "3", "--run-dir", run_dir, "--elastic", "--min-workers", "2"]
    line += ["--epochs", "2", "--checkpoint-every", "0.001s", "--inject", "kill:rank=0@step=40,kill:rank=2@step=40"]
    finished = session_hpcdl(line, env=library(open_mpi_5), timeout_s=300)
    assert finished.code == 0, finished.err
    assert "; new ranks continue after step " in finished.err
    record = record_of(run_dir)
    assert (record["status"], record["workers"]) == ("finished", 3) and record["resumed_from_steps"]


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.soak
def test_a_rank_lost_while_the_group_is_mended_leaves_a_run_that_continues(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """A rank lost during a recovery leaves a run that continues, in place or with new ranks, depending on the moment.

    `make test-all` loses two ranks at once, above.
    """
    run_dir = tmp_path / "run"
    line = [*SHORT, "--data", shards, "--ranks", "4", "--run-dir", run_dir, "--elastic", "--min-workers", "1"]
    line += ["--epochs", "6", "--checkpoint-every", "1s"]
    job = start(session_hpcdl, line, env=library(open_mpi_5))
    wait_for(lambda: steps_done(run_dir) > 5)
    kill_rank(run_dir, 3)
    wait_for(lambda: any(status.state == "left behind" for status in read_statuses(run_dir / "ranks")))
    kill_rank(run_dir, 1)
    finished = finish(job, 300)
    assert finished.code == 0, finished.err
    record = record_of(run_dir)
    assert record["status"] == "finished" and len(record["history"]) == 6
    assert recoveries(run_dir) or "new ranks continue" in finished.err


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", [name for name in IN_PLACE if name not in ("ring", "ps", *SERVED)])
def test_every_other_strategy_continues_in_place_too(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    run_dir = tmp_path / "run"
    line = [*SHORT, "--strategy", strategy, "--data", shards, "--ranks", "3", "--run-dir", run_dir, "--epochs", "2"]
    line += ["--optimizer", (STRATEGIES[strategy].features.optimizers or ["momentum"])[0]]
    line += ["--elastic", "--min-workers", "2", "--checkpoint-every", "1h", "--inject", "kill:rank=0@step=20"]
    finished = session_hpcdl(line, env=library(open_mpi_5), timeout_s=300)
    assert finished.code == 0, finished.err
    assert [one["lost"] for one in recoveries(run_dir)] == [[0]] and record_of(run_dir)["workers"] == 2


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("strategy", "period", "seed"),
    [
        ("diloco", 7, 0),
        pytest.param("local-sgd", 2, 1, marks=pytest.mark.soak),
        *(
            pytest.param(strategy, period, seed, marks=pytest.mark.soak)
            for seed, (strategy, period) in enumerate(
                [("local-sgd", 8), ("local-sgd", 3), ("slowmo", 5), ("slowmo", 12), ("diloco", 4), ("diloco", 50)] * 3
            )
        ),
    ],
)
def test_a_worker_that_is_killed_between_exchanges_costs_no_other_a_step(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str, period: int, seed: int
) -> None:
    """Survivors may be some steps apart; at the end each has taken every step once, whatever its number."""
    drawn, run_dir = random.Random(f"{strategy} {period} {seed}"), tmp_path / "run"
    line = [*NOTED, "--strategy", strategy, "--period", period, "--epochs", "3", "--data", shards, "--ranks", "4"]
    line += ["--run-dir", run_dir, "--elastic", "--min-workers", "2", "--checkpoint-every", "1h"]
    line += ["--inject", "slow:rank=2:x1.5"]
    job = start(session_hpcdl, line, env={"RECORD_DIR": str(tmp_path), "STEP_S": "0.02", **library(open_mpi_5)})
    killed, moment, later_s = drawn.randrange(4), drawn.randrange(3, 50), drawn.uniform(0, 0.3)
    wait_for(lambda: steps_done(run_dir) >= moment)
    time.sleep(later_s)
    kill_rank(run_dir, killed)
    finished = finish(job, 300)
    assert finished.code == 0, finished.err
    (recovery,) = recoveries(run_dir)
    assert recovery["lost"] == [killed] and set(recovery["seconds"]) == {"detect", "shrink", "state", "trace"}
    taken = {}
    for rank in {*range(4)} - {killed}:
        lines = (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()
        taken[rank] = [json.loads(line)["step"] for line in lines if line]
        assert taken[rank] == [*range(len(taken[rank]))], (rank, recovery, taken[rank])
    assert len({len(steps) for steps in taken.values()}) == 1
    record = record_of(run_dir)
    assert (record["status"], record["workers"]) == ("finished", 3)
    first, *_, last = record["history"]
    assert last["val_loss"] < first["val_loss"] and last["epoch"] == 3


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.parametrize("variant", ["3", pytest.param("2", marks=pytest.mark.soak)])
def test_replicas_and_their_center_outlive_two_failures(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path, variant: str
) -> None:
    """Losses in an exchange and in the next one keep what was learned before."""
    run_dir = tmp_path / "run"
    line = [*SHORT, "--strategy", "sync-easgd", "--variant", variant, "--optimizer", "sgd", "--learning-rate", "0.05"]
    line += ["--data", shards, "--ranks", "4", "--run-dir", run_dir, "--epochs", "6", "--elastic", "--min-workers", "2"]
    line += ["--checkpoint-every", "1h", "--inject", "kill:rank=0@step=30,kill:rank=2@step=40"]
    finished = session_hpcdl(line, env=library(open_mpi_5), timeout_s=300)
    assert finished.code == 0, finished.err
    assert [one["lost"] for one in recoveries(run_dir)] == [[0], [2]]
    record = record_of(run_dir)
    assert (record["status"], record["workers"]) == ("finished", 2)
    first, *_, last = record["history"]
    assert last["val_loss"] < first["val_loss"] / 3 and last["val_accuracy"] > 0.93, record["history"]


CENTERED = [*SHORT, "--batch-size", "16", "--ranks", "5", "--servers", "2", "--epochs", "6"]
CENTERED += ["--elastic", "--min-workers", "2", "--checkpoint-every", "1h"]
RATES = {"async-sgd": "0.02", "async-msgd": "0.002", "async-measgd": "0.005"}
"""Learning rates of the methods that do not converge with 0.05."""


def trained_with_loss(hpcdl: CommandLine, prefix: Path, data: Path, run_dir: Path, strategy: str, faults: str) -> Any:
    """Return the record of a run that lost workers or servers in place and still learned."""
    optimizer = STRATEGIES[strategy].features.optimizers[0]
    line = [*CENTERED, "--strategy", strategy, "--optimizer", optimizer, "--data", data, "--run-dir", run_dir]
    line += ["--learning-rate", RATES.get(strategy, "0.05"), "--inject", faults]
    finished = hpcdl(line, env=library(prefix), timeout_s=300)
    assert finished.code == 0, finished.err
    assert "new ranks continue" not in finished.err
    record = record_of(run_dir)
    assert record["status"] == "finished"
    first, *_, last = record["history"]
    assert last["val_loss"] < first["val_loss"] and last["val_accuracy"] > 0.9, record["history"]
    reported = [event["epoch"] for event in events(run_dir, "epoch")]
    assert [point["epoch"] for point in record["history"]] == reported == sorted(reported) and int(reported[-1]) == 6
    return record


@pytest.mark.lab
@pytest.mark.mpi
def test_a_center_outlives_worker_0_and_a_server_that_holds_half_of_it(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Worker 0 and then a server are lost: the next worker evaluates and writes, and the history is complete."""
    run_dir = tmp_path / "run"
    faults = "kill:rank=0@step=40,kill:rank=4@step=200"  # of the run, whose 174 steps become 264 with two workers
    record = trained_with_loss(session_hpcdl, open_mpi_5, shards, run_dir, "async-easgd", faults)
    assert [one["lost"] for one in recoveries(run_dir)] == [[0], [4]]
    assert all(set(one["seconds"]) == {"detect", "shrink", "state", "trace"} for one in recoveries(run_dir))
    assert (record["workers"], record["servers"], record["ranks"]) == (2, 1, 3)
    assert [row["role"] for row in record["rank_records"]] == ["worker", "worker", "server"]
    assert record["resumed_from_steps"] == [one["step"] for one in recoveries(run_dir)]
    reported = [event["text"] for event in events(run_dir, "message") if "recovery" in event]
    assert "weights of the center were on a lost server" not in reported[0]
    assert "215540 of 431080 weights of the center were on a lost server: a worker's copy after update" in reported[1]
    states = {status.rank: status.state for status in read_statuses(run_dir / "ranks")}
    assert {rank for rank, state in states.items() if state == "left behind"} == {0, 4}


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("strategy", SERVED)
def test_every_method_with_servers_continues_without_a_worker_or_a_server(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str, victim: int
) -> None:
    """Every method with servers survives a lost worker or server; `make test-all` shows it for `async-easgd`, above."""
    run_dir = tmp_path / "run"
    faults = f"kill:rank={victim}@step=30"
    record = trained_with_loss(session_hpcdl, open_mpi_5, shards, run_dir, strategy, faults)
    assert [one["lost"] for one in recoveries(run_dir)] == [[victim]]
    assert (record["workers"], record["servers"]) == ((3, 1) if victim == 3 else (2, 2))


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.soak
def test_without_its_last_server_new_ranks_continue(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Without its last server a run continues with new ranks; `make test-all` checks `roles_left`, above."""
    run_dir = tmp_path / "run"
    line = [*CENTERED, "--strategy", "async-sgd", "--optimizer", "sgd", "--servers", "1", "--data", shards]
    line += ["--checkpoint-every", "0.001s", "--run-dir", run_dir, "--inject", "kill:rank=4@step=40"]
    finished = session_hpcdl(line, env=library(open_mpi_5), timeout_s=300)
    assert finished.code == 0, finished.err
    assert "; new ranks continue after step " in finished.err and not recoveries(run_dir)


@pytest.mark.lab
@pytest.mark.mpi
def test_the_only_rank_left_is_missed_when_it_is_stopped(
    open_mpi_5: Path, session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    """A stopped last rank is noticed by the process that started it, and new ranks continue."""
    run_dir = tmp_path / "run"
    line = ["train", "--model", "lenet", "--data", "synthetic:mnist@200", "--ranks", "2", "--strategy", "ring"]
    line += ["--steps", "600", "--profile", "none", "--elastic", "--min-workers", "1", "--checkpoint-every", "1s"]
    line += ["--stall-timeout", "6s", "--inject", "kill:rank=1@step=3", "--run-dir", str(run_dir)]
    process = start(session_hpcdl, line, env=library(open_mpi_5))
    wait_for(lambda: bool(recoveries(run_dir)) or process.poll() is not None)
    kill_rank(run_dir, 0, signal.SIGSTOP)
    finished = finish(process)
    assert finished.code == 0, finished.err
    assert "rank 0 on " in finished.err and "the only one left, is not responding" in finished.err
    assert record_of(run_dir)["status"] == "finished"
