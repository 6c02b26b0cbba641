"""`hpcdl tune-threads` from settings to profile: builds the space, checks, searches, stores."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcdl import __version__
from hpcdl.config.schema import TuneConfig
from hpcdl.core.errors import HpcdlError, StoppedEarly, UsageError
from hpcdl.core.storage.disk import check_outputs
from hpcdl.models.spec import check_model_spec, model_name
from hpcdl.node.accelerators import ask_tensorflow, choose, told
from hpcdl.node.drawing import draw
from hpcdl.node.engine import Engine, find_engine
from hpcdl.node.machines import machines_like, read_machine, read_topology
from hpcdl.node.plan import fill, launch_plan
from hpcdl.node.profile import Profile, file_name, site_folder, user_folder, write_profile
from hpcdl.node.settings import Settings, chosen
from hpcdl.node.topology import Topology
from hpcdl.tuning.findings import Found, as_profile
from hpcdl.tuning.log import TrialLog
from hpcdl.tuning.loop import SearchLimits, SearchProgress, Tuning
from hpcdl.tuning.space import Space, build_space, read_space
from hpcdl.tuning.trials import Measurer, Workload, trial_prefixes

SOFTWARE = ("tensorflow", "keras", "numpy", "mpi4py")


@dataclass(frozen=True, kw_only=True)
class PreparedSearch:
    """A search that can start; the topology has the GPUs that ranks compute on, none where TensorFlow sees none."""

    config: TuneConfig
    topology: Topology
    engine: Engine
    space: Space
    remark: str = ""
    """What to say of the node's GPUs."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What came of a search: `path` is None where nothing was stored, because no trial succeeded in time."""

    profile: Profile
    found: Found
    path: Path | None
    log: Path


def prepare(config: TuneConfig, *, planning: bool = False) -> PreparedSearch:
    """Check the settings and build the space; raises what the user should read."""
    if config.workload.model is None and not planning:
        raise UsageError("--model is needed: the network to tune for, for example --model resnet50")
    if config.workload.model is not None:
        check_model_spec(config.workload.model)
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
    """`topology` without GPUs that a rank's TensorFlow would not see, and a sentence on those that it has."""
    claim = choose(os.environ, 0) if topology.devices else None
    if claim is None:
        return topology, ""
    gpus = told(topology.devices)
    seen = ask_tensorflow({**os.environ, claim.variable: claim.device})
    if seen.seen:
        return topology, f"{gpus}: a rank for each"
    return dataclasses.replace(topology, devices={}, near_devices=()), (
        f"warning: TensorFlow {seen.version} sees none of this node's GPUs ({gpus}): the CPUs are tuned; "
        f"see `hpcdl doctor --only gpus`, or set {claim.variable}='' where that is meant"
    )


def _node(choice: str | None, *, planning: bool) -> tuple[Topology, dict[str, Settings]]:
    """The node to search for, this one or with `planning` the machine `choice`; and settings published for its like."""
    if choice is None:
        topology = read_topology()
        return topology, {
            f"published for {item.name}": item.settings for item in machines_like(topology) if item.settings
        }
    machine = read_machine(choice)
    if not planning and machine.topology.fingerprint != (here := read_topology()).fingerprint:
        raise UsageError(
            f"--machine {choice} is another node ({machine.topology.summary}) than this ({here.summary});"
            " trials can only run on this one; add --plan"
        )
    return machine.topology, {"published for this machine": machine.settings} if machine.settings else {}


def tune(
    run_plan: PreparedSearch,
    *,
    resume: bool = False,
    notify: Callable[[SearchProgress], None] = lambda _: None,
) -> Tuned:
    """Search, and store the profile of the best. StoppedEarly after a signal (what was found is stored all the same);
    HpcdlError where every trial failed.
    """
    config = run_plan.config
    base = _base_profile(run_plan)
    path = _profile_path(config, base)
    check_outputs([path])
    log = TrialLog(config.output.log or path.with_suffix(".trials.jsonl"), _header(run_plan, base), resume=resume)
    prefixes = trial_prefixes(os.environ)
    folder = log.path.parent if len(prefixes) > 1 else None  # a node's own /tmp is not seen by the others
    measurer = Measurer(workload=_workload(config), topology=run_plan.topology, folder=folder)
    found = Tuning(
        space=run_plan.space,
        measure=measurer,
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
    profile = _with_evidence(as_profile(found, base), run_plan)
    if found.choice is not None:
        write_profile(profile, path)
    if found.stopped:
        kept = f"the best of {found.num_samples} samples is in {path}" if found.choice else "no trial had ended"
        raise StoppedEarly(f"stopped by a signal; {kept}; continue with the same command and --resume")
    if found.choice is None:
        if found.trials:
            raise HpcdlError(f"no trial succeeded; {found.warnings[0]}; the log is {log.path}")
        return Tuned(profile=profile, found=found, path=None, log=log.path)
    return Tuned(profile=profile, found=found, path=path, log=log.path)


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
    own = config.workload
    return Workload(model=own.model or "", batch_size=own.batch_size, data=own.data, steps=own.steps)


def _base_profile(run_plan: PreparedSearch) -> Profile:
    topology, own = run_plan.topology, run_plan.config.workload
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
        model=model_name(own.model or ""),
        batch_size=own.batch_size,
        devices=topology.devices,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        engine=run_plan.engine.summary,
        software={"hpcdl": __version__, **versions},
    )


def _with_evidence(profile: Profile, run_plan: PreparedSearch) -> Profile:
    """`profile` with whose advice its trials are, and with a drawing of the node as the winner uses it."""
    origins = {repr(chosen(item.settings)): item.origin for item in run_plan.space.candidates if item.origin}
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
    own = dataclasses.asdict(_workload(run_plan.config))
    devices = dict(base.devices) or None  # as in logs from before
    return {"fingerprint": base.fingerprint, "engine": base.engine, "workload": own, "devices": devices}
