"""Ranks by plain mpiexec over the hosts of a file, for use without a scheduler that hpcdl knows."""

from __future__ import annotations

import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdl.cluster.launchers.base import Casualty, Launcher, expand_hosts, refuse_without_mpi, remaining
from hpcdl.cluster.launchers.mpiexec import CONTINUES, environment_for, find_mpiexec
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan
from hpcdl.core.storage.files import read_bytes

HOSTFILE_VARIABLE = "HPCDL_HOSTFILE"
PROBE_S = 10.0
"""Time limit for a node's answer."""
_HANDED_ON = re.compile(
    r"(?!_$|(?:OLD)?PWD$|SHLVL$|HOSTNAME$|DISPLAY$|XAUTHORITY$|XDG_RUNTIME_DIR$|XDG_SESSION_"
    r"|(?:SSH|DBUS|SLURM|PBS|LSB|LS|OMPI|PRTE|PMIX|PMI)_)[A-Za-z_][A-Za-z0-9_]*"
)
"""Variables that ranks on other nodes need, as MPICH's mpiexec and srun pass them. These are all of the user's, but not
those of this host, of this session or of a launcher. Open MPI must be given each name."""

_LOST_NODES = (
    re.compile(r"Remote daemon: \S+ on node (?P<host>\S+)"),  # Open MPI: lost communication with a remote daemon
    re.compile(r"^Connection to (?P<host>\S+) closed by remote host", re.MULTILINE),  # ssh
    re.compile(r"^Timeout, server (?P<host>\S+) not responding", re.MULTILINE),
    re.compile(r"^ssh: connect to host (?P<host>\S+) port", re.MULTILINE),
    re.compile(r"^ssh: Could not resolve hostname (?P<host>[^\s:]+)", re.MULTILINE),
)
_CASUALTIES = (
    re.compile(r"noticed that process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on"),  # Open MPI
    re.compile(r"=\s+PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)"),  # MPICH's hydra
)


def mpiexec_casualty(log: str) -> Casualty | None:
    """Return the first death that the mpiexec of Open MPI or of MPICH's family, or their ssh, reports."""
    for pattern in _LOST_NODES:
        if lost := pattern.search(log):
            return Casualty(lost_host=lost["host"])
    for pattern in _CASUALTIES:
        if match := pattern.search(log):
            groups = match.groupdict()
            return Casualty(
                rank=int(groups["rank"]) if "rank" in groups else None,
                pid=int(groups["pid"]) if "pid" in groups else None,
                host=groups["host"],
            )
    return None


def read_hosts(path: Path) -> list[str]:
    """Return the hosts of a host file, each once, in order.

    Each line has a name or a host list, then anything (`slots=2`, `:2`) meant for mpiexec; # starts a comment.
    Raises UsageError if the file cannot be read or names no host.
    """
    try:
        lines = read_bytes(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read host file {path} ({error}); name one host a line") from None
    hosts: dict[str, None] = {}
    for line in lines:
        fields = line.partition("#")[0].split()
        if fields:
            hosts |= dict.fromkeys(expand_hosts(fields[0].partition(":")[0]))
    if not hosts:
        raise UsageError(f"host file {path} names no host; write one a line")
    return list(hosts)


def mpiexec_line(
    plan: LaunchPlan, command: Sequence[str], hosts: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], Mapping[str, str]]:
    """Return the line for the mpiexec of the MPI in use over `hosts`, `plan.ranks_per_node` ranks on each, in order."""
    mpiexec = find_mpiexec()
    chosen = list(hosts)[: -(-plan.num_ranks // plan.ranks_per_node)]
    variables = environment_for(mpiexec.flavour)
    arguments = [str(mpiexec.path), *(CONTINUES if plan.continues else ()), "-n", str(plan.num_ranks)]
    if mpiexec.flavour == "openmpi":
        names = sorted(name for name in environment if _HANDED_ON.fullmatch(name))
        arguments += ["--host", ",".join(f"{host}:{plan.ranks_per_node}" for host in chosen)]
        arguments += ["--map-by", f"ppr:{plan.ranks_per_node}:node"]
        arguments += [word for name in names for word in ("-x", name)]
    else:
        arguments += ["-ppn", str(plan.ranks_per_node), "-hosts", ",".join(chosen)]
    return [*arguments, *command], variables


class MpiexecOverHosts(Launcher, ABC):
    """Base of launchers with hosts and an mpiexec, but no starter of their own."""

    name: str
    leaves_nodes_out = True
    continues = True
    leaves_others = False
    remote_shell: Sequence[str] = ("ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
    """Runs a command on a host, as mpiexec starts its ranks there."""

    @abstractmethod
    def all_hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the job's nodes."""

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the job's nodes on which ranks may start."""
        return remaining(self.all_hosts(environment), environment)

    def answering(self, left_out: Sequence[str], environment: Mapping[str, str]) -> set[str]:
        """Return the nodes that `remote_shell` reaches."""
        return {host for host in left_out if _answers([*self.remote_shell, host, "true"], environment)}

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return mpiexec over the hosts; a single rank runs here."""
        refuse_without_mpi(self.name, mpi)
        if plan.num_ranks == 1:
            return list(command), {}
        return mpiexec_line(plan, command, self.hosts(environment), {**os.environ, **environment})

    def first_casualty(self, log: str) -> Casualty | None:
        """Return the first death that mpiexec reports."""
        return mpiexec_casualty(log)


def _answers(line: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether `line` runs on its host without a password; PROBE_S limits the wait."""
    try:
        completed = subprocess.run(
            line, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_S, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return completed.returncode == 0


class Hostfile(MpiexecOverHosts):
    """`$HPCDL_HOSTFILE` names the file. Its hosts are reached by mpiexec's own means, usually ssh."""

    name = "hostfile"
    batch = ""

    def present(self, environment: Mapping[str, str]) -> bool:
        """Return whether the variable is set."""
        return bool(environment.get(HOSTFILE_VARIABLE))

    def all_hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the file's hosts."""
        named = environment.get(HOSTFILE_VARIABLE)
        if not named:
            raise UsageError(f"the launcher hostfile needs {HOSTFILE_VARIABLE}=FILE; name one host a line in FILE")
        return read_hosts(Path(named))


LAUNCHER = Hostfile()
