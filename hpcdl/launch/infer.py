"""Start an inference: first the checks, then the output folder, then the ranks."""

from __future__ import annotations

import contextlib
import functools
import uuid
from pathlib import Path

from hpcdl.cluster import supervise as local
from hpcdl.cluster.environment import Placement
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.limits import check_node
from hpcdl.cluster.status import FOLDER
from hpcdl.comm.agree import decided
from hpcdl.comm.observed import Observed
from hpcdl.config.commands import InferConfig
from hpcdl.config.load import ResolvedConfig
from hpcdl.core.paths import check_backend, own_program
from hpcdl.core.processes.streams import StopRequest
from hpcdl.core.records.run_record import RunRecord, read_record
from hpcdl.launch.guard import guarded
from hpcdl.launch.train import (
    check_started_with,
    interruptible,
    plan_under_profile,
    python_of_ranks,
    ranks_on_node,
    with_ranks,
)
from hpcdl.models.table import model_name
from hpcdl.node.machines import read_topology
from hpcdl.run.ended import end_noted
from hpcdl.run.faults import NETWORK, STRUCK_FROM_BESIDE, check_injected
from hpcdl.run.inference import InferencePlan, OutputFolderState, ask, blank_record, check_out, prepare, written
from hpcdl.run.journal import EventHandler, JournalReader
from hpcdl.trace.recorder import collected

FAULTS = (*STRUCK_FROM_BESIDE, *NETWORK)
"""The faults that --inject can cause during an inference; the others apply to training only."""


def check(resolved: ResolvedConfig[InferConfig], model: Path) -> InferencePlan:
    """Run the checks of `infer` before it makes its folder. Raises UsageError, ConfigError or CorruptError."""
    check_backend()
    check_injected(resolved, FAULTS, "not of `hpcdl infer`, which sends and saves no state")
    plan = prepare(resolved.config, model)
    check_out(resolved.config.run.out, resume=resolved.config.run.resume)
    return plan


def infer(resolved: ResolvedConfig[InferConfig], model: Path, on_event: EventHandler) -> RunRecord:
    """Compute a model's outputs on the ranks of this node or of this job's nodes, and return the record.

    `on_event` receives the journal's events while the ranks run.
    """
    run = resolved.config.run
    with interruptible(run.resume):
        plan = check(resolved, model)
        launcher = find_launcher()
        share = ranks_on_node(launcher, run)
        check_node(share)
        name = model_name(plan.model_name) if plan.trained else plan.model_name
        launch_plan, remarks = plan_under_profile(run, name, read_topology(), share)
        with written(run.out, resume=run.resume) as folder:
            ask(run.out, resolved, model)
            reader = JournalReader(run.out)

            def tick() -> None:
                with contextlib.suppress(OSError):  # the terminal is gone: no reason to stop the computation
                    for event in reader.read():
                        on_event(event)

            for text in remarks:
                on_event({"kind": "message", "text": text})
            blank = functools.partial(blank_record, plan)
            with (
                end_noted(run.out, blank),
                folder.restored_if_refused(),
                guarded(run.out),
                collected(run.out),
                python_of_ranks(launcher, run, launch_plan) as python,
            ):
                command = own_program("hpcdl.rank.infer", str(run.out), python=python)
                local.start(launcher, launch_plan, command, folder=run.out / FOLDER, tick=tick)
    return read_record(run.out)


def infer_inside(
    resolved: ResolvedConfig[InferConfig], model: Path, process: Placement, on_event: EventHandler
) -> None:
    """Compute as one rank of the launcher that started this process. Collective: every rank must call it.

    On rank 0 `on_event` receives the journal's events.
    """
    from hpcdl.rank.infer import infer_rank
    from hpcdl.rank.start import Joined, as_rank
    from hpcdl.supervision.watchdog import FOLDER as WATCH_FOLDER

    resolved = with_ranks(resolved, process)
    run = resolved.config.run
    check_started_with(run, process.launcher)
    stop = StopRequest()
    stop.install()
    with contextlib.ExitStack() as held:
        folders: list[OutputFolderState] = []

        def decide() -> str:
            check(resolved, model)
            folders.append(held.enter_context(written(run.out, resume=run.resume)))
            ask(run.out, resolved, model)
            return uuid.uuid4().hex

        def agree(communicator: Observed) -> Joined:
            word = decided(communicator, decide)
            return Joined(watch_folder=run.out / FOLDER / WATCH_FOLDER / word, run_dir=run.out)

        with (
            as_rank(process, agree) as (communicator, watchdog, _),
            # Restore before rank 0 ends the other ranks: their launcher may end rank 0 with them.
            folders[0].restored_if_refused() if folders else contextlib.nullcontext(),
        ):
            # Each rank checks its own copy: a file that is intact for rank 0 may be damaged on another node.
            infer_rank(prepare(resolved.config, model), communicator, run.out, watchdog, stop, on_event)
