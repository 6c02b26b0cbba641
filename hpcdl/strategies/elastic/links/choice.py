"""Which way leads a Hogwild worker to the center: shared memory, one-sided updates, or messages."""

from __future__ import annotations

from hpcdl.comm.mpi.one_sided import no_passive_progress
from hpcdl.strategies.base import Context
from hpcdl.strategies.elastic.center.rules import Rule
from hpcdl.strategies.elastic.links.base import Link
from hpcdl.strategies.elastic.links.hosted import HostedLink
from hpcdl.strategies.elastic.links.remote import RemoteLink
from hpcdl.strategies.elastic.links.shared import SharedLink


def lock_free_link(context: Context, rule: Rule) -> Link:
    """Shared memory where all workers are on one node; between nodes one-sided, where the MPI can. Collective."""
    group = context.communicator.duplicate()
    if len(set(group.allgather_json(group.host))) == 1:
        return SharedLink(group, rule)
    why = no_passive_progress(group)
    return HostedLink(context, group, rule, why) if why else RemoteLink(group, rule)
