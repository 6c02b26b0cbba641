"""--categories: a column of words becomes numbers, by a coding that the user names or that another data folder has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcdl.core.errors import SourceError, UsageError
from hpcdl.data.format.manifest import Categories, Manifest
from hpcdl.data.write.repair import repair
from tests.conftest import CommandLine
from tests.data.sharding import contents, make

COLUMNS = {
    "mass": [3.5, 4.5, 2.0, 1.0],
    "sex": ["male", "female", "male", "male"],
    "colour": ["red", "blue", "green", "blue"],
    "age": [1, 2, 10, 2],
    "species": ["a", "b", "a", "b"],
}
NAMES = {"target": "species=kind"}


def csv(folder: Path, columns: dict[str, list[Any]] = COLUMNS, name: str = "t") -> Path:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder / f"{name}.csv"


def parquet(folder: Path, columns: dict[str, list[Any]] = COLUMNS, name: str = "t") -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table(columns)
    if "sex" in columns:  # as pandas saves a categorical column
        table = table.set_column(table.column_names.index("sex"), "sex", pa.array(columns["sex"]).dictionary_encode())
    pq.write_table(table, folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


FORMATS = pytest.mark.parametrize("save", [csv, parquet])
Save = Callable[..., Path]


def rows(folder: Path, manifest: Manifest, name: str, split: str = "all") -> list[Any]:
    found = []
    for entry in manifest.splits[split].shards:
        with h5py.File(folder / entry.file) as file:
            found += file[name][:].tolist()
    return sorted(found)


@FORMATS
def test_words_without_a_coding_are_asked_about(save: Save, tmp_path: Path) -> None:
    source = save(tmp_path)
    with pytest.raises(
        SourceError, match=r"columns 'sex', 'colour' hold text.*sex=one-hot.*sex=codes.*--leave-out sex"
    ):
        make(source, tmp_path / "out", **NAMES)
    for wish in ("sex", "sex=ordinal"):
        with pytest.raises(UsageError, match=r"--categories sex=one-hot .* or --categories sex=codes"):
            make(source, tmp_path / "out", categories=wish, **NAMES)
    for wish, why in (
        ("sexx=codes", "'sexx' is no column; the columns are 'mass', 'sex'"),
        ("sex=codes,sex=codes", "twice"),
    ):
        with pytest.raises(UsageError, match=why):
            make(source, tmp_path / "out", categories=wish, **NAMES)
    with pytest.raises(SourceError, match=r"column 'mass' holds (float64|double): no words"):
        make(source, tmp_path / "out", categories="mass=codes", **NAMES)
    with pytest.raises(UsageError, match="words of a target are its classes already"):
        make(source, tmp_path / "out", categories="species=codes", **NAMES)


@FORMATS
def test_words_among_the_numbers_of_one_input(save: Save, tmp_path: Path) -> None:
    manifest = make(save(tmp_path), tmp_path / "out", categories="sex=one-hot,colour=codes,age=one-hot", **NAMES)
    assert rows(tmp_path / "out", manifest, "x") == sorted([
        # mass, female, male, blue 0 green 1 red 2, and age 1, 2, 10
        [3.5, 0, 1, 2, 1, 0, 0], [4.5, 1, 0, 0, 0, 1, 0], [2, 0, 1, 1, 0, 0, 1], [1, 0, 1, 0, 0, 1, 0],
    ])  # fmt: skip
    assert list(manifest.fields[0].categories) == [
        Categories(column="sex", coding="one-hot", words=("female", "male"), place=1),
        Categories(column="colour", coding="codes", words=("blue", "green", "red"), place=3),
        Categories(column="age", coding="one-hot", words=("1", "2", "10"), place=4),
    ]
    assert list(manifest.understood) == [
        "x: the columns 'mass', 'sex', 'colour', 'age'",
        "x: the words of 'sex' as one-hot, at the places female 1, male 2",
        "x: the words of 'colour' as codes at the place 3: blue 0, green 1, red 2",
        "x: the words of 'age' as one-hot, at the places 1 4, 2 5, 10 6",
    ]
    assert not manifest.fields[1].categories


@FORMATS
def test_words_that_are_an_input_of_their_own(save: Save, tmp_path: Path) -> None:
    """--normalise does not scale codes meant for an embedding layer."""
    manifest = make(
        save(tmp_path), tmp_path / "out", input="mass=mass,sex=sex,colour=hue", categories="sex=one-hot,colour=codes",
        normalise="mean-std", **NAMES,
    )  # fmt: skip
    found = {
        item.name: (item.dtype, tuple(item.shape), item.normalise) for item in manifest.fields if item.role == "input"
    }
    assert found == {
        "mass": ("float64", (), "mean-std"), "sex": ("float32", (2,), "none"), "hue": ("int64", (), "none"),
    }  # fmt: skip
    assert rows(tmp_path / "out", manifest, "hue") == [0, 0, 1, 2]
    assert rows(tmp_path / "out", manifest, "sex") == [[0, 1]] * 3 + [[1, 0]]
    with pytest.raises(UsageError, match="--normalise mean-std scales numbers, and no input has any"):
        make(tmp_path / f"t.{save.__name__}", tmp_path / "two", input="sex=sex", categories="sex=codes",
             normalise="mean-std", **NAMES)  # fmt: skip


@FORMATS
def test_a_word_that_training_does_not_have_is_refused(save: Save, tmp_path: Path) -> None:
    columns = {**COLUMNS, "split": ["val", "train", "train", "val"]}
    with pytest.raises(
        SourceError, match=r"'colour' of row 0 of val is 'red', a word that train does not have \('blue', 'gr"
    ):
        make(save(tmp_path, columns), tmp_path / "out", categories="sex=codes,colour=codes", **NAMES)
    columns["colour"] = ["blue", "green", "blue", "blue"]
    manifest = make(save(tmp_path, columns), tmp_path / "out", categories="sex=codes,colour=codes", **NAMES)
    assert rows(tmp_path / "out", manifest, "x", "val") == [[1, 1, 0, 2], [3.5, 1, 0, 1]]


def test_rows_without_a_word_are_refused(tmp_path: Path) -> None:
    source = csv(tmp_path, {**COLUMNS, "sex": ["male", "", "male", "female"]})
    with pytest.raises(SourceError, match="'sex' has rows without a word"):
        make(source, tmp_path / "out", categories="sex=codes,colour=codes", **NAMES)


@FORMATS
def test_a_later_table_gets_the_same_numbers(save: Save, tmp_path: Path) -> None:
    first = make(save(tmp_path), tmp_path / "first", categories="sex=codes,colour=one-hot", **NAMES)
    later = {
        "mass": [1.0, 2.0],
        "sex": ["male", "male"],
        "colour": ["red", "green"],
        "age": [1, 2],
        "species": ["a", "b"],
    }
    source = save(tmp_path, later, "later")
    options = {"categories": "sex=codes,colour=one-hot", "categories_of": str(tmp_path / "first"), **NAMES}
    manifest = make(source, tmp_path / "second", **options)
    assert rows(tmp_path / "second", manifest, "x") == [[1, 1, 0, 0, 1, 1], [2, 1, 0, 1, 0, 2]]
    assert manifest.fields[0].categories == first.fields[0].categories
    odd = save(tmp_path, {**later, "colour": ["red", "pink"]}, "odd")
    with pytest.raises(
        SourceError, match=r"'colour' of row 1 is 'pink', a word that what --categories-of names does not"
    ):
        make(odd, tmp_path / "third", **options)
    with pytest.raises(UsageError, match=r"--categories sex=one-hot: .*first has 'sex=codes', 'colour=one-hot'"):
        make(source, tmp_path / "third", **{**options, "categories": "sex=one-hot,colour=one-hot"})
    with pytest.raises(UsageError, match=r"--categories-of .*nowhere is no finished data folder"):
        make(source, tmp_path / "third", **{**options, "categories_of": str(tmp_path / "nowhere")})
    with pytest.raises(UsageError, match="--categories-of keeps the numbers of words"):
        make(source, tmp_path / "third", categories_of=str(tmp_path / "first"), input="mass=m", **NAMES)


def test_a_damaged_shard_is_mended_with_the_words_that_it_had(tmp_path: Path) -> None:
    """Repairing a shard keeps its codes, even if the folder that defined them is gone."""
    make(csv(tmp_path), tmp_path / "first", categories="sex=codes,colour=codes", **NAMES)
    source = csv(tmp_path, {name: own[:3] for name, own in COLUMNS.items()}, "later")
    options = {"categories": "sex=codes,colour=codes", "categories_of": str(tmp_path / "first"), **NAMES}
    manifest = make(source, tmp_path / "second", **options)
    before = contents(tmp_path / "second")
    (tmp_path / "first").rename(tmp_path / "gone")
    name = manifest.shards()[0].file
    (tmp_path / "second" / name).write_bytes(b"")
    assert repair(tmp_path / "second", str(source), [name]) == [name]
    assert contents(tmp_path / "second") == before


def test_many_words_are_no_one_hot(tmp_path: Path) -> None:
    columns = {"name": [f"n{number}" for number in range(1500)], "y": [number % 2 for number in range(1500)]}
    with pytest.raises(SourceError, match=r"'name' has 1500 different words, .*--categories name=codes"):
        make(csv(tmp_path, columns), tmp_path / "out", categories="name=one-hot", target="y=y")
    manifest = make(csv(tmp_path, columns), tmp_path / "out", categories="name=codes", target="y=y", input="name=n")
    assert rows(tmp_path / "out", manifest, "n") == list(range(1500))
    assert np.array_equal(sorted(manifest.fields[0].categories[0].words), sorted(columns["name"]))


@pytest.mark.parametrize(("word", "said"), [("NA", True), ("?", True), ("none", False)])
def test_a_word_for_missing_values_is_named(run_hpcdl: CommandLine, tmp_path: Path, word: str, said: bool) -> None:
    source = csv(tmp_path, {**COLUMNS, "sex": ["male", word, "female", "male"]})
    wish = ["--target", "species", "--categories", "sex=one-hot,colour=codes", "--dry-run"]
    made = run_hpcdl(["shard", source, tmp_path / "out", *wish])
    assert made.code == 0 and (f"{word!r} among them: a missing value?" in made.err) == said, made.err
    assert made.err.count("a missing value?") == said
