"""Measures one way to use a node: `hpcdl bench step --json` in fresh processes, which may crash, hang or print garbage.

`python -m hpcdl.tuning.trials CMD...` runs CMD on a node of an allocation, without the variables of its job step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.cluster.launchers.base import expand_hosts
from hpcdl.cluster.processes import end_marked, stop
from hpcdl.core.paths import own_program
from hpcdl.core.storage.disk import open_new, private_folder
from hpcdl.core.units import IMAGES, common_unit
from hpcdl.node.profile import Profile, Settings, write_profile
from hpcdl.node.topology import Topology
from hpcdl.tuning.space import Candidate

MARK = "HPCDL_TRIAL"
"""Set in the environment of every process of a trial, so that all of them can be found and ended."""
OWN_VARIABLES = ("OPENBLAS_NUM_THREADS",)
"""Variables for the search itself, which a trial must not inherit."""
SHED = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_LOCAL")
"""Variables that make a process a rank of the job step. A trial starts its own ranks."""
SOFT_STOP_S = 3.0
MAX_OUTPUT_BYTES = 1 << 20
MAX_MESSAGE = 1000
"""Characters of a message that are kept: its remedy is at its end."""
TAIL_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """One sample: `status` is ok, failed, timeout, garbage, inconsistent or stopped; images/s of the whole node.

    `counted` is the unit of the rate; `node` is the node of the allocation that it ran on, empty for this one.
    """

    status: str
    images_per_second: float | None = None
    counted: str = IMAGES
    loss: float | None = None
    memory_bytes_per_rank: int | None = None
    message: str = ""
    seconds: float = 0.0
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training of every trial. `data` None means synthetic samples of the model's own shape."""

    model: str
    batch_size: int
    data: str | None = None
    steps: int | None = None


CommandOf = Callable[[Workload, Settings, Path], Sequence[str]]


def bench_step_command(workload: Workload, settings: Settings, profile: Path) -> list[str]:
    """Return the command line of a trial. The profile's settings reach the ranks in the same way as in `train`."""
    ranks = settings.ranks_per_node or 1
    command = own_program("hpcdl", "bench", "step", "--json", "--exchange-only", "--model", workload.model)
    command += ["--batch-size", str(settings.batch_size or workload.batch_size), "--ranks", str(ranks)]
    command += ["--strategy", "ring" if ranks > 1 else "single", "--profile", str(profile)]
    if workload.data is not None:
        command += ["--data", workload.data]
    if workload.steps is not None:
        command += ["--steps", str(workload.steps)]
    return command


@dataclass(kw_only=True)
class Measurer:
    """Runs trials of `workload` on nodes like `topology`. `stop` ends running ones from another thread.

    `folder` is for the trials' own folders: trials on other nodes need one that those nodes see too.
    """

    workload: Workload
    topology: Topology
    command_of: CommandOf = bench_step_command
    folder: Path | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """End the running trials. They are reported as stopped."""
        self._stopped.set()

    def measure(self, candidate: Candidate, time_limit_s: float, prefix: Sequence[str] = ()) -> TrialOutcome:
        """Return one sample of `candidate` within `time_limit_s`, its command after `prefix` (a node's launcher)."""
        begin = time.monotonic()
        with private_folder(".hpcdl-trial-", self.folder) as folder:
            profile = folder / "profile.toml"
            write_profile(_as_profile(candidate.settings, self.topology, self.workload), profile)
            command = [*prefix, *self.command_of(self.workload, candidate.settings, profile)]
            code, why = self._run(command, folder, time_limit_s)
            outcome = _read(folder, code, why, candidate.settings, self.workload)
            if outcome.status == "ok" and self.topology.devices:
                outcome = _on_devices(outcome, folder, candidate.settings.ranks_per_node or 1)
        return dataclasses.replace(outcome, seconds=time.monotonic() - begin, node=node_of(prefix))

    def _run(self, command: Sequence[str], folder: Path, time_limit_s: float) -> tuple[int, str]:
        """Return the exit code, and why the process was ended (`timeout`, `stopped`, or empty)."""
        mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
        environment[MARK] = mark
        with os.fdopen(open_new(folder / "stdout"), "wb") as out, os.fdopen(open_new(folder / "stderr"), "wb") as err:
            try:
                # In a session of its own: Ctrl-C reaches only the search, which ends the trial.
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
                )
            except OSError as error:
                err.write(str(error).encode())
                return 127, ""
            try:
                why = self._wait(process, time_limit_s)
            finally:
                stop([process], SOFT_STOP_S / 2)
                # `stop` reaches only the launcher: ranks that it has not ended are found by their mark.
                end_marked(MARK, mark)
                process.wait()
        return process.returncode, why

    def _wait(self, process: subprocess.Popen[bytes], time_limit_s: float) -> str:
        deadline = time.monotonic() + time_limit_s
        while not self._stopped.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(0.2, max(deadline - time.monotonic(), 0.01)))
                return ""
            if time.monotonic() >= deadline:
                return "timeout"
        return "stopped"


