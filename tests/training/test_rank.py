"""What a rank says last."""

from __future__ import annotations

import pytest

from hpcdl.core.errors import HpcdlError
from hpcdl.training.session.rank import one_line, verdict

GRAPH = """Graph execution error:

Detected at node functional_1/probe_1/PyFunc defined at (most recent call last):
  File "rank.py", line 1, in <module>
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (HpcdlError("no room; add some"), "no room; add some"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (
            OSError(f"{GRAPH}ValueError: planted\nTraceback\n\t [[{{{{node x}}}}]]"),
            "OSError: ValueError: planted",
        ),
        (RuntimeError(f"{GRAPH}OOM when allocating\n\t [[{{{{node x}}}}]]"), "RuntimeError: OOM when allocating"),
    ],
)
def test_the_line_that_says_most(error: BaseException, line: str) -> None:
    assert one_line(error) == line


def test_a_lost_peer_behind_tensorflow_is_no_cause() -> None:
    error = RuntimeError(f"{GRAPH}RankError: rank 1 on node: MPI failed in wait: process_vm_readv failed (errno 3)")
    assert verdict(error)[0] == "bereaved"
    assert verdict(RuntimeError(f"{GRAPH}ValueError: planted"))[0] == "failed"
