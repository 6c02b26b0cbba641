"""What a source holds beside inputs and targets: the user hears of it if training would need it, or must not see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpcdl.core.errors import SourceError
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.format.manifest import read_manifest, write_manifest
from hpcdl.data.write.writing import dry_run
from tests.conftest import CommandLine
from tests.data.sharding import make, request
from tests.data.test_formats import example, framed, png, tar

N = 40
X, Y = np.random.default_rng(2).random((N, 5)).astype(np.float32), np.arange(N) % 3
PIXELS = np.random.default_rng(3).integers(0, 256, (N, 8, 8, 3), dtype=np.uint8)


def saved(folder: Path, kind: str, **arrays: Any) -> Path:
    """An archive of arrays, or an HDF5 file of them."""
    if kind == "npz":
        np.savez(folder / "a.npz", **arrays)
        return folder / "a.npz"
    with h5py.File(folder / "a.h5", "w") as made:
        for name, values in arrays.items():
            made[name] = values
    return folder / "a.h5"


def plan(source: Path, out: Path, **options: Any) -> list[str]:
    """The remarks of the plan."""
    return list(dry_run(request(source, out, **options)).facts.remarks)


@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize("pictures", [True, False])
@pytest.mark.parametrize("words", [True, False])
def test_ids_of_inputs_and_targets_in_two_orders_are_asked_about(
    tmp_path: Path, kind: str, pictures: bool, words: bool
) -> None:
    ids = np.array([f"s{n}" for n in range(N)], "S4") if words else np.arange(N)
    data = {"x": PIXELS if pictures else X, "y": Y, "x_ids": ids}
    source = saved(tmp_path, kind, **data, y_ids=ids[::-1])
    with pytest.raises(SourceError, match=f"'x_ids' and 'y_ids' differ in {N} of {N} rows.*--leave-out y_ids"):
        make(source, tmp_path / "out")
    for ordinary in ({"y_ids": ids}, {"patient_ids": ids[::-1]}, {"y_ids": Y}):
        source.unlink()
        assert any("not used" in line for line in plan(saved(tmp_path, kind, **data, **ordinary), tmp_path / "out"))


def test_ids_of_splits_in_two_orders_are_asked_about(tmp_path: Path) -> None:
    ids = np.arange(N)
    data = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, "x_ids_test": ids, "y_ids_test": ids[::-1]}
    source = saved(tmp_path, "npz", **data, x_ids_train=ids, y_ids_train=ids)
    with pytest.raises(SourceError, match=r"give --leave-out '\*y_ids\*'"):
        make(source, tmp_path / "out")
    plan(source, tmp_path / "out", leave_out=("*y_ids*",))


@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize("name", ["train_mask", "test_idx", "split"])
def test_what_divides_pictures_in_arrays_is_asked_about(tmp_path: Path, kind: str, name: str) -> None:
    beside = np.array(["train", "val"] * (N // 2), "S5") if name == "split" else np.arange(N) % 2 > 0
    source = saved(tmp_path, kind, images=PIXELS, labels=Y, **{name: beside})
    with pytest.raises(SourceError, match=f"does the array '{name}' divide the samples"):
        make(source, tmp_path / "out")


def test_a_mask_of_what_is_valid_divides_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path, "h5", images=PIXELS, labels=Y, valid_mask=PIXELS > 0)
    assert any("'valid_mask': padding, missing values" in line for line in plan(source, tmp_path / "out"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("fold", "does the array 'fold' divide the samples? Divided arrays are called like x_train and x_test"),
        ("is_train", "does the array 'is_train' divide the samples?"),
        ("sample_weight", "does the array 'sample_weight' hold weights of the samples? Training takes none"),
        ("weights", "does the array 'weights' hold weights of the samples?"),
    ],
)
@pytest.mark.parametrize("pictures", [True, False])
def test_arrays_that_divide_or_weigh_samples_are_asked_about(
    run_hpcdl: CommandLine, tmp_path: Path, kind: str, name: str, question: str, pictures: bool
) -> None:
    data = {"images": PIXELS, "labels": Y} if pictures else {"x": X, "y": Y}
    source = saved(tmp_path, kind, **data, **{name: np.arange(N) % 2})
    asked = run_hpcdl(["shard", source, tmp_path / "out"])
    assert asked.code == 2 and question in asked.err and f"--leave-out {name}" in asked.err
    assert not (tmp_path / "out").exists()
    made = run_hpcdl(["shard", source, tmp_path / "out", "--leave-out", name])
    assert made.code == 0 and open_dataset(str(tmp_path / "out")).splits["all"].num_samples == N, made.err


def test_whoever_names_the_inputs_is_not_asked(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    source = saved(tmp_path, "npz", x=X, y=Y, weights=Y)
    made = run_hpcdl(["shard", source, tmp_path / "out", "--input", "x=x", "--target", "y=y"])
    assert made.code == 0 and "arrays not used: 'weights'" in made.err


@pytest.mark.parametrize("name", ["lengths", "mask", "y_err"])
def test_arrays_of_padding_and_errors_are_explained(run_hpcdl: CommandLine, tmp_path: Path, name: str) -> None:
    source = saved(tmp_path, "npz", x=X, y=Y, **{name: Y})
    made = run_hpcdl(["shard", source, tmp_path / "out"])
    assert made.code == 0 and f"'{name}': padding, missing values or errors? Training does not know" in made.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "what"),
    [
        ("sample_weight", "weights of the samples, which training does not take"),
        ("y_err", "errors of the target 'y', which new samples do not have"),
        ("e_y", "errors of the target 'y', which new samples do not have"),
    ],
)
def test_columns_of_weights_and_errors_are_no_features(
    run_hpcdl: CommandLine, tmp_path: Path, column: str, what: str
) -> None:
    (tmp_path / "t.csv").write_text(
        f"mass,weight,{column},y\n" + "".join(f"{n},{n * 2},{n},{n}.5\n" for n in range(20))
    )
    asked = run_hpcdl(["shard", tmp_path / "t.csv", tmp_path / "out"])
    assert asked.code == 2 and f"the column '{column}' seems to hold {what}" in asked.err
    made = run_hpcdl(["shard", tmp_path / "t.csv", tmp_path / "out", "--leave-out", column])
    assert made.code == 0 and "x: the columns 'mass', 'weight'" in made.err


def test_a_column_e_is_a_feature(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("d,e,y\n" + "".join(f"{n * n % 7},{n * n % 5},{n}.5\n" for n in range(20)))
    job = dry_run(request(tmp_path / "t.csv", tmp_path / "out", target="y"))
    assert [column for field in job.fields for column in field.columns][:2] == ["d", "e"]


def test_labels_of_pictures_in_records_that_begin_with_1_leave_no_empty_class(tmp_path: Path) -> None:
    source = tmp_path / "a.tfrecord"
    source.write_bytes(framed([example(image=png(PIXELS[n]), label=1 + n % 3) for n in range(N)]))
    manifest = make(source, tmp_path / "out")
    assert manifest.class_names == ("1", "2", "3")
    assert any("labels are renumbered: 1 -> 0" in line for line in manifest.understood)
    with h5py.File(tmp_path / "out/shard-00000.h5") as shard:
        assert set(shard["labels"][:].tolist()) == {0, 1, 2}


def test_names_of_numbers_with_gaps_leave_no_empty_classes(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    source = saved(tmp_path, "h5", images=PIXELS, labels=np.array([0, 2, 5], np.int8)[Y])
    with h5py.File(source, "r+") as file:
        file["labels"].attrs.update(flag_values=np.array([0, 2, 5], np.int8), flag_meanings="sea land ice")
    assert run_hpcdl(["shard", source, tmp_path / "out"]).code == 0
    assert list(open_dataset(str(tmp_path / "out")).class_names) == ["sea", "land", "ice"]
    with h5py.File(tmp_path / "out/shard-00000.h5") as shard:
        assert set(shard["labels"][:].tolist()) == {0, 1, 2}


def test_flags_whose_names_do_not_fit_are_said(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    source = saved(tmp_path, "h5", images=PIXELS, labels=Y)
    with h5py.File(source, "r+") as file:
        file["labels"].attrs.update(flag_values=np.array([0, 1, 2], np.int8), flag_meanings="sea land")
    made = run_hpcdl(["shard", source, tmp_path / "out"])
    assert made.code == 0 and "labels: 2 different flag_meanings for 3 flag_values" in made.err


def test_a_list_of_classes_that_does_not_fit_is_said(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    words = np.array(["background", "a", "b", "c"], "S")
    made = run_hpcdl(["shard", saved(tmp_path, "h5", images=PIXELS, labels=Y + 1, class_names=words), tmp_path / "out"])
    assert made.code == 0 and "labels: from 1 to 3, and a list of 4 classes ('background', 'a'" in made.err


def test_patients_beside_pictures_are_said_with_split(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    source = saved(tmp_path, "h5", images=PIXELS, labels=Y, patient_id=np.arange(N) // 4)
    made = run_hpcdl(["shard", source, tmp_path / "out", "--split", "train=0.8,val=0.2"])
    assert made.code == 0 and "samples of one 'patient_id' may be in several splits" in made.err


def test_minus_one_beside_other_classes_is_asked_about(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    for folder, data in {"a": {"images": PIXELS}, "b": {"x": X}}.items():
        (tmp_path / folder).mkdir()
        target = "labels" if folder == "a" else "y"
        source = saved(tmp_path / folder, "npz", **data, **{target: np.where(np.arange(N) % 10 == 0, -1, Y)})
        asked = run_hpcdl(["shard", source, tmp_path / f"{folder}-out"])
        assert asked.code == 2 and "4 labels of -1 beside '0', '1', '2': a class, or no label?" in asked.err
        made = run_hpcdl(["shard", source, tmp_path / f"{folder}-out", "--target-kind", "class"])
        assert made.code == 0 and open_dataset(str(tmp_path / f"{folder}-out")).num_classes == 4
    source = saved(tmp_path, "npz", images=PIXELS, labels=Y - 1)
    assert run_hpcdl(["shard", source, tmp_path / "out"]).code == 0  # -1, 0 and 1 are usual classes


def parquet(root: Path, image: bytes) -> Path:
    columns = {"label": list(range(3)) * 4, "fold": [0, 1] * 6, "weights": [0.5] * 12, "patient_id": list(range(12))}
    pq.write_table(pa.table({"image": [{"bytes": image, "path": "a.png"}] * 12, **columns}), root / "a.parquet")
    return root / "a.parquet"


def tfrecord(root: Path, image: bytes) -> Path:
    records = [example(image=image, label=0)]  # a feature may be missing in the first record
    records += [example(image=image, label=n % 3, fold=n % 2, weights=1, patient_id=n) for n in range(1, 12)]
    (root / "a.tfrecord").write_bytes(framed(records))
    return root / "a.tfrecord"


def webdataset(root: Path, image: bytes) -> Path:
    beside = {"fold": b"1", "weights": b"0.5", "patient_id": b"7"}
    members = {"jpg": image, "cls": b"0", "json": b'{"label": 3, "place": "x"}', **beside}
    return tar(root / "a.tar", {f"{n}.{ending}": content for n in range(12) for ending, content in members.items()})


@pytest.mark.long
@pytest.mark.parametrize("save", [parquet, tfrecord, webdataset])
def test_what_lies_beside_pictures_in_tables_and_records_is_said(
    run_hpcdl: CommandLine, tmp_path: Path, save: Callable[[Path, bytes], Path]
) -> None:
    source = save(tmp_path, png(PIXELS[0]))
    for name in ("fold", "weights"):
        asked = run_hpcdl(["shard", source, tmp_path / "out", *(["--leave-out", "fold"] if name == "weights" else [])])
        assert asked.code == 2 and f"'{name}'" in asked.err and f"--leave-out {name}" in asked.err, asked.err
    made = run_hpcdl(["shard", source, tmp_path / "out", "--leave-out", "fold,weights", "--split", "train=0.5,val=0.5"])
    assert made.code == 0 and "not used: 'fold', " in made.err
    assert "samples of one 'patient_id' may be in several splits" in made.err
    assert save is not webdataset or "'json/label', 'json/place', 'patient_id'" in made.err


def test_numbers_beside_pictures_of_records_may_be_quantities(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(framed([example(image=png(PIXELS[0]), label=n * 400) for n in range(12)]))
    asked = run_hpcdl(["shard", tmp_path / "a.tfrecord", tmp_path / "out"])
    assert asked.code == 2 and "12 different numbers from 0 to 4400, of 12 images: classes or quantities?" in asked.err
    assert run_hpcdl(["shard", tmp_path / "a.tfrecord", tmp_path / "out", "--target-kind", "class"]).code == 0


def test_fractions_as_labels_of_pictures_are_asked_about(tmp_path: Path) -> None:
    members = {f"{n}.{end}": png(PIXELS[n]) if end == "png" else f"{n / 4}".encode() for n in range(N)
               for end in ("png", "cls")}  # fmt: skip
    source = tar(tmp_path / "a.tar", members)
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [png(own) for own in PIXELS], "label": [f"{n / 4}" for n in range(N)]}), table)
    for asked in (source, table):
        with pytest.raises(SourceError, match=r"numbers as text, such as '0.0': classes or quantities.*--target-kind"):
            make(asked, tmp_path / "out")
    manifest = make(source, tmp_path / "out", target_kind="regression")
    with h5py.File(tmp_path / "out/shard-00000.h5") as shard:
        assert sorted(shard[manifest.fields[1].name][:].tolist()) == [n / 4 for n in range(N)]
    assert len(make(table, tmp_path / "classes", target_kind="class").class_names) == N


def test_a_line_that_repeats_the_head_is_refused(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    lines = "ham,Hello\nspam,Win\n" * 4
    (tmp_path / "t.csv").write_text(f"label,text\n{lines}label,text\n{lines}")
    refused = run_hpcdl(["shard", tmp_path / "t.csv", tmp_path / "out"])
    assert refused.code == 2 and "t.csv line 10 repeats the first: were tables joined?" in refused.err
    (tmp_path / "t.csv").write_text(f"ham,Hi\n{lines}")
    made = run_hpcdl(["shard", tmp_path / "t.csv", tmp_path / "out", "--target", "ham"])
    assert made.code == 0 and "'ham' names a column, and is a value in it: if the first line is a sample" in made.err


@pytest.mark.parametrize("name", ["fold", "sample_weight"])
def test_data_written_before_such_questions_are_mended(run_hpcdl: CommandLine, tmp_path: Path, name: str) -> None:
    source, out = saved(tmp_path, "npz", x=X, y=Y, **{name: Y}), tmp_path / "out"
    assert run_hpcdl(["shard", source, out, "--leave-out", name]).code == 0
    manifest, _ = read_manifest(out)
    kept = {key: value for key, value in manifest.recipe.options.items() if key != "leave-out"}
    write_manifest(out, dataclasses.replace(manifest, recipe=dataclasses.replace(manifest.recipe, options=kept)))
    shard = out / "shard-00000.h5"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-3] + b"xyz")
    mended = run_hpcdl(["inspect", out, "--repair", "--from", source])
    assert mended.code == 0 and shard.read_bytes() == whole, mended.err


@pytest.mark.parametrize(("first", "said"), [("1", True), ("0", True), ("01", False)])
def test_numbers_as_names_in_alphabetical_order_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, first: str, said: bool
) -> None:
    for name in [first, *((f"{n:02d}" if first == "01" else f"{n}") for n in (2, 10))]:
        (tmp_path / "s" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "s" / name / f"{number}.png").write_bytes(png(PIXELS[number]))
    made = run_hpcdl(["shard", tmp_path / "s", tmp_path / "out", "--dry-run"])
    line = "classes are in alphabetical order, not by number: '10' is class 1, counted from 0"
    assert made.code == 0 and (line in made.err) == said, made.err


def test_parts_of_records_are_named(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", data=np.zeros(10, [("hits", "f4", 3), ("kind", "i4")]))
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out"])
    assert made.code == 2 and "'data' (10 records of hits, kind)" in made.err


@pytest.mark.parametrize(("lists", "line"), [([[1.0], [], [2.0, 3.0]], "0 to 2 long"), ([[1.0], [2.0]], "")])
def test_lists_that_zeros_fill_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, lists: list[list[float]], line: str
) -> None:
    pq.write_table(pa.table({"x": lists * 6, "y": [0, 1] * (3 * len(lists))}), tmp_path / "a.parquet")
    flags = ["--input", "x=x", "--target", "y=y", "--dry-run"]
    made = run_hpcdl(["shard", tmp_path / "a.parquet", tmp_path / "out", *flags])
    said = f"x: samples are {line}, and zeros fill them; 6 samples hold nothing"
    assert made.code == 0 and (said if line else "input x") in made.err and ("zeros" in made.err) == bool(line)


def test_annotations_in_xml_are_no_masks(tmp_path: Path) -> None:
    for name, content in (("JPEGImages/1.png", png(PIXELS[0])), ("Annotations/1.xml", b"<annotation/>")):
        (tmp_path / "s" / name).parent.mkdir(parents=True)
        (tmp_path / "s" / name).write_bytes(content)
    with pytest.raises(SourceError, match=r"1.xml is not an image but XML: of each image's boxes .as Pascal VOC"):
        make(tmp_path / "s", tmp_path / "out")
