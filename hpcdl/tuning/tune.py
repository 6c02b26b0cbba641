"""`hpcdl tune-threads` from settings to profile: builds and checks the space; search proposes, trials measure."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpcdl import __version__
from hpcdl.config.schema import TuneConfig
from hpcdl.core.errors import HpcdlError, StoppedEarly, UsageError
from hpcdl.core.processes.streams import caught
from hpcdl.core.storage.disk import check_outputs, make_output_folder
from hpcdl.core.storage.lock import writing
from hpcdl.core.units import format_seconds
from hpcdl.data.format.dataset import open_dataset
from hpcdl.models.table import check_model_spec, model_name
from hpcdl.node.accelerators import ask_tensorflow, choose, described
from hpcdl.node.engine import Engine, find_engine
from hpcdl.node.machines import machines_like, read_machine, read_topology
from hpcdl.node.plan import fill, launch_plan
from hpcdl.node.profile import (
    Profile,
    Settings,
    chosen,
    file_name,
    read_profile,
    site_folder,
    user_folder,
    write_profile,
)
from hpcdl.node.topology import Topology, draw
from hpcdl.tuning.findings import SearchResult, as_profile, checked, summaries, unit_of, warnings_of
from hpcdl.tuning.log import TrialLog, earlier_log
from hpcdl.tuning.search import Choice, Search
from hpcdl.tuning.space import Candidate, Space, build_space, read_space
from hpcdl.tuning.trials import Measurer, TrialOutcome, Workload, trial_prefixes

OVERRUN = 0.1
"""Share of the budget by which the last trial may exceed it."""


class Measure(Protocol):
    """Runs one sample; tuning.trials.Measurer is the real implementation."""

    def measure(self, candidate: Candidate, time_limit_s: float, prefix: Sequence[str] = ()) -> TrialOutcome:
        """Return one sample of `candidate`."""

    def stop(self) -> None:
        """End the running samples."""


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Limits of a search. `precision` is the sufficient relative half width of the winner's 95 % interval.

    `max_samples` includes those of an earlier run that continues.
    """

    budget_s: float
    trial_timeout_s: float
    max_samples: int | None = None
    precision: float = 0.03
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """The progress of a search, for a display. `counted` is the unit of the best's rate."""

    seconds: float
    num_samples: int
    best: Choice | None
    settings: Settings | None
    counted: str


@dataclass(kw_only=True)
class Tuning:
    """One search on one kind of node. `prefixes` has a launcher prefix for each node that may run trials at once."""

    space: Space
    measure: Measure
    log: TrialLog
    limits: SearchLimits
    prefixes: Sequence[Sequence[str]] = ((),)
    notify: Callable[[SearchProgress], None] = lambda _: None
    _outcomes: dict[int, list[TrialOutcome]] = field(default_factory=dict)
    _durations: list[float] = field(default_factory=list)

    def run(self) -> SearchResult:
        """Search until settled, the budget is used up, or SIGINT or SIGTERM requests a stop. Keep the best so far."""
        candidates = self.space.candidates
        points = [dataclasses.asdict(candidate.settings) for candidate in candidates]
        self._search = Search(
            points,
            seed=self.limits.seed,
            anchors=self.space.anchors,
            max_samples=self.limits.max_samples,
            precision=self.limits.precision,
        )
        self._remember()
        self._begin = time.monotonic()
        self._interrupted = threading.Event()
        with caught(self._interrupt):
            settled = self._loop()
        choice = self._search.best()
        return SearchResult(
            choice=choice,
            settings=None if choice is None else candidates[choice.index].settings,
            trials=summaries(self._by_settings()),
            counted=unit_of(self._by_settings()),
            num_samples=self._search.num_samples,
            seconds=time.monotonic() - self._begin,
            settled=settled,
            stopped=self._interrupted.is_set(),
            warnings=warnings_of(self._by_settings()),
        )

    def _interrupt(self, number: int) -> None:
        self._interrupted.set()
        self.measure.stop()

    def _remember(self) -> None:
        """Tell the search what an earlier run logged."""
        indices = {repr(chosen(candidate.settings)): index for index, candidate in enumerate(self.space.candidates)}
        for entry in self.log.entries:
            index = indices.get(repr(dict(entry.settings)))
            if index is not None:
                self._note(index, entry.outcome)

    def _loop(self) -> bool:
        # A thread for each node: it only waits for the processes of a trial.
        with ThreadPoolExecutor(len(self.prefixes)) as pool:
            while (limit_s := self._time_limit()) > 0 and not self._interrupted.is_set():
                asked = self._search.ask(len(self.prefixes))
                if not asked:
                    # A search that has used up its samples is not settled.
                    return self.limits.max_samples is None or self._search.num_samples < self.limits.max_samples
                candidates = [self.space.candidates[index] for index in asked]
                jobs = [
                    pool.submit(self.measure.measure, candidate, limit_s, prefix)
                    for candidate, prefix in zip(candidates, self.prefixes, strict=False)
                ]
                for index, job in zip(asked, jobs, strict=True):
                    self._take(index, job.result(), limit_s)
        return False

    def _time_limit(self) -> float:
        """Return the seconds for the next trial; 0 if less than half a usual trial is left."""
        left_s = self.limits.budget_s - (time.monotonic() - self._begin)
        usual = statistics.median(self._durations) if self._durations else 0.0
        if left_s <= 0 or left_s < 0.5 * usual:
            return 0.0
        return min(self.limits.trial_timeout_s, left_s + max(OVERRUN * self.limits.budget_s, 0.0))

    def _take(self, index: int, outcome: TrialOutcome, limit_s: float) -> None:
        if outcome.status == "stopped" or (outcome.status == "timeout" and limit_s < self.limits.trial_timeout_s):
            return  # ended by the budget, which says nothing about the candidate
        outcome = checked(outcome, self._settings(index), self._by_settings())
        self._durations.append(outcome.seconds)
        self.log.add(chosen(self.space.candidates[index].settings), outcome)
        self._note(index, outcome)
        best = self._search.best()
        settings = None if best is None else self.space.candidates[best.index].settings
        self.notify(
            SearchProgress(
                seconds=time.monotonic() - self._begin,
                num_samples=self._search.num_samples,
                best=best,
                settings=settings,
                counted=unit_of(self._by_settings()),
            )
        )

    def _settings(self, index: int) -> Settings:
        return self.space.candidates[index].settings

    def _by_settings(self) -> list[tuple[Settings, Sequence[TrialOutcome]]]:
        """Return the outcomes so far, candidate by candidate."""
        return [(self._settings(index), outcomes) for index, outcomes in self._outcomes.items()]

    def _note(self, index: int, outcome: TrialOutcome) -> None:
        self._outcomes.setdefault(index, []).append(outcome)
        self._search.tell(index, outcome.images_per_second if outcome.status == "ok" else None)


