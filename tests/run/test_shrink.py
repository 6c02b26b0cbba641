"""A run continues with fewer workers, `--min-workers`: on which nodes, with which settings, on which samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.cluster.launchers.base import LEFT_OUT_VARIABLE, Launcher, remaining
from hpcdl.cluster.launchers.ibrun import LAUNCHER as IBRUN
from hpcdl.cluster.launchers.single import LAUNCHER as LOCAL
from hpcdl.config.load import ResolvedConfig, flag_layer, load
from hpcdl.config.schema import ScriptConfig, TrainConfig
from hpcdl.core.errors import RankError, StoppedEarly, UsageError
from hpcdl.launch.relaunch import TRIES, until_done
from hpcdl.run.shrink import check_shrunk, num_workers, shrink_config
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine
from tests.training_runs import NOTED, SHORT, events, model_weights, record_of


def config(**flags: object) -> ResolvedConfig[TrainConfig]:
    fixed = {"model": "lenet", "data": "synthetic:mnist", "ranks": 4, "batch-size": 16, "elastic": True}
    return load(TrainConfig, [flag_layer({**fixed, **flags})])


class Nodes:
    """A launcher over simulated nodes."""

    name, leaves_nodes_out, continues, leaves_others = "played", True, False, False

    def __init__(self, *hosts: str) -> None:
        self._hosts = hosts
        self.down: set[str] = set()

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        return remaining(self._hosts, environment)

    def lost_hosts(self, environment: Mapping[str, str]) -> set[str]:
        return self.down

    def answering(self, left_out: Sequence[str], environment: Mapping[str, str]) -> set[str]:
        return {*left_out} - self.down


Starts = list[tuple[Any, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Starts]:
    """A function that runs with each of `ends` in turn, then successfully, and returns the settings of each start."""
    (tmp_path / "ranks").mkdir()

    def go(resolved: ResolvedConfig[Any], ends: list[Exception], nodes: Any = LOCAL, step: int = 7) -> Starts:
        starts: Starts = []
        if step:
            (tmp_path / "checkpoints" / f"step-{step:010d}").mkdir(parents=True, exist_ok=True)

        def launch(now: ResolvedConfig[Any], environment: Mapping[str, str]) -> None:
            starts.append((now.config, environment.get(LEFT_OUT_VARIABLE, "")))
            if len(starts) <= len(ends):
                raise ends[len(starts) - 1]

        until_done(launch, nodes, tmp_path, resolved, {}, lambda text: None)
        return starts

    return go


def lost(host: str = "", rank: int = 1, **more: Any) -> RankError:
    return RankError(f"rank {rank} on {host} ended", rank=rank, host=host, lost=True, **more)


def test_a_node_that_is_gone_is_left_out_and_the_others_continue_with_the_same_batch(
    run: Callable[..., Starts], tmp_path: Path
) -> None:
    resolved = config(**{"ranks": 8, "min-workers": 4, "steps": 100})
    starts = run(resolved, [lost("n2.site", node="n2.site"), lost("n4", node="n4")], Nodes("n1", "n2", "n3", "n4"))
    assert [left_out for _, left_out in starts] == ["", "n2", "n2,n4"]
    assert [now.run.ranks for now, _ in starts] == [8, 6, 4]
    assert starts[-1][0].data.keep_batch == 128 and starts[-1][0].run.steps == 100
    assert starts[-1][0].optimizer == resolved.config.optimizer
    reported = [event["text"] for event in events(tmp_path, "message")]
    assert reported[0].startswith(
        "node n2.site went down or cannot be reached; n2 is left out; 6 workers in place of 8, 128"
    )
    assert "keep-batch = 128" in (tmp_path / "run.toml").read_text()


def test_a_spare_node_takes_the_place_of_one_that_is_gone(run: Callable[..., Starts]) -> None:
    starts = run(config(ranks=3), [lost("n1", node="n1")], Nodes("n1", "n2", "n3", "n4", "n5", "n6"))
    assert [(now.run.ranks, left_out) for now, left_out in starts] == [(3, ""), (3, "n1")]
    assert starts[0][0] is starts[1][0], "nothing changes but the nodes"


def test_what_the_scheduler_knows_counts_also_where_no_rank_could_start(run: Callable[..., Starts]) -> None:
    nodes = Nodes("n1", "n2", "n3", "n4")
    nodes.down = {"n3"}
    starts = run(config(**{"min-workers": 2}), [RankError("4 of 4 ranks never started")], nodes)
    assert [(now.run.ranks, left_out) for now, left_out in starts] == [(4, ""), (3, "n3")]


def test_a_node_that_fails_twice_is_left_out_where_enough_are_left(run: Callable[..., Starts], tmp_path: Path) -> None:
    nodes = Nodes("n1", "n2", "n3", "n4")
    ends = [lost("n2"), lost("n3"), lost("n2")]
    starts = run(config(**{"min-workers": 3}), ends, nodes)
    assert [(now.run.ranks, left_out) for now, left_out in starts][-2:] == [(4, ""), (3, "n2")]
    assert "n2, on which ranks were lost twice, is left out" in events(tmp_path, "message")[-1]["text"]
    with pytest.raises(RankError, match=f"lost {TRIES} times after step 7"):
        run(config(), [lost("n2")] * TRIES, nodes)


def test_without_nodes_a_place_is_left_out_that_was_lost_twice_after_the_same_checkpoint(
    run: Callable[..., Starts],
) -> None:
    starts = run(config(**{"min-workers": 3}), [lost(rank=2), lost(rank=1), lost(rank=2)])
    assert [now.run.ranks for now, _ in starts] == [4, 4, 4, 3]


def test_ranks_continue_after_the_schedulers_notice_of_a_lost_node_unless_asked_to_stop(
    run: Callable[..., Starts],
) -> None:
    resolved, nodes = config(**{"min-workers": 3}), Nodes("n1", "n2", "n3", "n4")
    starts = run(resolved, [StoppedEarly("saved", node="n2")], nodes)
    assert [(now.run.ranks, left_out) for now, left_out in starts] == [(4, ""), (3, "n2")]
    with pytest.raises(StoppedEarly, match=r"^saved$"):
        run(resolved, [StoppedEarly("saved")], nodes)


def test_below_the_least_it_ends_with_what_is_saved(run: Callable[..., Starts], tmp_path: Path) -> None:
    resolved, nodes = config(**{"min-workers": 3}), Nodes("n1", "n2", "n3", "n4")
    ends = [lost(node=name) for name in ("n1", "n2")]
    with pytest.raises(RankError, match="2 workers are left, --min-workers is 3; nothing is saved yet"):
        run(resolved, ends, nodes, step=0)
    with pytest.raises(StoppedEarly, match=r"2 workers are left, --min-workers is 3; what is saved, up to step 7"):
        run(resolved, ends, nodes)
    with pytest.raises(StoppedEarly, match="3 workers are left, without --min-workers all 4 are needed"):
        run(config(), ends, nodes)


def test_faults_of_ranks_that_are_no_more_are_left_out_and_none_strikes_twice(
    run: Callable[..., Starts], tmp_path: Path
) -> None:
    faults = "kill:rank=3@step=9,kill:rank=0@step=3,kill:rank=1@step=20"
    (tmp_path / "ranks" / "injected-1").touch()
    starts = run(config(**{"min-workers": 2, "inject": faults}), [lost(node="n2")], Nodes("n1", "n2", "n3", "n4"))
    assert starts[-1][0].safety.inject == "kill:rank=0@step=3,kill:rank=1@step=20"
    assert [path.name for path in (tmp_path / "ranks").glob("injected-*")] == ["injected-0"]


def test_what_is_kept_is_the_users_choice() -> None:
    scaled = shrink_config(config(**{"on-fewer-workers": "scale-rate", "steps": 100}), 3).config
    assert (scaled.optimizer.base_batch, scaled.data.keep_batch, scaled.run.steps) == (64, None, 134)
    own = shrink_config(config(**{"strategy": "easgd", "ranks": 5, "epochs": 2}), 4).config
    assert own.data.keep_batch is None and own.optimizer.base_batch is None and own.run.steps is None
    script = load(ScriptConfig, [flag_layer({"ranks": 4, "elastic": True, "min-workers": 2})])
    assert shrink_config(script, 3).config.run.ranks == 3 and num_workers(script) == 4


def test_servers_become_fewer_in_proportion_and_chips_stay_whole() -> None:
    found = [shrink_config(config(strategy="ps", ranks=8, servers=2), ranks).config for ranks in (7, 4, 3)]
    assert [(one.run.ranks - one.exchange.servers, one.exchange.servers) for one in found] == [(6, 1), (3, 1), (2, 1)]
    assert shrink_config(config(strategy="ring", ranks=8, groups=4), 7).config.run.ranks == 4


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ({"elastic": False, "min-workers": 2}, "add --elastic"),
        ({"on-fewer-workers": "scale-rate"}, "says what --min-workers N keeps"),
        ({"min-workers": 5}, "this run has 4"),
        ({"min-workers": 2, "shuffle": "local"}, "other samples would come twice"),
        ({"min-workers": 2, "strategy": "easgd", "on-fewer-workers": "scale-rate"}, "keep batch and rate"),
        ({"min-workers": 1, "strategy": "sync-easgd"}, "--min-workers 1: --ranks 1: strategy 'sync-easgd'"),
        ({"min-workers": 1, "strategy": "ps", "backup-workers": 1}, "--min-workers 1: --backup-workers 1"),
    ],
)
def test_what_could_not_continue_is_refused_before_the_start(flags: dict[str, Any], reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        check_shrunk(config(**flags), LOCAL)


def test_every_strategy_continues_with_two_workers_or_is_refused() -> None:
    launcher: Launcher = IBRUN
    with pytest.raises(UsageError, match="the launcher ibrun takes all nodes of a job or none"):
        check_shrunk(config(**{"min-workers": 2}), launcher)
    for name in STRATEGIES:
        if name != "single":
            check_shrunk(config(**{"min-workers": 2, "strategy": name, "allow-grpc": True}), LOCAL)


def notes(folder: Path, ranks: int) -> dict[int, list[tuple[int, list[int]]]]:
    """Return (step, checksums of its images) by rank, in the order of their records."""
    found = {}
    for rank in range(ranks):
        lines = (folder / f"rank-{rank}.jsonl").read_text().split("\n")
        loaded = [json.loads(line) for line in lines if line.endswith("}")]
        found[rank] = [(line["step"], line["images"]) for line in loaded]
    return found


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("kept", ["keep-batch", "scale-rate"])
def test_every_sample_of_an_epoch_comes_once_whatever_the_number_of_workers(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, kept: str
) -> None:
    """Each sample is taken once per epoch: three workers stop in the first epoch, then one of them is lost, twice.

    The model counts the steps that its checkpoint has, one after another. `make test-all` has ranks that continue in
    place (test_in_place.py), and more ranks than before (test_grow.py).
    """
    run_dir, note = tmp_path / "run", {"RECORD_DIR": str(tmp_path), "STEP_S": "0.02"}
    share = ["--batch-size", "17", "--keep-batch", "33"] if kept == "keep-batch" else ["--batch-size", "11"]
    line = [*NOTED, "--data", shards, "--run-dir", run_dir, "--ranks", "3", *share, "--epochs", "2"]
    assert session_hpcdl([*line, "--time-limit", "0.3s"], env=note, timeout_s=300).code == 75
    before = notes(tmp_path, 3)
    done = 1 + max(step for step, _ in before[0])
    line += ["--resume", "--elastic", "--min-workers", "2", "--on-fewer-workers", kept, "--checkpoint-every", "1h"]
    faults = "kill:rank=2@step=1,kill:rank=2@step=1"
    finished = session_hpcdl([*line, "--time-limit", "none", "--inject", faults], env=note, timeout_s=400)
    assert finished.code == 0, finished.err
    assert "the place of rank 2, lost twice, is left out; 2 workers in place of 3" in finished.err
    record = record_of(run_dir)
    batch, samples = 33 if kept == "keep-batch" else 22, record["num_samples"]
    assert (record["workers"], record["global_batch"]) == (2, batch)
    after = {rank: dict(lines) for rank, lines in notes(tmp_path, 2).items()}  # of a step taken twice the last counts
    last = max(after[0])
    taken = [image for rank in range(3) for step, images in before[rank] if step < done for image in images]
    ends = done + (samples - 33 * done) // batch
    taken += [image for step in range(done, ends) for rank in range(2) for image in after[rank][step]]
    assert len(taken) == len(set(taken)) and samples - len(taken) < batch
    second = [image for step in range(ends, last + 1) for rank in range(2) for image in after[rank][step]]
    assert len(second) == len(set(second)) == samples // batch * batch


@pytest.mark.mpi
@pytest.mark.soak
def test_a_global_batch_shared_unevenly_gives_the_weights_of_one_shared_evenly(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """A global batch in uneven shares, of 10 or 11 samples in slices of at most 8, gives the weights of two with 16.

    In `make test-all` tests/strategies/test_contract.py compares uneven shares, in slices too, with `single`.
    """
    line = [*SHORT, "--data", shards, "--steps", "12"]
    uneven = [*line, "--ranks", "3", "--keep-batch", "32", "--batch-size", "8", "--run-dir", tmp_path / "uneven"]
    even = [*line, "--ranks", "2", "--batch-size", "16", "--run-dir", tmp_path / "even"]
    for arguments in (uneven, even):
        finished = session_hpcdl(arguments, timeout_s=300)
        assert finished.code == 0, finished.err
    for mine, other in zip(model_weights(tmp_path / "uneven"), model_weights(tmp_path / "even"), strict=True):
        assert abs(mine - other).max() <= 1e-5 * abs(other).max() + 1e-7
    record = record_of(tmp_path / "uneven")
    assert (record["global_batch"], record["batch_per_rank"], record["accumulate"]) == (32, 6, 2)
    numpy.testing.assert_allclose(
        record["history"][0]["loss"], record_of(tmp_path / "even")["history"][0]["loss"], rtol=1e-5
    )


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_every_strategy_continues_with_fewer_workers(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    features = STRATEGIES[strategy].features
    servers = 1 if features.servers else 0
    run_dir = tmp_path / "run"
    line = [*SHORT, "--strategy", strategy, "--ranks", f"{3 + servers}", "--data", shards, "--run-dir", run_dir]
    line += ["--epochs", "2", "--elastic", "--min-workers", "2", "--checkpoint-every", "1h", "--stall-timeout", "10s"]
    line += ["--inject", "kill:rank=2@step=5,kill:rank=2@step=5"]
    line += ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"] if features.optimizers else []
    line += [] if features.mpi else ["--allow-grpc"]
    if not features.keras_optimizer or not features.deterministic:
        line.remove("--deterministic")
    finished = session_hpcdl(line, timeout_s=600)
    assert finished.code == 0, finished.err
    record = record_of(run_dir)
    assert (record["status"], record["workers"], record["servers"]) == ("finished", 2, servers)
    assert record["global_batch"] == (48 if features.equals_single else 32)
