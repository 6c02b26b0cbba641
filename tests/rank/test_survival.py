"""Repeated random failures in one run: it ends as the undisturbed one does, and takes every sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.lab.needs import DEBIAN_OPEN_MPI
from tests.rank.survival import Strike, Trial, recoveries, samples_of

EPOCHS, STRIKES = 15, 6
MPIS = [
    "mpich",
    pytest.param("open-mpi", marks=pytest.mark.lab("open-mpi")),
    pytest.param("open-mpi-5", marks=pytest.mark.lab("open-mpi-5")),
]


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a run under the MPI that is the parameter."""
    if request.param == "mpich":
        return {}
    library = DEBIAN_OPEN_MPI
    if request.param == "open-mpi-5":
        library = request.getfixturevalue("open_mpi_5") / "lib" / "libmpi.so.40"
    return {"MPI4PY_LIBMPI": str(library)}


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "servers"), [("ring", 0), ("ps", 2), ("async-easgd", 2)])
@pytest.mark.parametrize("environment", MPIS, indirect=True)
def test_a_run_that_loses_ranks_again_and_again_is_the_undisturbed_one(
    environment: dict[str, str], session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str, servers: int
) -> None:
    """A run with repeated losses equals the undisturbed one; servers are struck too.

    Workers that do not step together reach the same accuracy with other samples.
    """
    trial = Trial(
        hpcdl=session_hpcdl, data=shards, folder=tmp_path, ranks=3 + servers, epochs=EPOCHS, environment=environment,
        servers=servers, strategy=strategy,
    )  # fmt: skip
    found = trial.struck(trial.undisturbed(), STRIKES, seed=0)
    assert not found.problems
    assert len(found.strikes) >= STRIKES and found.recovered


def test_what_strikes_is_held_against_what_made_it_good() -> None:
    """Strikes are matched with recoveries: one in place; two at once followed by new ranks, of which one is lost."""
    reported = [
        {"kind": "step", "at": 9.0},
        {"kind": "message", "at": 11.5, "text": "", "recovery": {"lost": [1], "seconds": {"detect": 0.5}}},
        {"kind": "message", "at": 22.0, "text": "rank 0 on a ended; new ranks continue after step 7"},
        {"kind": "message", "at": 26.0, "text": "rank 2 on a ended; new ranks continue after step 7"},
        {"kind": "start", "at": 30.0},
        {"kind": "step", "at": 31.0},
        {"kind": "step", "at": 32.0},
    ]
    struck = [Strike(at=at, rank=rank, kind=kind) for at, rank, kind in [
        (11.0, 1, "kill"), (20.0, 0, "kill"), (20.1, 2, "kill"), (24.0, 2, "stop"),
    ]]  # fmt: skip
    in_place, again = recoveries(reported, struck)
    assert (in_place.way, in_place.failures, in_place.seconds, in_place.parts) == ("in place", 1, 0.5, {"detect": 0.5})
    assert (again.way, again.failures, again.seconds) == ("new ranks, one was stopped", 3, 11.0)
    assert again.parts == {"end": 6.0, "start": 4.0, "step": 1.0}
    assert [one.failures for one in recoveries(reported, [])] == [0, 0], "nothing had struck"


def test_a_step_counts_as_its_last_try_took_it(tmp_path: Path) -> None:
    """The last try of a step counts: three ranks begin it, two repeat it, one of them twice, and a line breaks off."""
    mine, other = [*range(24)], [*range(24, 48)]
    notes = {
        0: [(1.0, mine[:16]), (2.0, mine)],
        1: [(1.0, mine[16:] + other[:8])],
        2: [(1.1, other[8:]), (1.9, mine), (2.1, other)],
    }
    for rank, tries in notes.items():
        lines = [f'\n{{"step": 3, "at": {at}, "images": {images}}}\n' for at, images in tries]
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(lines) + '\n{"step": 4, "at"')
    assert samples_of(tmp_path) == {3: [*range(48)]}