SOFTWARE = ("tensorflow", "keras", "numpy", "mpi4py")


@dataclass(frozen=True, kw_only=True)
class PreparedSearch:
    """A search that can start. The topology has the GPUs that ranks compute on, none if TensorFlow sees none."""

    config: TuneConfig
    topology: Topology
    engine: Engine
    space: Space
    remark: str = ""
    """A message about the node's GPUs."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a search, stored at `path`."""

    profile: Profile
    result: SearchResult
    path: Path
    log: Path


def prepare(config: TuneConfig, *, planning: bool = False) -> PreparedSearch:
    """Check the settings and build the space. Raises errors for the user to read."""
    if config.workload.model is None and not planning:
        raise UsageError("--model is needed: the network to tune for, for example --model resnet50")
    if config.workload.model is not None:
        check_model_spec(config.workload.model)
    if config.workload.data is not None and not planning:
        open_dataset(config.workload.data)  # else each trial would fail by it, after the earlier log was moved
    topology, published = _node(config.search.machine, planning=planning)
    topology, remark = _as_tensorflow_sees(topology)
    engine = find_engine()
    narrowing = read_space(config.search.space) if config.search.space is not None else {}
    if config.search.ranks_per_node is not None:
        narrowing["ranks_per_node"] = [config.search.ranks_per_node]
    space = build_space(
        topology,
        engine,
        narrowing=narrowing,
        published=published,
        batch_sizes=_batch_sizes(config.workload.batch_sizes),
    )
    return PreparedSearch(config=config, topology=topology, engine=engine, space=space, remark=remark)


def _as_tensorflow_sees(topology: Topology) -> tuple[Topology, str]:
    """Return `topology` without GPUs that a rank's TensorFlow would not see, and a sentence on its GPUs."""
    claim = choose(os.environ, 0) if topology.devices else None
    if claim is None:
        return topology, ""
    gpus = described(topology.devices)
    # With the variables of a rank, which gets one GPU.
    seen = ask_tensorflow({**os.environ, claim.variable: claim.device})
    if seen.seen:
        return topology, f"{gpus}: a rank for each"
    return dataclasses.replace(topology, devices={}, near_devices=()), (
        f"warning: TensorFlow {seen.version} sees none of this node's GPUs ({gpus}): the CPUs are tuned; "
        f"see `hpcdl doctor --only gpus`, or set {claim.variable}='' where that is meant"
    )


def _node(choice: str | None, *, planning: bool) -> tuple[Topology, dict[str, Settings]]:
    """Return the node to tune, this one or with `planning` machine `choice`, and settings published for such nodes."""
    if choice is None:
        topology = read_topology()
        return topology, {
            f"published for {item.name}": item.settings for item in machines_like(topology) if item.settings
        }
    machine = read_machine(choice)
    if not planning and machine.topology.fingerprint != (this_node := read_topology()).fingerprint:
        raise UsageError(
            f"--machine {choice} is another node ({machine.topology.summary}) than this ({this_node.summary});"
            " trials can only run on this one; add --plan"
        )
    return machine.topology, {"published for this machine": machine.settings} if machine.settings else {}


