"""What a rank says last."""

from __future__ import annotations

import pytest

from hpcdl.core.errors import HpcdlError
from hpcdl.training.session.rank import one_line

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
