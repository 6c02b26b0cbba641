"""CSV tables: column types, packing of columns into one input, questions and refusals."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from hpcdl.core.errors import SourceError
from hpcdl.data.sources.base.source import recognise
from hpcdl.data.sources.checks.groups import remark_on_groups
from tests.data.sharding import make

HEAD = "mass,charge,energy,particle,split\n"
ROWS = "1,-1,0.5,muon,train\n2,0,1.5,pion,train\n3,1,2.5,muon,valid\n"


def table(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_columns_of_numbers_are_one_input_and_names_are_classes(tmp_path: Path) -> None:
    source = table(tmp_path, HEAD + ROWS)
    assert recognise(str(source)) == "table"
    manifest = make(source, tmp_path / "out", target="particle=kind")
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {"train": 2, "val": 1}
    assert manifest.class_names == ("muon", "pion") and [item.name for item in manifest.fields] == ["x", "kind"]
    with h5py.File(tmp_path / "out" / manifest.splits["val"].shards[0].file) as file:
        assert file["x"].dtype == np.float32 and file["x"][0].tolist() == [3, 1, 2.5] and file["kind"][0] == 0


def test_columns_by_name(tmp_path: Path) -> None:
    source = table(tmp_path, (HEAD + ROWS).replace(",", "\t"), "t.tsv")
    manifest = make(source, tmp_path / "out", input="particle=what,charge=q", target="energy=e")
    found = {item.name: (item.kind, item.dtype) for item in manifest.fields}
    assert found == {"what": ("text", "uint8"), "q": ("numbers", "int64"), "e": ("numbers", "float64")}


def test_columns_with_commas_brackets_and_spaces_are_named_as_advised(tmp_path: Path) -> None:
    source = table(tmp_path, '"a, b",E [keV],kind\n1,2,mu\n3,4,pi\n5,6,mu\n')
    manifest = make(source, tmp_path / "out", input=r"a\, b=x,E [keV]=e", target="kind")
    assert [item.name for item in manifest.fields] == ["x", "e", "kind"]
    with pytest.raises(SourceError, match=r"a comma within a name is typed as \\,"):
        make(source, tmp_path / "no", input="a, b=x", target="kind")
    words = table(tmp_path, '"a, b",E [keV],z,kind\n1,w,1,mu\nv,4,2,pi\n', "words.csv")
    for name, other in itertools.permutations((r"a\, b", "E [keV]")):
        with pytest.raises(SourceError, match=re.escape(f"--leave-out '{name}'")):
            make(words, tmp_path / "no", target="kind", leave_out=other)


@pytest.mark.parametrize("between", [";", "\t"], ids=["semicolons", "tabs"])
def test_a_csv_may_have_something_else_between_its_values(between: str, tmp_path: Path) -> None:
    source = table(tmp_path, (HEAD + ROWS).replace(",", between))
    assert recognise(str(source)) == "table"
    manifest = make(source, tmp_path / "out", target="particle=kind")
    assert manifest.class_names == ("muon", "pion") and manifest.splits["train"].num_samples == 2


@pytest.mark.parametrize("value", ["01/02/2024", "2024/01/02 10:00", "#N/A", "n/a"])
def test_dates_and_missing_values_with_a_slash_are_no_files(value: str, tmp_path: Path) -> None:
    assert recognise(str(table(tmp_path, f"a,b,y\n1,{value},0\n2,{value},1\n"))) == "table"


@pytest.mark.parametrize("first", ["sep=;\n", '"sep=;"\r\n', "\ufeffsep=;\n"])
def test_the_line_that_names_excels_separator_is_no_head(first: str, tmp_path: Path) -> None:
    source = table(tmp_path, first + "a;note;y\n1;p, q;0\n2;r, s;1\n")
    assert recognise(str(source)) == "table"
    assert make(source, tmp_path / "out", categories="note=codes").fields[0].columns == ("a", "note")


@pytest.mark.parametrize("head", ["0,1,2,3", "400.5,401,402.25,1e3"], ids=["column numbers", "wavelengths"])
def test_columns_may_be_called_by_numbers_that_rise(head: str, tmp_path: Path) -> None:
    source = table(tmp_path, f"{head}\n5.1,3.5,1.4,0.25\n4.9,3.0,1.4,0.5\n")
    target = head.rpartition(",")[2]
    manifest = make(source, tmp_path / "out", target=f"{target}=y")
    assert manifest.splits["all"].num_samples == 2
    assert {item.name: item.shape for item in manifest.fields} == {"x": (3,), "y": ()}


def test_a_column_is_what_all_of_its_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdl.data.sources.table._VALUES", 10)
    rows = [
        ",".join(map(str, (n, n if n < 20 else 0.5, "" if n % 7 else n, n if n < 30 else "x", n % 2, split)))
        for n, split in enumerate(["train"] * 31 + ["test"] * 9)
    ]
    source = table(tmp_path, "a,b,c,d,y,split\n" + "\n".join(rows) + "\n")
    options = {"input": "a=a,b=b,c=c,d=d", "target": "y=y", "nan": "keep"}
    manifest = make(source, tmp_path / "out", **options)
    kinds = {item.name: (item.kind, item.dtype) for item in manifest.fields}
    assert kinds["a"] == ("numbers", "int64") and kinds["b"] == kinds["c"] == ("numbers", "float64")
    assert kinds["d"] == ("text", "uint8")
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {"train": 31, "test": 9}
    with h5py.File(tmp_path / "out" / manifest.splits["test"].shards[0].file) as file:
        assert sorted(file["a"]) == list(range(31, 40)) and set(file["b"]) == {0.5}
        assert sorted(np.array(file["c"])[np.isfinite(file["c"])]) == [35]
        assert bytes(file["d"][:]) == b"x" * 9


WRONG: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "no rows": ("a,b,y\n", {}, "holds no rows"),
    "a line too short": ("a,b,y\n1,2,3\n1,2\n", {}, "line 3: 2 values for 3 columns"),
    "a column twice": ("a,a,y\n1,2,3\n", {}, "'a' is named twice"),
    "spaces between": ("a b y\n1 2 0\n2 3 1\n", {}, "holds 'a b y' and '1 2 0' in one column: .*commas, semicolons"),
    "columns of a fixed width": ("a    y\n1    0\n22   1\n", {}, "in one column: .* pandas.read_csv"),
    "bars between": ("a|b|y\n1|2|0\n", {"target": "y"}, "in one column"),
    "a title above": ("Results of May\n\na,b,y\n1,2,0\n", {}, "line 1: is 'Results of May' a title or a comment"),
    "comments above": ("# a\n# b\na,b,y\n1,2,0\n", {}, "is '# a' a title or a comment"),
    "lines of old Macs": ("a,b,y\r1,2,0\r", {}, "line 1: its lines end with a carriage return .CR. alone"),
    "a title beside empty cells": ("Results of May,,\na,b,y\n1,2,0\n", {}, "is 'Results of May' a title"),
    "a comma at the end of lines": ("a,y,\n1,0,\n", {}, "line 1 ends with a comma, semicolon or tab"),
    "a column without a name": ("a,,y\n0,1,0\n", {}, "column 2 has no name; name it, and leave it out"),
    "a comma within a value": ("a,b,y\n1,x, or z,0\n", {}, "4 values for 3 columns; .*double quotes"),
    "no names": ("1,0.5,0\n2,0.7,1\n", {}, "line 1 holds numbers only; the first line names the columns"),
    "not UTF-8": (b"a,b,y\n1,2,caf\xe9\n", {}, "line 2: it is not UTF-8"),
    "which target": ("a,b,c\n1,2,3\n", {}, "which column is the target"),
    "text among the inputs": ("a,b,y\n1,red,0.5\n", {}, "the column 'b' holds text"),
    "a value is missing": ("a,b,y\n1,2,0.5\n1,,0.7\n", {}, "x of sample 1 is not finite .*--nan skip"),
    "no such column": ("a,b,y\n1,2,0.5\n", {"input": "w=w"}, "no array 'w'"),
    "a split of another name": ("a,y,split\n1,0.5,one\n", {}, "write train, val or test"),
    "only a target": ("y\n0.5\n0.7\n", {"format": "table"}, "no column is left"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tables_are_refused_with_their_reason_and_leave_nothing(case: str, tmp_path: Path) -> None:
    text, options, words = WRONG[case]
    source = table(tmp_path, text)
    with pytest.raises(SourceError, match=words):
        make(source, tmp_path / "new" / "out", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("value", ["1_{}", "0_{}", "1_{:03d}"])
def test_codes_with_underscores_are_no_numbers(value: str, tmp_path: Path) -> None:
    """Codes with underscores are not numbers, although Python's float() reads 1_2 as 12."""
    rows = "".join(f"{value.format(n)},{n % 2}\n" for n in range(8))
    with pytest.raises(SourceError, match=r"'a' holds (text|numbers written as '1_000')"):
        make(table(tmp_path, "a,b,y\n" + rows.replace(",", ",1,")), tmp_path / "out")


