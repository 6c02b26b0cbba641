from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.tuning.replay import LARGE, Replay, allowance, read_table, replay
from tests.conftest import patience

from .families import FAMILIES, write_family
from .tables import SHAPES, write_table

SOAK_SEEDS = 50


def replays(name: str, num_seeds: int, folder: Path) -> list[Replay]:
    write = write_table if name in SHAPES else write_family
    found = []
    for seed in range(num_seeds):
        path = folder / f"{name}-{seed}.csv"
        write(name, seed, path)
        found.append(replay(read_table(path), seed=seed))
    return found


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def check(name: str, num_seeds: int, folder: Path) -> None:
    found = replays(name, num_seeds, folder)
    regrets = [item.regret for item in found]
    assert statistics.median(regrets) <= 0.02, regrets
    assert percentile(regrets, 0.95) <= 0.05, regrets
    for item in found:
        share = 0.15 if item.samples_exhaustive >= 3 * LARGE else 0.5
        assert item.samples_used <= share * item.samples_exhaustive


def test_the_tables_are_as_many_and_as_different_as_asked() -> None:
    sizes = [len(shape.candidates) for shape in SHAPES.values()]
    assert len(sizes) >= 12
    assert (min(sizes), max(sizes)) == (24, 2000)
    assert {shape.noise for shape in SHAPES.values()} >= {0.02, 0.10}


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_little_is_lost_with_few_samples(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", SHAPES)
def test_little_is_lost_with_few_samples_over_many_seeds(name: str, tmp_path: Path) -> None:
    check(name, SOAK_SEEDS, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_little_is_lost_on_tables_that_the_search_was_not_made_with(name: str, tmp_path: Path) -> None:
    check(name, SOAK_SEEDS, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ["random-effects", "holes", "three-rows", "strangers"])
def test_little_is_lost_on_a_few_of_those(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path)


def test_the_search_knows_no_more_than_on_a_node(tmp_path: Path) -> None:
    """Replaying tells the search nothing extra: one row or nine equal rows per candidate lead to the same trials."""
    rows = [f"{threads},{kind},{100 + 7 * (threads * 5 % 11) + kind}" for threads in range(1, 9) for kind in range(2)]
    results = []
    for times in (1, 9):
        path = tmp_path / f"{times}.csv"
        path.write_text("intra_op_threads,slot,images_per_second\n" + "\n".join(rows * times) + "\n")
        results.append(replay(read_table(path)))
    assert results[0] == results[1]
    assert results[0].regret <= 0.05


def test_samples_are_drawn_in_order_and_then_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("intra_op_threads,images_per_second\n1,10\n2,10.4\n1,11\n2,11.4\n1,12\n")
    table = read_table(path)
    assert table.samples == ((10.0, 11.0, 12.0), (10.4, 11.4))
    result = replay(table, max_samples=40)
    assert result.samples_used <= 40 and result.samples_exhaustive == 6
    assert result.regret in (0.0, pytest.approx(1 - 10.9 / 11.0))


def test_the_number_of_a_repeat_is_no_setting(tmp_path: Path) -> None:
    """A column `repeat` made a candidate of each sample, and a winner of the luckiest one."""
    path = tmp_path / "t.csv"
    path.write_text("intra_op_threads,repeat,images_per_second\n1,0,10\n1,1,14\n2,0,13\n2,1,13\n")
    table = read_table(path)
    assert table.samples == ((10.0, 14.0), (13.0, 13.0)) and table.columns == ("intra_op_threads",)


def test_values_are_reported_as_spelt(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("images_per_second,onednn,intra_op_threads\n10,TRUE,08\n5,off,08\n")
    assert replay(read_table(path)).winner == {"onednn": "TRUE", "intra_op_threads": "08"}


def test_empty_cells_are_failed_trials(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"{threads},{'' if threads > 8 else threads}" for threads in (1, 2, 4, 8, 16, 32) for _ in range(3)]
    path.write_text("intra_op_threads,images_per_second\n" + "\n".join(lines) + "\n")
    assert replay(read_table(path)).winner == {"intra_op_threads": "8"}


def test_a_table_of_one_candidate(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("binding,images_per_second\ncompact,10\ncompact,11\n")
    result = replay(read_table(path))
    assert (result.winner, result.trials_used, result.samples_used) == ({"binding": "compact"}, 1, 1)


def test_allowance() -> None:
    assert [allowance(num) for num in (1, 24, 199, 200, 2000)] == [1, 36, 298, 90, 900]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs a header"),
        ("a,b\n1,2\n", "needs a header"),
        ("a,a,images_per_second\n1,2,3\n", "needs a header"),
        ("a,images_per_second\n1\n", "line 2: 1 cells"),
        ("a,images_per_second\n1,fast\n", "line 2: images_per_second is 'fast'"),
        ("a,images_per_second\n1,nan\n", "line 2: images_per_second is 'nan'"),
        ("a,images_per_second\n1,-3\n", "line 2"),
        ("a,images_per_second\n1,\n", "no successful trial"),
        ("a,images_per_second\n", "no successful trial"),
    ],
)
def test_wrong_tables_name_the_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_table(path)
    assert words in str(caught.value)


def test_absent_and_binary_tables(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_table(tmp_path / "absent.csv")
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no CSV file"):
        read_table(path)


def test_2000_candidates_take_seconds_and_no_tensorflow(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_table("everything-2000", 0, path)
    code = (
        "import sys; from hpcdl.cli.main import run;"
        f"code = run(['tune-threads', '--replay', {str(path)!r}, '--json']);"
        "heavy = {'tensorflow', 'keras', 'mpi4py', 'h5py'} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    )
    begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin < patience(6)  # processor time
