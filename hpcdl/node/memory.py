"""Sets where a process takes its memory from, as numactl does, without numactl."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Sequence

from hpcdl.core.errors import HpcdlError
from hpcdl.node.topology.cpusets import format_list

MODES = {"default": 0, "preferred": 1, "membind": 2, "interleave": 3, "preferred-many": 5}
"""set_mempolicy(2): MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND, MPOL_INTERLEAVE, MPOL_PREFERRED_MANY (Linux >= 5.15)."""
SYSTEM_CALLS = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
MEMORY_POLICY = "HPCDL_MEMORY_POLICY"
"""A launch plan's environment has the policy and the memory nodes of each local rank here, as JSON."""
_BITS = 1024


def apply_planned(local_rank: int) -> None:
    """Apply what the launch plan that started this process has for `local_rank`; nothing where it has nothing."""
    planned = os.environ.get(MEMORY_POLICY)
    if planned:
        policy, nodes = json.loads(planned)
        apply_memory_policy(policy, nodes[local_rank % len(nodes)])


def apply_memory_policy(policy: str, nodes: Sequence[int]) -> None:
    """Take the memory of this process, its threads to come and its children by `policy` from `nodes`.

    Must come before the memory is touched. HpcdlError where the kernel refuses: no such node, or outside the cpuset.
    """
    number = SYSTEM_CALLS.get(platform.machine())
    if policy == "default" or number is None:
        return
    if policy == "preferred" and len(nodes) > 1:
        policy = "preferred-many"
    words = (ctypes.c_ulong * (_BITS // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, MODES[policy], words, _BITS + 1) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise HpcdlError(
            f"memory policy {policy} on NUMA nodes {format_list(nodes)} refused by the kernel ({reason}); "
            "use --profile none, or tune this node anew with `hpcdl tune-threads`"
        )