@pytest.mark.parametrize("rest", ["", ".5"], ids=["whole numbers, one missing", "floats"])
def test_numbers_that_float32_is_too_coarse_for_are_asked_about(rest: str, tmp_path: Path) -> None:
    rows = "".join(f"{2459000 * 100 + n}{rest},{n},{n % 2}\n" for n in range(8)) + ("" if rest else ",8,0\n")
    source = table(tmp_path, "a,b,y\n" + rows)
    with pytest.raises(SourceError, match=r"'a' holds numbers from 245900000.* rounds by up to .*--leave-out a"):
        make(source, tmp_path / "out", nan="keep")
    manifest = make(source, tmp_path / "out", nan="keep", input="a=a,b=b", target="y=y")
    assert manifest.fields[0].dtype == "float64"
    assert any("a: numbers from 245900000" in line for line in manifest.understood)


def test_wide_columns_of_floats_are_taken(tmp_path: Path) -> None:
    rows = "".join(f"{10.0 ** (n - 4) / 3},{n},{n % 2}\n" for n in range(13))
    assert make(table(tmp_path, "a,b,y\n" + rows), tmp_path / "out").fields[0].shape == (2,)


@pytest.mark.parametrize("other", ["target", "label_id", "Y"])
def test_a_second_target_is_no_input(other: str, tmp_path: Path) -> None:
    source = table(tmp_path, f"a,y,{other}\n" + "".join(f"{n}.5,{n % 2},{n % 2}\n" for n in range(8)))
    with pytest.raises(SourceError, match=f"which of the columns 'y', '{other}' is the target.*--leave-out"):
        make(source, tmp_path / "out")
    assert make(source, tmp_path / "out", target="y=y", leave_out=other).fields[0].shape == (1,)
    assert make(source, tmp_path / "both", target="y=y").fields[0].shape == (2,)


