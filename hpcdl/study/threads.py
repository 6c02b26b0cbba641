"""A point's threads become a node profile, the way in which `hpcdl train` takes them."""

from __future__ import annotations

import math
from pathlib import Path

from hpcdl.node.profile import Profile, write_profile
from hpcdl.node.settings import Settings
from hpcdl.node.topology.machines import read_topology
from hpcdl.node.topology.model import Topology
from hpcdl.study.plan import Point


def profile_of_point(point: Point, folder: Path) -> Path | None:
    """The file in `folder` of a profile with the point's threads, made where it is missing; None without threads."""
    if point.threads is None:
        return None
    path = folder / f"{point.ranks_per_node}-ranks-{point.threads}-threads.toml"
    if not path.exists():
        topology = read_topology()
        profile = Profile(
            settings=thread_settings(point.threads, point.ranks_per_node, topology),
            machine="study",
            processor=topology.processor,
            fingerprint=topology.fingerprint,
            num_cores=len(topology.cores),
            model=point.model,
            batch_size=point.batch_size,
        )
        write_profile(profile, path)
    return path


def thread_settings(threads: int, ranks_per_node: int, topology: Topology) -> Settings:
    """Settings that give each rank `threads` threads on as few hardware threads of a core as that takes.

    Where even all hardware threads are too few, nothing is bound: oversubscription is then what is measured.
    """
    cores_each = len(topology.usable_cores) // ranks_per_node
    per_core = math.ceil(threads / cores_each) if cores_each else topology.threads_per_core + 1
    fits = per_core <= topology.threads_per_core
    return Settings(
        ranks_per_node=ranks_per_node,
        intra_op_threads=threads,
        threads_per_core=per_core if fits else 1,
        binding="balanced" if fits else "none",
    )
