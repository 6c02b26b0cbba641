"""Slurm on the lab's hosts: controller and munge on `login`, one slurmd on each node, all files in the lab's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import Finished
from tests.lab.hosts import ADDRESSES, LOGIN, USER, Lab, wait_until

_CONFIG = """
ClusterName=lab
SlurmctldHost={login}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=15
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault={mpi_default}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=100000,batch_sched_delay=1
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.log
ReturnToService=2
KillWait=5
OverTimeLimit=0
MinJobAge=600
FirstJobId={first_job}
SlurmctldTimeout=30
SlurmdTimeout={node_timeout_s}
InactiveLimit=0
NodeName=DEFAULT CPUs={cpus} CoresPerSocket={cpus} RealMemory=4000 State=UNKNOWN
NodeName=node[1-{num_nodes}] NodeAddr={network}.[1-{num_nodes}]
PartitionName=main Nodes=ALL Default=YES MaxTime=1440 DefaultTime=10 State=UP
"""


@dataclass
class SlurmLab(Lab):
    """A lab whose nodes are a Slurm cluster. `run(["sbatch", ...], user="student")` works as on a login node."""

    cpus_per_node: int = 4
    mpi_default: str = "pmix"
    first_job: int = 1
    node_timeout_s: int = 10
    """Seconds of silence after which a node counts as down."""

    @property
    def slurm(self) -> Path:
        """The folder of Slurm's own files."""
        return self.shared / "slurm"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.slurm / "slurm.conf")}

    def start(self) -> None:
        """Boot the hosts, then the daemons; return when every node is idle."""
        super().start()
        for name in ("state", "spool", "log", "run"):
            (self.slurm / name).mkdir(parents=True)
        self._configure()
        key, log, run = self.slurm / "munge.key", self.slurm / "log", self.slurm / "run"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = ["munged", "--force", f"--key-file={key}", f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid"]
        self._daemon(LOGIN, *munge, f"--log-file={log}/munged.log", f"--seed-file={run}/munge.seed")
        self._daemon(LOGIN, "slurmctld", "-i")
        for node in self.nodes:
            self.start_node(node)
        wait_until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "every node is idle")

    def start_node(self, node: str) -> None:
        """Start slurmd on a running host."""
        (self.slurm / "spool" / node).mkdir(exist_ok=True)
        self._daemon(node, "slurmd", "-N", node)

    def start_again(self, node: str) -> None:
        """Boot a host that was lost, with its slurmd."""
        self.boot_again(node)
        self.start_node(node)

    def states(self) -> dict[str, str]:
        """Return the state of every node in sinfo's words."""
        finished = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"])
        return dict(line.split() for line in finished.out.splitlines())

    def submit(self, script: Path, *options: str, user: str = USER, cwd: Path | None = None) -> int:
        """Submit `script` with sbatch; return the job number."""
        finished = self.run(["sbatch", "--parsable", *options, script], user=user, cwd=cwd)
        assert finished.code == 0, finished.err
        return int(finished.out.split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """Return what scontrol knows of a job: JobState, ExitCode, Restarts, NodeList, ..."""
        finished = self.run(["scontrol", "--oneliner", "show", "job", str(number)])
        assert finished.code == 0, finished
        return dict(re.findall(r"(\S+?)=(\S*)", finished.out))

    def wait_for_job(self, number: int, *, timeout_s: float = 300.0) -> dict[str, str]:
        """Return the job when it has ended in any way."""
        done = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
        wait_until(lambda: self.job(number)["JobState"] in done, f"job {number} ends", timeout_s)
        return self.job(number)

    def cancel_all(self) -> None:
        """Cancel every job, so that the next test finds an empty queue."""
        self.run(["scancel", "--user", USER])
        self.run(["scancel", "--user", "root"])
        wait_until(lambda: not self.run(["squeue", "--noheader"]).out.strip(), "the queue is empty", 60)

    def _configure(self) -> None:
        text = _CONFIG.format(
            login=LOGIN,
            address=ADDRESSES[LOGIN],
            network=ADDRESSES[LOGIN].rpartition(".")[0],
            folder=self.slurm,
            num_nodes=self.num_nodes,
            cpus=self.cpus_per_node,
            mpi_default=self.mpi_default,
            first_job=self.first_job,
            node_timeout_s=self.node_timeout_s,
        )
        (self.slurm / "slurm.conf").write_text(text)
        (self.slurm / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def _daemon(self, host: str, *line: str) -> None:
        finished: Finished = self.run(line, host=host)
        if finished.code:
            raise RuntimeError(f"{line[0]} on {host}: {finished.err}")
