"""The profile of `hpcdl tune-threads` that a training on this node would use."""

from __future__ import annotations

from hpcdl.doctor.finding import Finding, Subject, ok, warning
from hpcdl.node.profile import find_profile
from hpcdl.node.topology.machines import read_topology

CHECK = "profile"


def check(subject: Subject) -> list[Finding]:
    """The profile, or the advice to make one."""
    topology = read_topology()
    profile = find_profile("auto", subject.model, topology)
    if profile is not None:
        return [ok(CHECK, profile.sentence)]
    text = f"no profile fits this node ({topology.summary}): threads are shared out evenly"
    return [warning(CHECK, text, "hpcdl tune-threads --model M --batch-size B")]
