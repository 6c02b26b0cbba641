"""The all-reduces by name; each is a strategy of the same name."""

from __future__ import annotations

from hpcdl.core.registry import Entry, Registry

COLLECTIVES = Registry(
    "all-reduce",
    {
        "ring": Entry(
            target="hpcdl.collectives.ring:allreduce",
            summary="Each rank passes pieces to its neighbour on a ring: fewest bytes, in 2(p-1) rounds.",
        ),
        "tree": Entry(
            target="hpcdl.collectives.tree:allreduce",
            summary="A binomial tree sums towards rank 0, then broadcasts the result.",
        ),
        "recursive-doubling": Entry(
            target="hpcdl.collectives.recursive_doubling:allreduce",
            summary="Partners at doubling distances swap whole messages: fewest rounds, best for short messages.",
        ),
        "halving-doubling": Entry(
            target="hpcdl.collectives.halving_doubling:allreduce",
            summary="Rabenseifner's: ranks swap halves, then quarters, and back: fewest bytes, in 2 log2(p) rounds.",
        ),
        "hierarchical": Entry(
            target="hpcdl.collectives.hierarchical:allreduce",
            summary="Sums in shared memory within each node, then over rings between nodes.",
        ),
        "mpi": Entry(
            target="hpcdl.collectives.mpi:allreduce",
            summary="The MPI library's own Allreduce.",
        ),
        "auto": Entry(
            target="hpcdl.collectives.auto:allreduce",
            summary="For each message size, the all-reduce that was measured fastest on this machine.",
        ),
    },
)
"""`load(name)` returns the function `allreduce(communicator, buffer, workspace)`; its module also has `cost`."""
