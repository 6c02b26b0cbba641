"""A writing process: `python -m hpcdl.data.write.worker TARGET` takes `SPLIT NUMBER` lines, answers in JSON lines.

It dies with the process that started it, and ends when its input does.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Any

from hpcdl.core import signals
from hpcdl.core.errors import HpcdlError
from hpcdl.core.lifeline import end_with_parent
from hpcdl.data.sources.base import open_source
from hpcdl.data.write.index import Index
from hpcdl.data.write.job import WORK_NAME, read_job
from hpcdl.data.write.shards import ShardWriter


def main() -> None:
    """Write shards until the input ends."""
    parent = int(sys.argv[2])
    end_with_parent(parent)
    signals.ignore(signal.SIGINT, signal.SIGHUP)  # they reach the whole group; the parent decides
    target = Path(sys.argv[1])
    writer = open_writer(target)
    for line in sys.stdin:
        split, _, number = line.strip().rpartition(" ")
        try:
            result = writer.write(split, int(number), lambda count: _say({"samples": count}))
        except HpcdlError as error:
            _say({"error": str(error), "exit_code": error.exit_code, "type": type(error).__name__})
        except OSError as error:
            _say({"errno": error.errno, "error": error.strerror or str(error)})
        else:
            _say({"done": dataclasses.asdict(result)})


def open_writer(target: Path) -> ShardWriter:
    """The writer of the job that is kept in the target's work folder."""
    work = target / WORK_NAME
    job = read_job(work)
    return ShardWriter(target, job, open_source(job.spec), Index(work))


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