@pytest.mark.parametrize("value", ["5 kg", "12:03", "2024-01-05", "20-29", "<0.5", "[1, 2]"])
def test_quantities_with_units_and_times_are_not_taken_for_words(value: str, tmp_path: Path) -> None:
    source = table(tmp_path, "a,b,target\n" + f'1,"{value}",0\n2,"7 kg",1\n')
    with pytest.raises(SourceError, match=f"begins with numbers, such as '{re.escape(value)}': a quantity, a time or"):
        make(source, tmp_path / "no")
    assert make(source, tmp_path / "out", categories="b=codes").fields[0].columns == ("a", "b")


GROUPS = "{},a,target\n" + "".join(f"{row // 4},{row * 0.3},{row % 2}\n" for row in range(24))


@pytest.mark.parametrize("name", ["group", "Patient", "subject", "participants"])
def test_a_column_that_says_which_rows_belong_together_is_asked_about(name: str, tmp_path: Path) -> None:
    source = table(tmp_path, GROUPS.format(name))
    with pytest.raises(SourceError, match=f"is the column '{name}' a feature, or does it say which rows belong toge"):
        make(source, tmp_path / "no")
    assert make(source, tmp_path / "out", leave_out=name).fields[0].columns == ("a",)


@pytest.mark.parametrize("name", ["age_group", "blood group", "usergroups"])
def test_other_groups_are_features(name: str, tmp_path: Path) -> None:
    source = table(tmp_path, GROUPS.format(name))
    manifest = make(source, tmp_path / "out", split="train=0.5,val=0.5")
    assert manifest.fields[0].columns == (name, "a") and not any("too good" in line for line in manifest.understood)


