"""The batch system, the interface between its srun and the MPI, and the clocks of the job's hosts."""

from __future__ import annotations

import re
import time

from hpcdl.cluster.batch.script import batch_launcher
from hpcdl.cluster.batch.systems import call
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.launchers.mpiexec import mpi_flavour
from hpcdl.cluster.launchers.slurm import PMI_BY_FLAVOUR, PMI_VARIABLE, srun_mpi
from hpcdl.cluster.processes import on_every_node
from hpcdl.core.errors import HpcdlError
from hpcdl.core.units import format_seconds
from hpcdl.doctor.table import Finding, Subject, failure, ok, warning

TOLERATED_CLOCK_S, DANGEROUS_CLOCK_S = 0.5, 2.0
CLOCKS_TIMEOUT_S = 30.0
ASK_CLOCK = 'echo "clock $(hostname) $(date +%s.%N)"'


def check_scheduler(subject: Subject) -> list[Finding]:
    """Report the launcher in use, that of `hpcdl submit`, and the PMI between srun and the MPI."""
    here, submitted = find_launcher(subject.environment).name, batch_launcher(subject.environment)
    findings = [ok(f"ranks start here by {here}; `hpcdl submit` uses {submitted}")]
    return [*findings, *_pmi(subject)] if submitted in ("slurm", "ibrun") else findings


def _pmi(subject: Subject) -> list[Finding]:
    try:
        flavour = mpi_flavour()
    except HpcdlError:
        return []  # the check of MPI reports it
    try:
        kinds = _known(call(["srun", "--mpi=list"]))
    except HpcdlError as error:
        remedy = "ask the site's staff; outside jobs of Slurm ranks start by mpiexec on this node"
        return [warning(f"srun is there, but {error}", remedy)]
    needed = srun_mpi(flavour, subject.environment)
    if needed not in kinds:
        text = f"{flavour} needs srun --mpi={needed}, and this srun knows {', '.join(sorted(kinds)) or 'none'}"
        remedy = (
            f"install an MPI of the other kind, or set {PMI_VARIABLE} to the interface that {flavour} was built for"
        )
        return [failure(text, remedy)]
    # `pmix` and `pmix_v4` are versions of one interface.
    if needed.partition("_")[0] != PMI_BY_FLAVOUR[flavour].partition("_")[0]:
        text = (
            f"{PMI_VARIABLE}={needed}, but {flavour} usually needs {PMI_BY_FLAVOUR[flavour]}: ranks may not be one job"
        )
        return [failure(text, f"unset {PMI_VARIABLE}")]
    return [ok(f"srun --mpi={needed} for {flavour}")]


def _known(text: str) -> set[str]:
    """Return the names in the output of `srun --mpi=list`: one per line, or `srun: pmix`, after a heading."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    return {line for line in lines if re.fullmatch(r"[a-z0-9_]+", line)}


def check_clocks(subject: Subject) -> list[Finding]:
    """Compare the time of every host of the job, allowing for the duration of the request."""
    launcher = find_launcher(subject.environment)
    hosts = launcher.hosts(subject.environment)
    if len(hosts) < 2:
        return [ok("one host: nothing to compare")]
    command, what = ["bash", "-c", ASK_CLOCK], "asking the hosts for their clocks"
    wall_began_s, began_s = time.time(), time.monotonic()
    answer = on_every_node(launcher, len(hosts), command, subject.environment, timeout_s=CLOCKS_TIMEOUT_S, what=what)
    wall_ended_s, took_s = time.time(), time.monotonic() - began_s
    if abs(wall_ended_s - wall_began_s - took_s) > TOLERATED_CLOCK_S:
        how = (
            "the clock of this host was set by "
            f"{format_seconds(abs(wall_ended_s - wall_began_s - took_s))} while others were asked"
        )
        return [warning(how, "run `hpcdl doctor` again")]
    return [_judge(read_clocks(answer), wall_began_s, wall_began_s + took_s, len(hosts))]


def read_clocks(answer: str) -> dict[str, float]:
    """Return each host's time, in Unix seconds."""
    lines = [line.split() for line in answer.splitlines()]
    return {line[1]: float(line[2]) for line in lines if len(line) == 3 and line[0] == "clock"}


def _judge(clocks: dict[str, float], began: float, ended: float, num_hosts: int) -> Finding:
    remedy = "ask the site's staff to look at chronyd or ntpd on that host"
    if len(clocks) < num_hosts:
        return warning(f"{len(clocks)} of {num_hosts} hosts reported their time", "run `sinfo`; a host may be down")
    off = {host: off_by(clock, began, ended) for host, clock in clocks.items()}
    host, seconds = max(off.items(), key=lambda item: abs(item[1]))
    if abs(seconds) <= TOLERATED_CLOCK_S:
        return ok(f"{num_hosts} hosts agree within {format_seconds(ended - began)}")
    text = f"the clock of {host} is {'ahead' if seconds > 0 else 'behind'} by {format_seconds(abs(seconds))} or more"
    return (failure if abs(seconds) > DANGEROUS_CLOCK_S else warning)(text, remedy)


def off_by(clock: float, began: float, ended: float) -> float:
    """Return the least seconds by which `clock`, read between `began` and `ended`, is ahead (negative: behind)."""
    return clock - ended if clock > ended else clock - began if clock < began else 0.0
