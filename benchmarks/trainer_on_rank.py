"""Set up `hpcdl train`'s training on each rank of an mpiexec, for benchmarks that measure parts of its loop."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.checkpoint.background import THREAD, BackgroundWork
from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.checkpoint.memory import LocalCopies
from hpcdl.cluster.environment import placement
from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from hpcdl.comm.observed import observe
from hpcdl.config.load import Layer, load
from hpcdl.config.schema import TrainConfig
from hpcdl.core.protocols import Communicator
from hpcdl.faults.inject import Injection
from hpcdl.rank.job import context_of
from hpcdl.rank.start import ALONE, communicator_for
from hpcdl.run.journal import NullJournal
from hpcdl.run.plan import prepare
from hpcdl.strategies.table import load_strategy
from hpcdl.supervision import runtime

if TYPE_CHECKING:
    from hpcdl.rank.parts import Parts

FOLDER_VARIABLE = "BENCHMARK_RUN_DIR"
DATA = {"resnet50": "synthetic:imagenet@4096", "lenet": "synthetic:mnist@4096"}
"""Data by model; LeNet serves to try a benchmark."""


def run_on_ranks(script: str, num_ranks: int, arguments: list[str]) -> int:
    """Start `script ARGUMENTS --rank` on ranks of this node, with a run directory; return mpiexec's exit code."""
    mpiexec = find_mpiexec()
    line = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", str(num_ranks), sys.executable, script, *arguments]
    with tempfile.TemporaryDirectory(prefix="hpcdl-benchmark-", dir=os.environ.get("TMPDIR", ".")) as folder:
        environment = {**os.environ, **environment_for(mpiexec.flavour), FOLDER_VARIABLE: folder}
        return subprocess.run([*line, "--rank"], env=environment, check=False).returncode


def build(settings: Mapping[str, Any]) -> tuple[Parts, Communicator, Path]:
    """Return what this rank trains with, bound to its own core, ready for its first step."""
    place = placement() or ALONE
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place.rank % len(cores)]})
    runtime.silence()
    communicator = observe(communicator_for(place))
    runtime.import_tensorflow()
    from hpcdl.models.load import load_model
    from hpcdl.rank.parts import Parts

    values = {"strategy": "ring", "ranks": place.size, **settings}
    run_plan = prepare(load(TrainConfig, [Layer(origin="benchmark", values=values)]))
    runtime.configure(deterministic=False, seed=communicator.rank)
    worker = load_strategy(run_plan.info).worker(context_of(run_plan, communicator))
    dataset = run_plan.dataset
    model = load_model(run_plan.config.model.model, classes=dataset.num_classes, input_shape=dataset.sample_shape)
    run_dir = Path(os.environ[FOLDER_VARIABLE])
    faults = Injection("", communicator.monitor, run_dir)
    interval = CheckpointInterval(600.0, node_mtbf_s=1.0, num_nodes=1)
    copies = LocalCopies(run_dir, run_dir, place.rank, 0, print)
    work = BackgroundWork(THREAD, communicator.monitor)
    parts = Parts(run_plan, model, worker, communicator, NullJournal(), run_dir, faults, interval, copies, work)
    return parts, communicator, run_dir
