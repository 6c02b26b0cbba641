"""What each of the two ranks does that `hpcdl doctor` starts: `mpiexec -n 2 python -m hpcdl.doctor.two_ranks`."""

from __future__ import annotations

import json
import sys

import numpy


def main() -> int:
    """Add 1 and 2 over two ranks; prints one JSON line, or what is wrong."""
    from hpcdl.comm.mpi.communicator import world
    from hpcdl.core.errors import HpcdlError

    try:
        communicator = world()
        total = numpy.array([communicator.rank + 1.0])
        communicator.allreduce(total)
    except HpcdlError as error:
        print(error, file=sys.stderr)
        return 1
    line = json.dumps({"size": communicator.size, "sum": int(total[0])}) + "\n"
    sys.stdout.write(line)  # at once: an unbuffered print writes the end of a line apart, and ranks share a pipe
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
