"""The all-reduces by name; each is a strategy of the same name."""

from __future__ import annotations

from hpcdl.core.registry import Entry, Registry

COLLECTIVES = Registry(
    "all-reduce",
    {
        "ring": Entry(
            target="hpcdl.collectives.ring:allreduce",
            summary="Neighbours on a ring pass pieces on: least bytes, 2(p-1) rounds.",
        ),
        "tree": Entry(
            target="hpcdl.collectives.tree:allreduce",
            summary="A binomial tree sums towards rank 0, then spreads the result.",
        ),
        "recursive-doubling": Entry(
            target="hpcdl.collectives.recursive_doubling:allreduce",
            summary="Partners at doubling distance swap everything: fewest rounds, for short messages.",
        ),
        "halving-doubling": Entry(
            target="hpcdl.collectives.halving_doubling:allreduce",
            summary="Rabenseifner's: swap halves, quarters, ... and back: least bytes in 2 log2(p) rounds.",
        ),
        "hierarchical": Entry(
            target="hpcdl.collectives.hierarchical:allreduce",
            summary="Sum in shared memory inside each node, then rings between the nodes.",
        ),
        "mpi": Entry(
            target="hpcdl.collectives.mpi:allreduce",
            summary="The MPI library's own Allreduce.",
        ),
        "auto": Entry(
            target="hpcdl.collectives.auto:allreduce",
            summary="For each size the one that was measured fastest on this machine.",
        ),
    },
)
"""`load(name)` returns the function `allreduce(communicator, buffer, workspace)`; its module also has `cost`."""
