"""Clocks of the job's hosts: files' times, certificates and traces go wrong where they differ."""

from __future__ import annotations

import time

from hpcdl.cluster.launchers.table import find_launcher
from hpcdl.cluster.processes import run
from hpcdl.core.protocols import LaunchPlan
from hpcdl.core.units import format_seconds
from hpcdl.doctor.finding import Finding, Subject, failure, ok, warning

CHECK = "clocks"
TOLERATED_S, DANGEROUS_S = 0.5, 2.0
TIMEOUT_S = 30.0
ASK = 'echo "clock $(hostname) $(date +%s.%N)"'


def check(subject: Subject) -> list[Finding]:
    """Ask every host of the job for its time; what the asking itself took is taken off."""
    launcher = find_launcher(subject.environment)
    hosts = launcher.hosts(subject.environment)
    if len(hosts) < 2:
        return [ok(CHECK, "one host: nothing to compare")]
    plan = LaunchPlan(num_ranks=len(hosts), ranks_per_node=1)
    environment = subject.environment
    line, needed = launcher.line(plan, ["bash", "-c", ASK], mpi=launcher.name != "slurm", environment=environment)
    began = time.time()
    answer = run(line, {**environment, **needed}, timeout_s=TIMEOUT_S, what="asking the hosts for their clocks")
    ended = time.time()
    return [_judge(read(answer), began, ended, len(hosts))]


def read(answer: str) -> dict[str, float]:
    """Each host's time, in Unix seconds."""
    words = [line.split() for line in answer.splitlines()]
    return {line[1]: float(line[2]) for line in words if len(line) == 3 and line[0] == "clock"}


def _judge(clocks: dict[str, float], began: float, ended: float, num_hosts: int) -> Finding:
    remedy = "ask the site's staff to look at chronyd or ntpd on that host"
    if len(clocks) < num_hosts:
        return warning(CHECK, f"{len(clocks)} of {num_hosts} hosts told their time", "run `sinfo`; a host may be down")
    off = {host: off_by(clock, began, ended) for host, clock in clocks.items()}
    host, seconds = max(off.items(), key=lambda item: abs(item[1]))
    if abs(seconds) <= TOLERATED_S:
        return ok(CHECK, f"{num_hosts} hosts agree within {format_seconds(ended - began)}")
    text = f"the clock of {host} is {'ahead' if seconds > 0 else 'behind'} by {format_seconds(abs(seconds))}"
    return (failure if abs(seconds) > DANGEROUS_S else warning)(CHECK, text, remedy)


def off_by(clock: float, began: float, ended: float) -> float:
    """Seconds by which `clock`, read some time from `began` to `ended`, is surely ahead (or behind, negative)."""
    return clock - ended if clock > ended else clock - began if clock < began else 0.0
