"""Where this rank can be reached by the others: the job's own interface, never all of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from hpcdl.cluster.environment import Placement

LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE = "HPCDL_ADDRESS"


def job_address(place: Placement, environment: Mapping[str, str] = os.environ) -> str:
    """IPv4 address of this rank on the job's network.

    The loopback where all ranks are on one node; else `$HPCDL_ADDRESS` (to pick an interface), else what this node's
    name stands for, else the interface that leads to the node that the job was started from.
    """
    if place.local_size >= place.size:
        return LOOPBACK
    named = environment.get(ADDRESS_VARIABLE)
    if named:
        return named
    own = _resolved(socket.gethostname())
    if own and not own.startswith("127."):
        return own
    return _interface_towards(environment.get("SLURM_LAUNCH_NODE_IPADDR", "192.0.2.1"))


def _resolved(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _interface_towards(address: str) -> str:
    """The address that packets to `address` would come from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
