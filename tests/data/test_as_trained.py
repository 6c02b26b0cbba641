"""What a model has learnt from its data folder (class numbers, codes of words, scales) applies to other folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.format.manifest import picture_with_class
from hpcdl.models.table import MODELS, check_input
from hpcdl.run.trained_data import classes_as_trained, fields_as_trained, made_up_data
from tests.conftest import CommandLine


def sharded(run_hpcdl: CommandLine, folder: Path, head: str, rows: list[str], *words: str) -> Dataset:
    """Shard a table as a user does: one to train on, or a later one in another folder."""
    folder.with_suffix(".csv").write_text("\n".join([head, *rows]) + "\n")
    made = run_hpcdl(["shard", folder.with_suffix(".csv"), folder, *words])
    assert made.code == 0 and ", or hpcdl docs own-model about" in made.err, made.err
    return open_dataset(str(folder))


@pytest.mark.parametrize("name", MODELS)
def test_each_network_of_the_table_has_made_up_data(name: str) -> None:
    dataset = open_dataset(made_up_data(name) or "")
    check_input(name, dataset.num_classes, dataset.sample_shape)
    assert dataset.num_classes == MODELS[name].classes


def test_numbers_are_scaled_by_the_statistics_of_the_training(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    words = ("--target", "energy", "--target-kind", "regression", "--normalise", "mean-std")
    trained, later = (
        sharded(run_hpcdl, tmp_path / name, "x,y,energy", [f"{first + n},{n % 7},{n * 2.5}" for n in range(40)], *words)
        for name, first in (("a", 0), ("b", 100))
    )
    read, reported = fields_as_trained(later, trained)
    assert [item.statistics for item in read.fields] == [item.statistics for item in trained.fields]
    assert [item.statistics for item in later.fields] != [item.statistics for item in trained.fields]
    assert len(reported) == 1 and "as in training" in reported[0]
    assert fields_as_trained(trained, trained) == (trained, [])


def texts(run_hpcdl: CommandLine, folder: Path, longest: str) -> Dataset:
    source = folder.with_name(f"{folder.name}-texts")
    source.mkdir()
    for label in ("sky", "weather"):
        (source / f"{label}.txt").write_text("a star\n" * 5 + f"{longest}\n")
    assert run_hpcdl(["shard", source, folder]).code == 0
    return open_dataset(str(folder))


def test_shorter_texts_are_padded_to_the_length_of_the_training(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    trained = texts(run_hpcdl, tmp_path / "a", "a very long note on rain")
    shorter, longer = texts(run_hpcdl, tmp_path / "b", "snow"), texts(run_hpcdl, tmp_path / "c", "a longer " * 5)
    read, reported = fields_as_trained(shorter, trained)
    assert read.fields[0].shape == trained.fields[0].shape != shorter.fields[0].shape
    assert reported == ["'text' is padded from 6 to 24, as in training"]
    assert fields_as_trained(longer, trained) == (longer, [])  # cut off, they would lose data: the model refuses them


def test_inputs_without_labels_are_read_for_inference(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    trained = texts(run_hpcdl, tmp_path / "a", "a very long note on rain")
    (tmp_path / "new.txt").write_text("no label\nhere\n")
    asked = run_hpcdl(["shard", tmp_path / "new.txt", tmp_path / "b"])
    assert asked.code == 2 and "Without labels, for hpcdl infer, give --target-kind class" in asked.err
    made = run_hpcdl(["shard", tmp_path / "new.txt", tmp_path / "b", "--target-kind", "class"])
    assert made.code == 0 and "all samples are of one class" in made.err
    later = open_dataset(str(tmp_path / "b"))
    with pytest.raises(UsageError, match="the classes of 'label' are new"):
        fields_as_trained(later, trained)
    assert fields_as_trained(later, trained, targets=False)[0].fields[0].shape == trained.fields[0].shape


def test_words_with_other_numbers_are_refused_with_the_flag(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    words = ("--target", "y", "--target-kind", "class", "--categories", "colour=codes")
    trained, later = (
        sharded(run_hpcdl, tmp_path / name, "colour,x,y", [f"{colours[n % 3]},{n},{n % 2}" for n in range(30)], *words)
        for name, colours in (("a", ("blue", "green", "red")), ("b", ("amber", "red", "green")))
    )
    with pytest.raises(UsageError, match=f"--categories-of {trained.folder}"):
        fields_as_trained(later, trained)


def named(names: tuple[str, ...]) -> Dataset:
    return Dataset(
        name="/".join(names), fields=picture_with_class((2, 2, 1), "uint8", names), pictures=True,
        num_classes=len(names), class_names=names, checksum="", splits={},
    )  # fmt: skip


def test_classes_are_known_by_name() -> None:
    trained = named(("ant", "bee", "cat"))
    assert classes_as_trained(named(("ant", "bee")), trained) is None
    found = classes_as_trained(named(("bee", "cat")), trained)
    assert found is not None and found.tolist() == [1, 2]
    with pytest.raises(UsageError, match="not trained on: dog"):
        classes_as_trained(named(("ant", "dog")), trained)
    assert classes_as_trained(named(()), trained) is None
    assert classes_as_trained(dataclasses.replace(trained, class_names=()), trained) is None


def test_columns_in_another_order_are_refused(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    lines = [f"{n},{100 * n},{n % 2}" for n in range(30)]
    trained, same, turned = (
        sharded(run_hpcdl, tmp_path / name, head, lines, "--target", "y")
        for name, head in (("a", "low,high,y"), ("b", "low,high,y"), ("c", "high,low,y"))
    )
    assert fields_as_trained(same, trained)[1] == []
    with pytest.raises(UsageError, match="column 1 of 'x' is high, and was low in"):
        fields_as_trained(turned, trained)
    unnamed = dataclasses.replace(turned, fields=tuple(dataclasses.replace(item, columns=()) for item in turned.fields))
    assert "does not name the columns of 'x'" in " ".join(fields_as_trained(unnamed, trained)[1])
    renamed = dataclasses.replace(trained, fields=tuple(
        dataclasses.replace(item, name="features" if item.role == "input" else item.name) for item in trained.fields
    ))  # fmt: skip
    with pytest.raises(UsageError, match=r"no input 'x', which the model was trained on .*; it has features"):
        fields_as_trained(renamed, trained)
    manifest = trained.manifest
    assert manifest is not None and list(manifest.fields[0].columns) == ["low", "high"]
    assert "x: the columns 'low', 'high'" in manifest.understood
