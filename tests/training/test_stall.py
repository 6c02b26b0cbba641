"""Who holds an exchange up: the judgement, and the watching thread with short times."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from hpcdl.core.errors import RankError
from hpcdl.core.events import Whereabouts
from hpcdl.core.files import write_text
from hpcdl.training.session.stall import Note, StallWatch, culprit
from tests.conftest import patience

HOSTS = ["a", "b", "c"]


def note(rank: int, step: int = 5, bucket: int = 2, doing: str = "exchanging") -> Note:
    return Note(rank=rank, host=HOSTS[rank], step=step, bucket=bucket, doing=doing, since=0.0, at=1.0)


def waiting() -> Whereabouts:
    whereabouts = Whereabouts()
    whereabouts.beat("exchanging", step=5, bucket=2)
    return whereabouts


@pytest.mark.parametrize(
    ("notes", "rank", "words"),
    [
        ({0: note(0), 2: note(2)}, 1, "gives no sign of life"),
        (
            {0: note(0), 1: note(1), 2: note(2, bucket=-1, doing="reading a batch")},
            2,
            "not in the exchange but reading a batch",
        ),
        ({0: note(0), 1: note(1, step=4), 2: note(2)}, 1, "is behind, in step 4"),
        ({rank: note(rank) for rank in range(3)}, 0, "network or the MPI hangs"),
    ],
)
def test_the_culprit_is_named(notes: dict[int, Note], rank: int, words: str) -> None:
    error = culprit(notes, HOSTS, waiting(), 3.0)
    assert error.rank == rank
    assert words in str(error)
    assert "step 5, bucket 2" in str(error)


def test_the_rank_that_sleeps_is_found(tmp_path: Path) -> None:
    """Two ranks wait in an exchange, the third leaves no note: the lowest of the two speaks, once."""
    said: list[RankError] = []
    watches = [
        StallWatch(waiting(), tmp_path, rank=rank, hosts=HOSTS, timeout_s=0.4, on_stall=said.append) for rank in (0, 2)
    ]
    for watch in watches:
        watch.start()
    deadline = time.monotonic() + patience(15)
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
    for watch in watches:
        watch.stop()
    assert said
    assert said[0].rank == 1


def test_an_old_note_is_no_sign_of_life(tmp_path: Path) -> None:
    """Rank 1 has waited once, in its first step; now it sleeps."""
    write_text(tmp_path / "position-1.json", json.dumps(asdict(note(1, step=0)) | {"at": time.time() - 0.1}))
    said: list[RankError] = []
    watch = StallWatch(waiting(), tmp_path, rank=0, hosts=HOSTS[:2], timeout_s=0.4, on_stall=said.append)
    watch.start()
    deadline = time.monotonic() + patience(15)
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
    watch.stop()
    assert said[0].rank == 1
    assert "gives no sign of life" in str(said[0])


def test_a_run_that_moves_leaves_no_notes(tmp_path: Path) -> None:
    whereabouts = waiting()
    watch = StallWatch(
        whereabouts, tmp_path, rank=0, hosts=HOSTS, timeout_s=0.5, on_stall=lambda error: pytest.fail(str(error))
    )
    watch.start()
    for step in range(20):
        whereabouts.beat("exchanging", step=step, bucket=0)
        time.sleep(0.05)
    watch.stop()
    assert not list(tmp_path.iterdir())