def _read(folder: Path, code: int, why: str, settings: Settings, workload: Workload) -> TrialOutcome:
    if why == "timeout":
        return TrialOutcome(status="timeout", message="killed after its time limit")
    if why:
        return TrialOutcome(status=why)
    if code != 0:
        return TrialOutcome(status="failed", message=last_words(folder / "stderr", code))
    with (folder / "stdout").open("rb") as file:
        # A trial that goes wrong may print without end.
        text = file.read(MAX_OUTPUT_BYTES)
    try:
        document = json.loads(text)
        step_seconds = _positive(document["step_seconds"])
    except (ValueError, KeyError, TypeError) as error:
        return TrialOutcome(status="garbage", message=f"no step_seconds in its output ({type(error).__name__})")
    batch = settings.batch_size or workload.batch_size
    memory = document.get("peak_memory_bytes")
    return TrialOutcome(
        status="ok",
        images_per_second=(settings.ranks_per_node or 1) * batch / step_seconds,
        counted=common_unit([document.get("counted", IMAGES)]),
        loss=_loss(document),
        memory_bytes_per_rank=memory if isinstance(memory, int) and not isinstance(memory, bool) else None,
    )


def _on_devices(outcome: TrialOutcome, folder: Path, ranks: int) -> TrialOutcome:
    """Return `outcome`, or a failure if not every rank computed on a GPU: its rate would measure something else."""
    num_on_gpus = sum(json.loads((folder / "stdout").read_bytes()).get("accelerators", {}).values())
    if num_on_gpus == ranks:
        return outcome
    message = f"{ranks - num_on_gpus} of {ranks} ranks computed on CPUs, not on GPUs; see `hpcdl doctor --only gpus`"
    return TrialOutcome(status="failed", message=message)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError("not a positive number")
    return float(value)


def _loss(document: Mapping[str, Any]) -> float | None:
    value = document.get("loss")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def last_words(log: Path, code: int) -> str:
    """Return why a process failed: its exit code, and the last line of its `log`, preferably one of hpcdl."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        lines = file.read().decode(errors="replace").strip().splitlines()
    own_lines = [line.removeprefix("hpcdl: ") for line in lines if line.startswith("hpcdl: ")]
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    # The kernel's out-of-memory killer sends SIGKILL; launchers and shells report it as 137.
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        how += ", perhaps out of memory"
    if not lines:
        return how
    text = (own_lines or lines)[-1]
    return f"{how}: {text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + ' ...'}"


def _as_profile(settings: Settings, topology: Topology, workload: Workload) -> Profile:
    return Profile(
        settings=settings,
        machine="trial",
        processor=topology.processor,
        fingerprint=topology.fingerprint,
        num_cores=len(topology.cores),
        model=workload.model,
        batch_size=settings.batch_size or workload.batch_size,
    )


def trial_prefixes(environment: Mapping[str, str]) -> list[list[str]]:
    """Return the prefix of a trial's command for each node of the allocation; one empty prefix outside of one."""
    hosts = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
    if len(hosts) < 2:
        return [[]]
    # The job's own step holds the CPUs (--overlap), and the trial starts ranks itself (--mpi=none).
    srun = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--kill-on-bad-exit=1", "--mpi=none"]
    return [[*srun, f"--nodelist={host}", *own_program("hpcdl.tuning.trials")] for host in hosts]


def node_of(prefix: Sequence[str]) -> str:
    """Return the node of a prefix; empty for this one."""
    return next((word.partition("=")[2] for word in prefix if word.startswith("--nodelist=")), "")


def shed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without variables that make this process a rank of a job step."""
    return {name: value for name, value in environment.items() if not name.startswith(SHED)}


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], shed(os.environ))