def tune(
    run_plan: PreparedSearch,
    *,
    resume: bool = False,
    notify: Callable[[SearchProgress], None] = lambda _: None,
) -> Tuned:
    """Search, and store the profile of the best. Raises StoppedEarly after a signal (results are stored all the same),
    HpcdlError if no trial succeeded.
    """
    config = run_plan.config
    base = _base_profile(run_plan)
    path = _profile_path(config, base)
    # Before the search: hours of trials must not end at a file that may not be replaced.
    check_outputs([path])
    log_path = config.output.log or path.with_suffix(".trials.jsonl")
    if not resume:
        earlier_log(log_path)  # refused before anything is written
    make_output_folder(log_path.parent, "--log " if config.output.log else "")
    with writing(log_path.parent, name=f".{log_path.name}.lock"):  # a second search would disturb the first's times
        log = TrialLog(log_path, _header(run_plan, base), resume=resume)
        search_result = _searched(run_plan, log, notify)
    profile = _with_evidence(as_profile(search_result, base), run_plan)
    if search_result.choice is not None:
        write_profile(profile, path)
    if search_result.stopped:
        kept = (
            f"the best of {search_result.num_samples} samples is in {path}"
            if search_result.choice
            else "no trial had ended"
        )
        raise StoppedEarly(f"stopped by a signal; {kept}; continue with the same command and --resume")
    if search_result.choice is None:
        if search_result.trials:
            raise HpcdlError(f"no trial succeeded; {search_result.warnings[0]}; the log is {log.path}")
        budget = format_seconds(config.search.budget)
        raise HpcdlError(f"no trial ended within the budget of {budget}: nothing was stored; give a longer --budget")
    return Tuned(profile=profile, result=search_result, path=path, log=log.path)


def _searched(run_plan: PreparedSearch, log: TrialLog, notify: Callable[[SearchProgress], None]) -> SearchResult:
    config, prefixes = run_plan.config, trial_prefixes(os.environ)
    folder = log.path.parent if len(prefixes) > 1 else None  # the other nodes do not see a node's own /tmp
    return Tuning(
        space=run_plan.space,
        measure=Measurer(workload=_workload(config), topology=run_plan.topology, folder=folder),
        log=log,
        limits=SearchLimits(
            budget_s=config.search.budget,
            trial_timeout_s=config.search.trial_timeout,
            max_samples=config.search.max_samples,
            precision=config.search.precision,
            seed=config.search.seed,
        ),
        prefixes=prefixes,
        notify=notify,
    ).run()


def _batch_sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UsageError(f"--batch-sizes {text!r} is not a list of whole numbers above 0; write for example 32,64,128")
    return sizes


def _workload(config: TuneConfig) -> Workload:
    workload = config.workload
    return Workload(
        model=workload.model or "", batch_size=workload.batch_size, data=workload.data, steps=workload.steps
    )


def replaced(run_plan: PreparedSearch) -> str:
    """Return a warning about the result of another search that this one replaces; empty if there is none."""
    path = _profile_path(run_plan.config, _base_profile(run_plan))
    try:
        before = read_profile(path)
    except HpcdlError:
        return ""
    how_sure = f" ({before.verdict.partition(';')[0]})" if before.verdict else ""
    return (
        f"warning: {path} holds what a search of {before.created_at[:10] or 'an unknown day'} found for batch "
        f"{before.batch_size}{how_sure}; this one replaces it, --out FILE keeps it, --resume continues it"
    )


def _base_profile(run_plan: PreparedSearch) -> Profile:
    topology, workload = run_plan.topology, run_plan.config.workload
    versions = {}
    for name in SOFTWARE:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Profile(
        settings=fill(topology, None, 1),
        machine=socket.gethostname(),
        processor=topology.processor,
        fingerprint=topology.fingerprint,
        num_cores=len(topology.cores),
        model=model_name(workload.model or ""),
        batch_size=workload.batch_size,
        devices=topology.devices,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        engine=run_plan.engine.summary,
        software={"hpcdl": __version__, **versions},
    )


def _with_evidence(profile: Profile, run_plan: PreparedSearch) -> Profile:
    """Return `profile` with the sources of its trials, and with a drawing of the node as the winner uses it."""
    origins = {
        repr(chosen(candidate.settings)): candidate.origin
        for candidate in run_plan.space.candidates
        if candidate.origin
    }
    trials = [
        dataclasses.replace(trial, origin=origins.get(repr(dict(trial.settings)), "")) for trial in profile.trials
    ]
    ranks = profile.settings.ranks_per_node or 1
    plan = launch_plan(run_plan.topology, profile.settings, ranks, ranks, openmp=run_plan.engine.openmp)
    return dataclasses.replace(
        profile, trials=tuple(trials), picture=tuple(draw(run_plan.topology, plan.cpus_by_local_rank))
    )


def _profile_path(config: TuneConfig, base: Profile) -> Path:
    folder = site_folder() if config.output.site else user_folder()
    return config.output.out or folder / file_name(base)


def _header(run_plan: PreparedSearch, base: Profile) -> dict[str, object]:
    workload = dataclasses.asdict(_workload(run_plan.config))
    devices = dict(base.devices) or None  # as in logs of earlier versions
    return {"fingerprint": base.fingerprint, "engine": base.engine, "workload": workload, "devices": devices}
