"""`hpcdl bench input`: combined results of ranks, and twice as users run it on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.bench.input import RankReading, Reading, combined
from hpcdl.config.schema import InputBenchRun
from hpcdl.data.format.dataset import FileOperations
from tests.conftest import CommandLine
from tests.data.sharding import make


def reading(seconds: float) -> Reading:
    return Reading(seconds=seconds, num_bytes=4000, waits=[seconds / 4] * 4)


def rank(number: int, seconds: float, utilisation: float) -> RankReading:
    return RankReading(
        rank=number,
        host=f"node{number // 2}",
        stored=reading(seconds),
        delivered=reading(2 * seconds),
        utilisation=utilisation,
        operations=[FileOperations(opens=1 + number, stats=5), FileOperations(opens=6, stats=3)],
    )


def test_what_ranks_have_measured_in_one() -> None:
    wanted = InputBenchRun(ranks=3, batch_size=10, steps=4, step_ms=250.0)
    result = combined("data", wanted, [rank(0, 1.0, 0.97), rank(1, 4.0, 0.85), rank(2, 2.0, 0.94)], 0.5)
    assert (result.ranks, result.nodes, result.step_seconds) == (3, 2, 0.25)
    stored = result.stored
    assert (stored.samples_per_second, stored.bytes_per_second) == (3 * 40 / 4.0, 3 * 4000 / 4.0), "until the last"
    assert (stored.slowest.rank, stored.slowest.host, stored.slowest.samples_per_second) == (1, "node0", 10.0)
    assert (stored.median_samples_per_second, stored.slowest.of_median) == (20.0, 0.5)
    assert (stored.fastest.rank, stored.fastest.of_median, stored.fastest.bytes_per_second) == (0, 2.0, 4000.0)
    assert stored.batch_seconds["p50"] == 0.5 and stored.batch_seconds["p100"] == 1.0
    assert result.delivered.samples_per_second == 3 * 40 / 8.0
    assert result.accelerator_utilisation == pytest.approx(0.92) and result.passes is False, "the worst one decides"
    worst = result.worst_utilisation
    assert worst is not None and (worst.rank, worst.accelerator_utilisation) == (1, 0.85)
    metadata = result.metadata
    assert metadata.start.most_of_a_rank == FileOperations(opens=3, stats=5)
    assert metadata.start.all_ranks == FileOperations(opens=6, stats=15)
    assert metadata.first_epoch.all_ranks == FileOperations(opens=18, stats=9)
    assert metadata.later_epoch is None and metadata.epochs == 0.5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("input") / "shards"
    make("synthetic:mnist", folder, samples=96, shards=3)
    return folder


@pytest.mark.mpi
def test_ranks_of_its_own(run_hpcdl: CommandLine, data: Path) -> None:
    """15 batches of 8 on each of two ranks make two and a half epochs, and 3 more warm up."""
    line = ["bench", "input", data, "--ranks", "2", "--batch-size", "8", "--steps", "15", "--step-ms", "1", "--json"]
    finished = run_hpcdl(line)
    assert finished.code == 0, finished.err
    document = finished.json()
    assert (document["ranks"], document["nodes"], document["batch_size"], document["steps"]) == (2, 1, 8, 15)
    for way in ("stored", "delivered"):
        rates = document[way]
        assert rates["bytes_per_second"] == pytest.approx(784 * rates["samples_per_second"])
        slow, fast, median = rates["slowest"], rates["fastest"], rates["median_samples_per_second"]
        assert {slow["rank"], fast["rank"]} == {0, 1}
        assert slow["samples_per_second"] == pytest.approx(rates["samples_per_second"] / 2), "the last one ends it"
        assert median == pytest.approx((slow["samples_per_second"] + fast["samples_per_second"]) / 2)
    assert 0 < document["worst_utilisation"]["accelerator_utilisation"] <= document["accelerator_utilisation"] < 1
    metadata = document["metadata"]
    assert metadata["epochs"] == 3
    assert metadata["start"]["most_of_a_rank"] == {"opens": 1, "stats": 5}
    assert metadata["first_epoch"] == {
        "most_of_a_rank": {"opens": 6, "stats": 3},
        "all_ranks": {"opens": 12, "stats": 6},
    }
    assert metadata["later_epoch"]["all_ranks"] == {"opens": 0, "stats": 0}
    assert not list(run_hpcdl.home.rglob("hpcdl-bench-*"))


@pytest.mark.mpi
def test_ranks_of_a_launcher(run_hpcdl: CommandLine, data: Path, tmp_path: Path) -> None:
    from hpcdl.cluster.launchers.mpiexec import find_mpiexec

    (tmp_path / "local").mkdir()
    line = [find_mpiexec().path, "-n", "2", sys.executable, "-m", "hpcdl", "bench", "input", data, "--steps", "3"]

    def start(*more: str | Path) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in (*line, *more)]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, env=run_hpcdl.environment)

    finished = start("--batch-size", "8", "--stage", tmp_path / "local")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("as delivered") == 2 and finished.stdout.startswith("2 ranks on 1 node at once")
    assert finished.stderr.count("next: hpcdl train") == 1 and "--ranks 2" in finished.stderr
    rows = [row.split() for row in finished.stdout.partition("metadata operations of a rank")[2].splitlines()[1:]]
    assert rows[0] == ["at", "the", "start", "1", "5", "12"]
    assert rows[1][-3:] == ["0", "0", "0"], "what is read is the copies"
    assert not list((tmp_path / "local").iterdir())
    refused = start("--batch-size", "64")
    assert refused.returncode == 2 and refused.stderr.count("a global batch of 128 needs more than the 96") == 1
    mismatch = start("--ranks", "3")
    assert mismatch.returncode == 2 and mismatch.stderr.count("--ranks 3, but") == 1


@pytest.mark.mpi
def test_a_damaged_shard_is_reported_once_with_its_rank(run_hpcdl: CommandLine, data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for path in data.rglob("*"):
        (copy / path.name).write_bytes(path.read_bytes())
    shard = copy / "shard-00001.h5"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    finished = run_hpcdl(["bench", "input", copy, "--ranks", "2", "--batch-size", "8", "--steps", "9"])
    assert finished.code == 3 and finished.out == "", finished.err
    assert (
        finished.err.count("hpcdl: ") == 1
        and "hpcdl: rank " in finished.err
        and "shard-00001.h5: block" in finished.err
    )
    assert not list(run_hpcdl.home.rglob("hpcdl-bench-*"))


@pytest.mark.parametrize(
    "words, reported",
    [
        (("--ranks", "0"), "ranks: 0 is out of range"),
        (("--ranks", "2", "--batch-size", "49"), "a global batch of 98 needs more than the 96 samples"),
        (("--batch-size", "97"), "a global batch of 97 needs more than the 96 samples"),
        (("--step-ms", "-1"), "step-ms: -1.0 is out of range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_slips_are_reported_before_anything_starts(
    words: tuple[str, ...], reported: str, ask_hpcdl: CommandLine, data: Path
) -> None:
    finished = ask_hpcdl(["bench", "input", data, *words])
    assert finished.code == 2 and reported in finished.err and len(finished.err.splitlines()) == 1, finished.err
    assert finished.out == ""
