from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpcdl.config.load import Layer, load
from hpcdl.config.schema import TuneConfig
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.node.engine import Engine
from hpcdl.node.machines import read_machine
from hpcdl.node.plan import fill
from hpcdl.node.profile import Profile, Settings, chosen, read_profile, write_profile
from hpcdl.tuning.findings import SearchResult, as_profile
from hpcdl.tuning.log import TrialLog
from hpcdl.tuning.space import Candidate, Space, build_space
from hpcdl.tuning.trials import TrialOutcome
from hpcdl.tuning.tune import SearchLimits, Tuning, prepare, replaced
from tests.conftest import patience

TOPOLOGY = read_machine("generic").topology
STOCK = Engine(
    package="tensorflow", version="2.21.0", threading="own pool", isa_caps=("default",), allocators=("default",)
)
HEADER = {"fingerprint": TOPOLOGY.fingerprint}


class Simulated:
    """A simulated node whose speed peaks at 2 ranks of 8 threads; each trial takes `seconds`."""

    def __init__(
        self, seconds: float = 0.0, change: Callable[[Settings, TrialOutcome], TrialOutcome] | None = None
    ) -> None:
        self.seconds = seconds
        self.change = change or (lambda settings, outcome: outcome)
        self.settings: list[Settings] = []
        self.prefixes: set[tuple[str, ...]] = set()
        self.stopped = threading.Event()
        self.dice = random.Random(0)
        self.lock = threading.Lock()
        self.at_once = self.most_at_once = 0

    def measure(self, candidate: Candidate, time_limit_s: float, prefix: Sequence[str] = ()) -> TrialOutcome:
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self._measured(candidate, time_limit_s, prefix)
        finally:
            with self.lock:
                self.at_once -= 1

    def _measured(self, candidate: Candidate, time_limit_s: float, prefix: Sequence[str]) -> TrialOutcome:
        with self.lock:
            self.settings.append(candidate.settings)
            self.prefixes.add(tuple(prefix))
            noise = math.exp(self.dice.gauss(0, 0.02))
        if self.stopped.wait(min(self.seconds, time_limit_s)):
            return TrialOutcome(status="stopped")
        if self.seconds > time_limit_s:
            return TrialOutcome(status="timeout", message="killed after its time limit", seconds=time_limit_s)
        ranks, threads = candidate.settings.ranks_per_node or 1, candidate.settings.intra_op_threads or 1
        speed = 100 - 10 * abs(math.log2(ranks / 2)) - 8 * abs(math.log2(threads / 8))
        speed *= 0.7 if candidate.settings.xla else 1.0
        outcome = TrialOutcome(status="ok", images_per_second=speed * noise, loss=2.3, memory_bytes_per_rank=10**9)
        return self.change(candidate.settings, dataclasses.replace(outcome, seconds=self.seconds))

    def stop(self) -> None:
        self.stopped.set()


def space() -> Space:
    narrowing = {"binding": ["balanced"], "memory_policy": ["default"], "threads_per_core": [1]}
    return build_space(TOPOLOGY, STOCK, narrowing=narrowing)


def tune(
    node: Simulated,
    folder: Path,
    *,
    budget_s: float = 60.0,
    max_samples: int | None = None,
    resume: bool = False,
    hosts: int = 1,
) -> SearchResult:
    return Tuning(
        space=space(),
        measure=node,
        log=TrialLog(folder / "log.jsonl", HEADER, resume=resume),
        limits=SearchLimits(budget_s=budget_s, trial_timeout_s=30.0, max_samples=max_samples),
        prefixes=[["on", str(host)] for host in range(hosts)],
    ).run()


def test_the_fastest_is_found_and_the_search_settles(tmp_path: Path) -> None:
    found = tune(Simulated(), tmp_path)
    assert found.settings is not None
    assert (found.settings.ranks_per_node, found.settings.intra_op_threads) == (2, 8)
    assert found.settled
    assert not found.stopped
    assert found.num_samples < 200
    assert found.warnings == ()
    assert found.trials[0].memory_bytes_per_rank == 10**9


