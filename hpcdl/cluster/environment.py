"""This process's rank, from its launcher's variables, and the address at which other ranks can reach it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

OWN_LAUNCHER = "hpcdl"
"""Ranks that hpcdl started itself, without MPI."""
WITHOUT_MPI_VARIABLE = "HPCDL_WITHOUT_MPI"
"""Set for ranks that hpcdl starts, by any launcher, for a strategy without MPI."""
# Each launcher's variables for rank, size, local rank and local size; the first with rank and size set counts.
_VARIABLES = (
    # These ranks are all on one node, where rank and local rank are the same.
    (OWN_LAUNCHER, "HPCDL_RANK", "HPCDL_SIZE", "HPCDL_RANK", "HPCDL_SIZE"),
    ("openmpi", *(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("mvapich", *(f"MV2_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)  # fmt: skip
LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE = "HPCDL_ADDRESS"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The position of this process among the ranks, as `launcher` counts them."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def placement(environment: Mapping[str, str] = os.environ) -> Placement | None:
    """Return this process's placement, or None outside any launcher."""
    if of_flux := _of_flux(environment):
        return of_flux
    for launcher, rank, size, local_rank, local_size in _VARIABLES:
        if launcher == "slurm" and not _in_step(environment):
            continue  # a batch script or an interactive shell: no step, no ranks
        if rank in environment and size in environment:
            return Placement(
                launcher=launcher,
                rank=int(environment[rank]),
                size=int(environment[size]),
                # srun --mpi=pmi2 sets PMI_RANK but leaves local rank and size to Slurm's own variables.
                local_rank=int(environment.get(local_rank) or _of_slurm(environment, "SLURM_LOCALID", "0")),
                local_size=_leading_number(
                    environment.get(local_size) or _of_slurm(environment, "SLURM_STEP_TASKS_PER_NODE", "1")
                ),
            )
    return None


def unused_components(environment: Mapping[str, str] = os.environ) -> str:
    """Return a remark for a heterogeneous job of Slurm, whose other components get no ranks; else empty."""
    count = environment.get("SLURM_HET_SIZE", "")
    if not count.isdigit() or int(count) < 2:
        return ""
    return f"this job has {count} components (heterogeneous), and srun starts ranks on the nodes of the first one only"


def _of_flux(environment: Mapping[str, str]) -> Placement | None:
    """Return the placement in `flux run`, whose PMI_RANK lacks local ranks; tasks are spread evenly over the nodes.

    None if a launcher inside the task started this process.
    """
    names = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    if any(name not in environment for name in names) or "OMPI_COMM_WORLD_RANK" in environment:
        return None
    if "HPCDL_RANK" in environment or "MPI_LOCALRANKID" in environment:
        return None
    rank, size, local_rank, nodes = (int(environment[name]) for name in names)
    return Placement(launcher="flux", rank=rank, size=size, local_rank=local_rank, local_size=-(-size // max(nodes, 1)))


def _of_slurm(environment: Mapping[str, str], name: str, default: str) -> str:
    """Return a variable of Slurm's step; the default in a batch script, whose own step has one task."""
    return environment.get(name, default) if _in_step(environment) else default


def _in_step(environment: Mapping[str, str]) -> bool:
    # Steps from 4294967290 up are batch scripts and interactive shells (launchers/slurm.py).
    return not environment.get("SLURM_STEP_ID", "4294967290").startswith("42949672")


def own_placement(rank: int, size: int) -> dict[str, str]:
    """Return the variables for ranks on one node that hpcdl starts itself, without MPI."""
    return {"HPCDL_RANK": str(rank), "HPCDL_SIZE": str(size)}


def _leading_number(text: str) -> int:
    """Return 4 for Slurm's `4(x2),3`."""
    digits = text.split("(")[0].split(",")[0]
    return int(digits) if digits.isdigit() else 1


def job_address(process: Placement, environment: Mapping[str, str] = os.environ) -> str:
    """Return the IPv4 address of this rank on the job's network.

    It is the loopback if all ranks are on one node; else `$HPCDL_ADDRESS` (to choose an interface), else the address of
    this node's name, else the interface that leads to the node that started the job.
    """
    if process.local_size >= process.size:
        return LOOPBACK
    named = environment.get(ADDRESS_VARIABLE)
    if named:
        return named
    address = _resolved(socket.gethostname())
    if address and not address.startswith("127."):
        return address
    # 192.0.2.1 is reserved for documentation (RFC 5737): it stands for any address beyond this network.
    return _interface_towards(environment.get("SLURM_LAUNCH_NODE_IPADDR", "192.0.2.1"))


def _resolved(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _interface_towards(address: str) -> str:
    """Return the source address of packets to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
