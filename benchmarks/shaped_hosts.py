"""Run one MPI rank on each of several hosts with a shaped network: tests/lab's hosts, mpich's mpiexec. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conftest import ROOT
from tests.lab.hosts import LOGIN, Lab, lab_folder
from tests.lab.needs import missing

_REMOTE_SHELL = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
declare -A inits=({inits}) groups=({groups})
[[ -z ${{groups[$host]}} ]] || echo $$ > "${{groups[$host]}}/cgroup.procs"
exec nsenter --target "${{inits[$host]}}" --all --wd={root} -- /usr/bin/env -i {environment} bash -c "$*"
"""


def run_ranks(
    num_hosts: int,
    rate: str,
    mpiexec: Path,
    command: Sequence[str],
    timeout_s: float = 580.0,
    settings: Mapping[str, str] | None = None,
    cores: float = 0.0,
    delay_ms: float = 0.0,
) -> str:
    """Return the output of the ranks; each host's link carries `rate` (tc's spelling) each way, after `delay_ms`.

    `settings` are for the ranks' environment; `cores` is each host's share of the processors, 0 for all of them.
    """
    problem = missing("hosts") or (missing("delayed-hosts") if delay_ms else "")
    if problem:
        raise SystemExit(problem)
    with lab_folder() as folder:
        lab = Lab(folder, num_nodes=num_hosts, rate=rate, cores=cores, delay_ms=delay_ms)
        try:
            lab.start()
            return run_on(lab, mpiexec, command, timeout_s, settings or {})
        finally:
            lab.stop()


def run_on(lab: Lab, mpiexec: Path, command: Sequence[str], timeout_s: float, settings: Mapping[str, str]) -> str:
    flags = ["-launcher", "ssh", "-launcher-exec", str(_written_shell(lab, settings)), "-iface", "eth0", "-hosts"]
    return _run_from_login(lab, [str(mpiexec), *flags, *_on_all(lab), *command], timeout_s, settings)


def run_on_by_open_mpi(
    lab: Lab, mpirun: Path, command: Sequence[str], timeout_s: float, settings: Mapping[str, str]
) -> str:
    """Like `run_on`, for ranks of Open MPI: over TCP, on the hosts' own network, not bound to cores."""
    components = {
        "plm": "rsh", "plm_rsh_agent": str(_written_shell(lab, settings)), "plm_rsh_no_tree_spawn": "1",
        "pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": "eth0", "oob_tcp_if_include": "eth0",
    }  # fmt: skip
    flags = [word for name, value in components.items() for word in ("--mca", name, value)]
    root = ["--allow-run-as-root", "--bind-to", "none"]
    return _run_from_login(lab, [str(mpirun), *root, *flags, "--host", *_on_all(lab), *command], timeout_s, settings)


def _on_all(lab: Lab) -> list[str]:
    """Return the arguments for one rank on each host."""
    return [",".join(lab.nodes), "-n", str(len(lab.nodes))]


def _run_from_login(lab: Lab, line: Sequence[str], timeout_s: float, settings: Mapping[str, str]) -> str:
    # mpiexec runs in the login host's network, but sees all processes: it must enter the other hosts' namespaces.
    enter = ["nsenter", "--target", str(lab.inits[LOGIN]), "--net", "--uts", "--"]
    finished = subprocess.run(
        [*enter, *line], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT,
        env={**os.environ, **settings},
    )  # fmt: skip
    if finished.returncode:
        raise SystemExit(f"the ranks failed:\n{finished.stdout}\n{finished.stderr}")
    return finished.stdout


def _written_shell(lab: Lab, settings: Mapping[str, str]) -> Path:
    system_path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    environment = {"PATH": system_path, "HOME": "/root", "PYTHONPATH": str(ROOT), **settings}
    path = lab.shared / "remote-shell"  # Open MPI's daemons check that it exists
    inits = " ".join(f"[{host}]={pid}" for host, pid in lab.inits.items())
    values = " ".join(f"{name}={value}" for name, value in environment.items())
    groups = " ".join(f"[{host}]={group}" for host, group in lab.groups.items())
    path.write_text(_REMOTE_SHELL.format(inits=inits, groups=groups, root=ROOT, environment=values))
    path.chmod(0o700)
    return path