def test_the_log_has_a_line_for_every_sample(tmp_path: Path) -> None:
    found = tune(Simulated(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[0] == {"schema": "hpcdl.trials/1", **HEADER}
    assert len(lines) == 1 + found.num_samples


def test_the_budget_is_kept(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = tune(Simulated(seconds=0.3), tmp_path, budget_s=3.0)
    assert time.monotonic() - begin < 3.0 * 1.1 + patience(1.0)
    assert found.choice is not None
    assert not found.settled


@pytest.mark.parametrize("max_samples", [1, 6, 11])
def test_a_budget_of_samples_is_kept_however_long_each_takes(tmp_path: Path, max_samples: int) -> None:
    found = tune(Simulated(seconds=0.05), tmp_path, max_samples=max_samples, hosts=2)
    assert found.num_samples == max_samples and found.choice is not None and not found.settled
    assert "stopped before it settled" in as_profile(found, base()).verdict
    after = tune(Simulated(), tmp_path, max_samples=max_samples, resume=True)
    assert after.num_samples == max_samples, "a search that continues counts what it finds"


def test_when_no_trial_ends_in_time_the_defaults_are_reported(tmp_path: Path) -> None:
    found = tune(Simulated(seconds=30.0), tmp_path, budget_s=0.5)
    assert found.choice is None
    assert found.trials == ()  # a trial cut short by the time limit is not counted
    profile = as_profile(found, base())
    assert profile.settings == Settings()
    assert "the defaults" in profile.verdict


def test_resume_continues_from_the_log(tmp_path: Path) -> None:
    first = Simulated(seconds=0.05)
    before = tune(first, tmp_path, budget_s=0.6)
    assert not before.settled
    second = Simulated()
    after = tune(second, tmp_path, resume=True)
    assert after.num_samples == len(first.settings) + len(second.settings)
    assert after.settings is not None
    assert (after.settings.ranks_per_node, after.settings.intra_op_threads) == (2, 8)


def test_a_line_cut_short_is_left_out_and_the_log_continues_whole(tmp_path: Path) -> None:
    tune(Simulated(seconds=0.05), tmp_path, budget_s=0.5)
    path = tmp_path / "log.jsonl"
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole) + '\n{"settings": {"ran')
    log = TrialLog(path, HEADER, resume=True)
    assert len(log.entries) == len(whole) - 1
    log.add({"ranks_per_node": 1}, TrialOutcome(status="ok", images_per_second=1.0))
    assert len(TrialLog(path, HEADER, resume=True).entries) == len(whole)


def test_a_line_cut_before_its_newline_is_left_out_too(tmp_path: Path) -> None:
    path, outcome = tmp_path / "log.jsonl", TrialOutcome(status="ok", images_per_second=1.0)
    log = TrialLog(path, HEADER, resume=False)
    log.add({"ranks_per_node": 1}, outcome)
    log.add({"ranks_per_node": 2}, outcome)
    path.write_bytes(path.read_bytes()[:-1])
    TrialLog(path, HEADER, resume=True).add({"ranks_per_node": 4}, outcome)
    kept = [entry.settings["ranks_per_node"] for entry in TrialLog(path, HEADER, resume=True).entries]
    assert kept == [1, 4]


def test_a_damaged_log_and_another_search_s_log_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    TrialLog(path, HEADER, resume=False).add({}, TrialOutcome(status="ok", images_per_second=1.0))
    with pytest.raises(UsageError, match="belongs to another search"):
        TrialLog(path, {"fingerprint": "other"}, resume=True)
    words = "log.jsonl belongs to another search (another node, batch-size 32, here 64, data a, here b); drop --resume"
    workload = {"model": "lenet", "batch_size": 32, "data": "a"}
    TrialLog(tmp_path / "other" / path.name, {"fingerprint": "a1b2", "workload": workload}, resume=False)
    with pytest.raises(UsageError, match=re.escape(words)):
        here = {"fingerprint": "c3d4", "workload": workload | {"batch_size": 64, "data": "b"}}
        TrialLog(tmp_path / "other" / path.name, here, resume=True)
    path.write_text(path.read_text().replace('"settings"', "settings") + "{}\n")
    with pytest.raises(CorruptError, match="line 2 is no JSON"):
        TrialLog(path, HEADER, resume=True)


def test_a_new_search_keeps_the_samples_of_the_one_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, aside = tmp_path / "log.jsonl", tmp_path / "log.jsonl.1"
    TrialLog(path, HEADER, resume=False)
    TrialLog(path, HEADER, resume=False).add({}, TrialOutcome(status="ok", images_per_second=1.0))
    samples = path.read_bytes()
    assert TrialLog(path, HEADER, resume=False).entries == []
    assert aside.read_bytes() == samples and len(TrialLog(aside, HEADER, resume=True).entries) == 1
    assert capfd.readouterr().err == f"hpcdl: {path} held 1 sample of an earlier search, now in {aside}\n"


def test_a_log_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot write trial log"):
        TrialLog(Path("/proc/no/log.jsonl"), HEADER, resume=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_best_so_far(number: signal.Signals, tmp_path: Path) -> None:
    """A signal keeps the best result; it is sent during the fourth trial, so that this machine's speed is
    irrelevant.
    """

    def interrupting(settings: Settings, outcome: TrialOutcome) -> TrialOutcome:
        if len(node.settings) == 4:
            os.kill(os.getpid(), number)
        return outcome

    node = Simulated(change=interrupting)
    found = tune(node, tmp_path, budget_s=600.0)
    assert found.stopped
    assert found.choice is not None
    assert 3 <= found.num_samples <= 5


def test_an_engine_with_another_loss_is_rejected_and_named(tmp_path: Path) -> None:
    def wrong(settings: Settings, outcome: TrialOutcome) -> TrialOutcome:
        if settings.xla:  # fast, but wrong results
            return dataclasses.replace(outcome, images_per_second=500.0, loss=2.9)
        return outcome

    found = tune(Simulated(change=wrong), tmp_path)
    assert found.settings is not None
    assert not found.settings.xla
    assert any("loss 2.9 instead of the reference 2.3" in warning for warning in found.warnings)
    assert any(trial.status == "inconsistent" for trial in found.trials)


def test_a_loss_that_is_no_number_is_rejected(tmp_path: Path) -> None:
    def nan(settings: Settings, outcome: TrialOutcome) -> TrialOutcome:
        return dataclasses.replace(outcome, loss=math.nan) if settings.onednn is False else outcome

    found = tune(Simulated(change=nan), tmp_path)
    assert found.settings is not None
    assert found.settings.onednn is not False
    assert any("instead of" in warning for warning in found.warnings)


def test_unchecked_results_are_reported(tmp_path: Path) -> None:
    found = tune(Simulated(change=lambda settings, outcome: dataclasses.replace(outcome, loss=None)), tmp_path)
    assert any("not checked against a reference" in warning for warning in found.warnings)


def test_failures_do_not_stop_the_search(tmp_path: Path) -> None:
    def crash(settings: Settings, outcome: TrialOutcome) -> TrialOutcome:
        kinds = {1: "failed", 8: "garbage"}
        status = kinds.get(settings.ranks_per_node or 0)
        return TrialOutcome(status=status, message="boom") if status else outcome

    found = tune(Simulated(change=crash), tmp_path)
    assert found.settings is not None
    assert (found.settings.ranks_per_node, found.settings.intra_op_threads) == (2, 8)
    assert any("samples failed; the last: boom" in warning for warning in found.warnings)


def test_several_nodes_run_trials_at_once(tmp_path: Path) -> None:
    node = Simulated(seconds=0.2)
    found = tune(node, tmp_path, budget_s=2.0, hosts=4)
    assert node.prefixes == {("on", str(host)) for host in range(4)}
    assert node.most_at_once > 2
    assert found.choice is not None


def base() -> Profile:
    return Profile(
        settings=Settings(), machine="here", processor=TOPOLOGY.processor, fingerprint=TOPOLOGY.fingerprint,
        num_cores=32, model="lenet", batch_size=32,
    )  # fmt: skip


def test_the_profile_has_winner_interval_and_every_trial(tmp_path: Path) -> None:
    found = tune(Simulated(change=lambda _, outcome: dataclasses.replace(outcome, counted="samples")), tmp_path)
    profile = as_profile(found, base())
    path = tmp_path / "p.toml"
    write_profile(profile, path)
    stored = read_profile(path)
    assert found.settings is not None
    assert (stored.settings, stored.counted) == (found.settings, "samples")
    assert stored.images_per_second is not None
    assert abs(stored.images_per_second - 100) < 3
    assert stored.ci95 is not None
    assert "best with probability" in stored.verdict
    assert len(stored.trials) == len(found.trials)
    assert stored.trials[0].settings == chosen(found.settings) or stored.trials[0].n < stored.n


def test_the_result_of_another_search_is_named_before_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    values = {"model": "lenet", "batch-size": 16, "out": str(path)}
    run_plan = prepare(load(TuneConfig, [Layer(origin="here", values=values)]).config)
    assert replaced(run_plan) == ""
    settings = fill(TOPOLOGY, None, 1)
    profile = Profile(
        settings=settings, machine="n1", processor="", fingerprint="", num_cores=2, model="lenet", batch_size=64,
        created_at="2026-03-14T00:00:00Z", verdict="settled; best with probability 0.99",
    )  # fmt: skip
    write_profile(profile, path)
    words = replaced(run_plan)
    assert f"{path} holds what a search of 2026-03-14 found for batch 64 (settled)" in words and "--out FILE" in words