def test_split_by_rows_says_that_it_does_not_keep_patients_together(tmp_path: Path) -> None:
    parts = "train=0.5,val=0.5"
    source = table(tmp_path, GROUPS.format("patient_id"))
    manifest = make(source, tmp_path / "out", leave_out="patient_id", split=parts)
    assert any("one 'patient_id' may be in several splits, which makes" in line for line in manifest.understood)
    np.savez(tmp_path / "a.npz", x=np.ones((24, 2), np.float32), y=np.arange(24) % 2, groups=np.arange(24) // 4)
    manifest = make(tmp_path / "a.npz", tmp_path / "arrays", split=parts)
    assert any("one 'groups' may be in several splits" in line for line in manifest.understood)
    targets = make(table(tmp_path, GROUPS.format("group")), tmp_path / "by", target="group", split=parts)
    assert not any("too good" in line for line in targets.understood)


def test_the_index_of_a_table_that_pandas_wrote_twice_is_asked_about(tmp_path: Path) -> None:
    source = table(tmp_path, "Unnamed: 0,a,y\n" + "".join(f"{row},{row % 3},{row / 7}\n" for row in range(9)))
    with pytest.raises(SourceError, match=r"is the column 'Unnamed: 0' a feature, or a number of the rows\?"):
        make(source, tmp_path / "out")
    assert make(source, tmp_path / "out", leave_out="Unnamed: 0").fields[0].columns == ("a",)


def test_a_table_that_ends_within_a_line_is_reported(tmp_path: Path) -> None:
    words = "t.csv: its last line has no end, as in a file that was cut; check its last value"
    for number, (end, reported) in enumerate({"\n": False, "\r\n": False, "": True}.items()):
        manifest = make(table(tmp_path, f"a,b,y\n1,2,0\n3,4.25,1{end}"), tmp_path / str(number))
        assert (words in manifest.understood) == reported


@pytest.mark.parametrize("values", ["5 kg,7 kg", "0.5kg,0.7kg", "12:03,14:30", "2024-01-05,2024-02-01", "20-29,30-39"])
def test_a_target_of_quantities_with_units_is_asked_about(values: str, tmp_path: Path) -> None:
    rows = "".join(f"{row},{values.split(',')[row % 2]}\n" for row in range(12))
    source = table(tmp_path, "a,target\n" + rows)
    with pytest.raises(SourceError, match=r"classes, or quantities, times or ranges\? .*--target-kind class"):
        make(source, tmp_path / "no")
    assert make(source, tmp_path / "out", target_kind="class").class_names == tuple(values.split(","))


@pytest.mark.parametrize("values", ["1st,2nd", "cat,dog", "B12,B6", "3D,2D", "type 1,type 2"])
def test_names_with_numbers_are_classes(values: str, tmp_path: Path) -> None:
    rows = "".join(f"{row},{values.split(',')[row % 2]}\n" for row in range(12))
    manifest = make(table(tmp_path, "a,target\n" + rows), tmp_path / "out")
    assert set(manifest.class_names) == {*values.split(",")}


@pytest.mark.parametrize("kind", ["column", "files", "pictures"])
@pytest.mark.parametrize("shared", [False, True])
def test_patients_in_several_splits_are_shown(kind: str, shared: bool, tmp_path: Path) -> None:
    rows = [(f"p{row // 2 % 20 if shared else row % 20}", ("train", "val")[row % 2]) for row in range(80)]
    if kind == "files":
        for split in ("train", "val"):
            lines = [f"{patient},{row % 7},{row % 3}" for row, (patient, own) in enumerate(rows) if own == split]
            (tmp_path / f"{split}.csv").write_text("\n".join(["patient,a,y", *lines]) + "\n")
    else:
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "1.png")
        first = "1.png" if kind == "pictures" else "5"
        lines = [f"{first},{patient},{split},{patient == 'p3'}" for patient, split in rows]
        (tmp_path / "t.csv").write_text("\n".join(["a,patient,split,label", *lines]) + "\n")
    source = tmp_path if kind == "files" else tmp_path / "t.csv"
    flags = {"target_kind": "class"} if kind == "pictures" else {"leave_out": "patient"}
    understood = " ".join(make(source, tmp_path / "out", **flags).understood)
    line = "20 of 20 values of 'patient' are in several splits, such as 'p0' in train and val: if samples of one belong"
    assert (line in understood) == shared and ("several splits" in understood) == shared


