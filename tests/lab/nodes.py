"""This checkout's hpcdl over the nodes of a lab's Slurm cluster, for callers of CommandLine.start."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.lab import ssh
from tests.lab.desk import Desk
from tests.lab.hosts import LOGIN, NETWORK, lab_folder
from tests.lab.slurm import SlurmLab

TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": f"{NETWORK}.0/24"}
"""Settings for TCP: the lab's hosts share a kernel, and Open MPI 5 must not use its shared memory."""


def hostfile_environment(path: Path, library: str) -> dict[str, str]:
    """Return the environment of a run over the hosts of `path`; UCX must not use the kernel's shared memory either."""
    own = {"MPI4PY_LIBMPI": library} if library else {}
    return {"HPCDL_HOSTFILE": str(path), "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", **own}


class OnNodes:
    """Start each run in an allocation of all nodes (salloc), or with `by_ssh` by mpiexec on them."""

    def __init__(self, lab: SlurmLab, *, by_ssh: bool) -> None:
        folder = lab.shared / "desk"
        folder.mkdir()
        self._desk, self._by_ssh = Desk(lab, folder), by_ssh
        (folder / "hosts").write_text("".join(f"{node}\n" for node in lab.nodes))

    def start(
        self, arguments: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `hpcdl ARGUMENTS`, whose files must be visible on every node, for `finish`."""
        lab, desk, environment = self._desk.lab, self._desk, {**self._desk.environment, **TCP, **(env or {})}
        line, host = desk.line(*map(str, arguments)), LOGIN
        if self._by_ssh:
            host = lab.nodes[0]
            environment |= hostfile_environment(desk.folder / "hosts", environment.get("MPI4PY_LIBMPI", ""))
        else:
            environment |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
            line = ["salloc", "--quiet", f"--nodes={len(lab.nodes)}", "--exclusive", "--time=60", *line]
        return subprocess.Popen(
            lab.command(line, host=host, cwd=cwd or desk.folder, env=environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.defpath},
        )


@contextlib.contextmanager
def on_nodes(num_nodes: int, *, by_ssh: bool) -> Iterator[OnNodes]:
    """A cluster for the duration of the context."""
    with lab_folder() as folder:
        lab = SlurmLab(folder, num_nodes=num_nodes)
        try:
            lab.start()
            if by_ssh:
                ssh.start(lab)
            yield OnNodes(lab, by_ssh=by_ssh)
        finally:
            lab.stop()