def test_groups_are_looked_for_in_bounded_memory() -> None:
    taken = []

    def words_of() -> Iterator[tuple[str, list[str]]]:
        for first in range(0, 5_000_000, 500_000):
            taken.append(first)
            yield "train", [str(number) for number in range(first, first + 500_000)]

    assert remark_on_groups("id", words_of()) == [
        "'id' has over 1,000,000 values: splits that share one were not found"
    ]
    assert len(taken) == 3


@pytest.mark.parametrize("patients", [np.arange(20) // 4, np.array(["p1", "p2"] * 10)])
@pytest.mark.parametrize("shared", [False, True])
def test_patients_in_several_splits_of_arrays_are_shown(shared: bool, patients: np.ndarray, tmp_path: Path) -> None:
    others = (
        patients if shared else np.char.add("q", patients.astype(str)) if patients.dtype.kind == "U" else patients + 9
    )
    arrays = {"x_train": np.ones((20, 2)), "y_train": np.arange(20) % 2, "subject_train": patients}
    arrays |= {"x_test": np.ones((20, 2)), "y_test": np.arange(20) % 2, "subject_test": others}
    np.savez(tmp_path / "a.npz", **arrays)
    reported = " ".join(make(tmp_path / "a.npz", tmp_path / "out").understood)
    assert ("values of 'subject' are in several splits, such as" in reported) == shared


@pytest.mark.parametrize(
    ("column", "target", "line"),
    [
        (lambda t: t * 1.8 + 32, lambda t: t, "the column 'b' is the same but for scale and offset: a copy of the"),
        (lambda t: t // 3 * 5, lambda t: "abc"[int(t // 3)], "the column 'b' names each class by a number: a copy"),
        (
            lambda t: int(t < 3),
            lambda t: "abc"[int(t // 3)],
            "the column 'b' marks one class alone: a part of the target",
        ),
        (lambda t: int(t < 4), lambda t: "abc"[int(t // 3)], ""),
        (lambda t: t * 1.8 + (t > 7), lambda t: t + 0.5, ""),
        (lambda t: t // 2, lambda t: "abc"[int(t // 3)], ""),
        (lambda t: 1, lambda t: t + 0.5, ""),
    ],
)
def test_a_column_that_repeats_the_target_is_shown(
    column: Callable[[float], float], target: Callable[[float], Any], line: str, tmp_path: Path
) -> None:
    rows = [f"{row * 7 % 11},{column(row % 9)},{target(row % 9 * 1.0)}" for row in range(90)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    kind = "class" if isinstance(target(1.0), str) else "regression"
    understood = " ".join(make(tmp_path / "t.csv", tmp_path / "out", target_kind=kind).understood)
    assert (line in understood) if line else ("a copy" not in understood and "one-hot" not in understood)


@pytest.mark.parametrize(
    ("column", "target", "line"),
    [
        (lambda t: f"{np.exp(t / 40):.4f}", lambda t: f"{t:.2f}", "y: rank correlation over 0.999 with the column 'b'"),
        (lambda t: f"{-t * 1.8:.0f}", lambda t: f"{t:.2f}", "y: rank correlation over 0.999 with the column 'b'"),
        (lambda t: f"{t:.2f}", lambda t: "abc"[int(t > 40) + int(t > 70)], "y: bounds alone tell all classes apart in"),
        (lambda t: f"{t + t * 7 % 9:.2f}", lambda t: f"{t:.2f}", ""),
        (lambda t: f"{t:.2f}", lambda t: "abc"[int(t > 40) - int(t > 70)], ""),
        (lambda t: f"{t // 20}", lambda t: f"{t // 20 * 3.5}", ""),
    ],
)
def test_a_column_that_orders_as_the_target_is_shown(
    column: Callable[[float], str], target: Callable[[float], str], line: str, tmp_path: Path
) -> None:
    times = [row * 37 % 211 / 2 for row in range(200)]
    rows = [f"{row % 11},{column(time)},{target(time)}" for row, time in enumerate(times)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    understood = " ".join(make(tmp_path / "t.csv", tmp_path / "out").understood)
    assert (line in understood) if line else "known only with it" not in understood


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (lambda a, b, c: a + c, "y: it is 'a' + 'c' in all rows seen"),
        (lambda a, b, c: b - a + 5, "y: it is 'b' - 'a' in all rows seen"),
        (lambda a, b, c: round(a * b / c**2, 3), "y: it is 'a' * 'b' / 'c'^2 in all rows seen"),
        (lambda a, b, c: a + 2 * b + c, ""),
        (lambda a, b, c: a + c + b % 3, ""),
        (lambda a, b, c: a**1.5 * c, ""),
    ],
)
def test_sums_and_products_of_columns_that_are_the_target_are_shown(
    target: Callable[[float, float, float], float], line: str, tmp_path: Path
) -> None:
    numbers = np.random.default_rng(3).uniform(1, 9, (200, 3)).round(2)
    rows = [f"{a},{b},{c},{target(a, b, c)}" for a, b, c in numbers.tolist()]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,y", *rows]) + "\n")
    understood = " ".join(make(tmp_path / "t.csv", tmp_path / "out").understood)
    assert (line in understood) if line else "it is" not in understood


@pytest.mark.parametrize(
    ("column", "line"),
    [
        (lambda row: 7, "x: the column 'b' is 7 in all rows seen"),
        (lambda row: row % 2, ""),
        (lambda row: 0 if row % 9 == 0 else 50 + row, "of 0 at index 1, all others 51 to"),
        (lambda row: -1 if row % 9 == 0 else 18 + row % 60, "of -1 at index 1, all others 18 to"),
        (lambda row: 0 if row % 9 == 0 else row / 10, ""),
        (lambda row: 0 if row % 9 == 0 else 2 + row % 3, ""),
        (lambda row: row % 3 - 1, ""),
    ],
)
def test_columns_of_one_number_or_with_low_marks_of_missing_values_are_shown(
    column: Callable[[int], float], line: str, tmp_path: Path
) -> None:
    rows = [f"{row * 7 % 11},{column(row)},{row * 13 % 17 + 0.5}" for row in range(120)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    understood = " ".join(make(tmp_path / "t.csv", tmp_path / "out", target="y=y", normalise="mean-std").understood)
    assert (line in understood) if line else "in all rows" not in understood and "mark of" not in understood


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (lambda row: f"{row * 97 + 900:,}".replace(",", "."), True),
        (lambda row: f"{row * 0.971 + 1:.3f}", False),
        (lambda row: f"{row * 0.125 + 1:g}", False),
        (lambda row: f"{row}", False),
        (lambda row: f"{row * 0.97:.2f}", False),
    ],
)
def test_points_that_may_mark_thousands_are_shown(column: Callable[[int], str], said: bool, tmp_path: Path) -> None:
    rows = [f"{row * 7 % 11};{column(row)};{row * 13 % 17 + 0.5}" for row in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a;b;y", *rows]) + "\n")
    understood = " ".join(make(tmp_path / "t.csv", tmp_path / "out", target="y=y").understood)
    assert ("'b': 1.094 is read as a fraction, and 900 is whole: do points mark thousands?" in understood) == said
    assert ("mark thousands" in understood) == said


@pytest.mark.parametrize("in_turn", [True, False])
def test_targets_of_which_one_is_1_in_each_row_are_shown(in_turn: bool, tmp_path: Path) -> None:
    rows = [
        ",".join(
            map(
                str,
                (number * 7 % 11, *(int(number % 3 == at or (number % 4 == at and not in_turn)) for at in range(3))),
            )
        )
        for number in range(60)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["a,cat,dog,cow", *rows]) + "\n")
    understood = " ".join(make(tmp_path / "t.csv", tmp_path / "out", target="cat,dog,cow").understood)
    assert (
        "one of the targets 'cat', 'dog', 'cow' is 1 in each row: one target of 3 classes?" in understood
    ) == in_turn


@pytest.mark.parametrize(("step", "said"), [(1, True), (2, False)])
def test_a_column_that_counts_the_rows_is_shown(tmp_path: Path, step: int, said: bool) -> None:
    rows = [f"{row * step + 5},{row * 7 % 11},{row % 2}" for row in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["sample,a,y", *rows]) + "\n")
    understood = " ".join(make(tmp_path / "t.csv", tmp_path / "out", target="y=y").understood)
    assert ("the column 'sample' counts the rows" in understood) == said


PLACES = "UN/Turtle Bay South", "no credits/all paid", "d/l", "ann@uni.edu", "www.uni.edu"


@pytest.mark.parametrize("value", PLACES)
def test_words_with_a_slash_and_addresses_are_no_files(value: str, tmp_path: Path) -> None:
    assert recognise(str(table(tmp_path, f"a,b,y\n1,{value},0\n2,{value},1\n"))) == "table"


@pytest.mark.parametrize("name", ["cat/0001", "a@2x.png", "a@b.png", "no such/1.png"])
def test_images_of_a_list_are_told_by_their_ending_or_are_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/0001").touch()
    assert recognise(str(table(tmp_path, f"x,y\n{name},0\n{name},1\n"))) == "csv"


def test_columns_of_words_alone_have_no_row_of_sums(tmp_path: Path) -> None:
    rows = "".join(f"{'yn'[row % 2]},{'pq'[row // 2 % 2]},{row / 7}\n" for row in range(40))
    manifest = make(table(tmp_path, "a,b,y\n" + rows), tmp_path / "out", categories="a=one-hot,b=one-hot", target="y")
    assert not any("the last row" in line for line in manifest.understood)
    words = "".join(f"{'yn'[row % 2]},{'pq'[row // 2 % 2]},{'rs'[row % 2]}\n" for row in range(40))
    other = make(table(tmp_path, "a,b,y\n" + words), tmp_path / "w", categories="a=one-hot,b=one-hot", target="y")
    assert not any("the last row" in line for line in other.understood)


def test_a_rare_word_of_a_one_hot_column_does_not_make_the_column_constant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcdl.data.sources.base.placed.VALUES_AT_ONCE", 200)
    rows = "p,1,0\nq,2,1\n" * 50 + "r,1,1\n"
    manifest = make(table(tmp_path, "a,b,y\n" + rows), tmp_path / "out", categories="a=one-hot", target="y")
    assert not any("in all rows seen" in line for line in manifest.understood), manifest.understood


@pytest.mark.parametrize(
    ("rows", "reported"),
    [("1,dog\n2,cat\n3,dog", False), ("1,dog\n2,cat\n3,ca", True), ("1,0.25\n2,1.50\n3,7.75", False),
     ("1,0.25\n2,1.50\n3,7.7", True), ("1,20\n2,30\n3,4", True)],
)  # fmt: skip
def test_a_last_value_that_is_whole_needs_no_end(rows: str, reported: bool, tmp_path: Path) -> None:
    manifest = make(table(tmp_path, "a,y\n" + rows), tmp_path / "out", target="y")
    assert any("its last line has no end" in line for line in manifest.understood) == reported


HEADLESS = "5.1,3.5,setosa\n" + "4.9,3.5,setosa\n6.3,2.8,virginica\n" * 6


@pytest.mark.parametrize(
    ("text", "column", "asked"),
    [(HEADLESS, "setosa", True), ("A11, 6,good\n" + "A12, 6,bad\nA11, 7,good\n" * 6, "good", True),
     ("country,2010,2011\n" + "Chad,2010,5\nMali,4,2011\n" * 6, "country", False),
     ("spam,a,text\n" + "spam,1,buy\nham,2,hi\n" * 6, "spam", False)],
)  # fmt: skip
def test_a_first_line_of_which_each_word_is_a_value_is_asked_about(
    text: str, column: str, asked: bool, tmp_path: Path
) -> None:
    source, more = table(tmp_path, text), {"leave_out": "text"} if "text" in text else {}
    if asked:
        with pytest.raises(SourceError, match=r"is the first line a sample\? .*--head none.*--head names"):
            make(source, tmp_path / "no")
        more = {"head": "names", "categories": "A11=codes"} if "A11" in text else {"head": "names"}
    manifest = make(source, tmp_path / "out", target=column, **more)
    assert manifest.splits["all"].num_samples == 12


def test_a_first_column_without_a_name_is_called_as_by_pandas(tmp_path: Path) -> None:
    source = table(tmp_path, ",a,y\n" + "".join(f"{row},{row % 5},{row / 7}\n" for row in range(12)))
    with pytest.raises(SourceError, match=r"'Unnamed: 0' a feature, or a number of the rows\? Give --leave-out"):
        make(source, tmp_path / "no")
    manifest = make(source, tmp_path / "out", leave_out="Unnamed: 0")
    assert manifest.fields[0].columns == ("a",)
    assert "the first column has no name; here it is called 'Unnamed: 0'" in manifest.understood
    words = table(tmp_path, ",y\n" + "".join(f"gene{row},{row / 7}\n" for row in range(12)))
    with pytest.raises(SourceError, match=r"'Unnamed: 0' holds text. As numbers\?.*--leave-out 'Unnamed: 0'"):
        make(words, tmp_path / "no")


def test_a_single_column_of_dates_is_no_text_unasked(tmp_path: Path) -> None:
    source = table(tmp_path, "Date,y\n" + "".join(f"1981-01-{row + 10},{row / 7}\n" for row in range(12)))
    with pytest.raises(SourceError, match=r"begins with numbers, such as '1981-01-10'.* for text name the inputs"):
        make(source, tmp_path / "no")
    assert make(source, tmp_path / "out", input="Date=date").fields[0].kind == "text"


@pytest.mark.parametrize(
    ("numbers", "asked"),
    [([0, 1, 2, 4, 7, 9, 12, 13, 16, 19], True),
     ([60, 63, 64, 66, 67, 68, 69, 70, 72, 74], True), ([-9, -7, -6, -4, -2, 0, 1, 3, 5, 8], True),
     (range(10, 20), False), ([1, 2, 3, 5, 6, 7, 9, 10, 11, 13], False), ([3, 4, 5, 7], False)],
)  # fmt: skip
def test_many_numbers_with_gaps_may_be_quantities(numbers: Sequence[int], asked: bool, tmp_path: Path) -> None:
    source = table(tmp_path, "a,y\n" + "".join(f"{row / 7},{numbers[row % len(numbers)]}\n" for row in range(80)))
    if asked:
        with pytest.raises(SourceError, match=r"10 different whole numbers from -?\d+ to \d+: classes or quantities"):
            make(source, tmp_path / "no")
    manifest = make(source, tmp_path / "out", **({"target_kind": "class"} if asked else {}))
    assert manifest.fields[1].kind == "class"


def test_values_between_spaces_are_named_without_a_head_too(tmp_path: Path) -> None:
    for text in (" 0.00632  18.00   2.310\n 0.02731   0.00   7.070\n", "AAT 0.49 0.29\nACE 0.07 0.40\n"):
        with pytest.raises(SourceError, match=r"in one column: values are read between commas.*sep=r"):
            make(table(tmp_path, text), tmp_path / "no", head="none", target="c1")


@pytest.mark.parametrize("name", ["rownames", "Serial No.", "S.No", "row", "Row Num", "obs_no"])
def test_numbers_of_rows_are_asked_about(name: str, tmp_path: Path) -> None:
    source = table(tmp_path, f"{name},a,y\n" + "".join(f"{row + 1},{row % 5},{row / 7}\n" for row in range(12)))
    with pytest.raises(SourceError, match=r"a feature, or a number of the rows\? Give --leave-out"):
        make(source, tmp_path / "no")
    assert make(source, tmp_path / "out", leave_out=name).fields[0].columns == ("a",)


@pytest.mark.parametrize("name", ["rowing", "answer_no", "snow", "records"])
def test_other_names_like_those_of_rows_are_features(name: str, tmp_path: Path) -> None:
    source = table(tmp_path, f"{name},a,y\n" + "".join(f"{row * row},{row % 5},{row / 7}\n" for row in range(12)))
    assert make(source, tmp_path / "out").fields[0].columns == (name, "a")


@pytest.mark.parametrize("name", ["Sepal.Width", "S.No", "pred.prob"])
def test_a_first_name_with_a_point_is_no_file(name: str, tmp_path: Path) -> None:
    assert recognise(str(table(tmp_path, f"{name},y\n0.5,0\n0.75,1\n"))) == "table"
    assert recognise(str(table(tmp_path, "a.png,cat\nb.png,dog\n"))) == "csv"


def test_tables_of_other_names_and_images_alone_are_advised(tmp_path: Path) -> None:
    (tmp_path / "iris.data").write_text("5.1,3.5,setosa\n4.9,3.0,setosa\n")
    with pytest.raises(SourceError, match=r"it seems a table: then give --format table, and --head none"):
        recognise(str(tmp_path / "iris.data"))
    (tmp_path / "flat").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / "flat" / f"cat.{number}.jpg")
    with pytest.raises(SourceError, match=r"of images alone, put each class's into a folder of its own, or list files"):
        recognise(str(tmp_path / "flat"))
