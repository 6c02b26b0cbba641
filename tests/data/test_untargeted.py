"""Samples without a target, whose outputs a model shall compute: `hpcdl shard --target nothing`."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import CommandLine

ROWS = np.random.default_rng(3).normal(size=(50, 3)).astype(np.float32)
NAMES = ("p", "q", "r")


def write(path: Path) -> None:
    if path.suffix == ".npz":
        np.savez(path, x=ROWS)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["x"] = ROWS
    elif path.suffix == ".csv":
        np.savetxt(path, ROWS, delimiter=",", header=",".join(NAMES), comments="", fmt="%.9g")
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({name: ROWS[:, column] for column, name in enumerate(NAMES)}), path)
    else:
        with tarfile.open(path, "w") as tar:
            for number, row in enumerate(ROWS):
                content = io.BytesIO()
                np.save(content, row)
                member = tarfile.TarInfo(f"{number:03d}.x.npy")
                member.size = content.tell()
                content.seek(0)
                tar.addfile(member, content)


def fields_in(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(next(folder.rglob("shard-*.h5"))) as shard:
        return shard["x"][:], shard["row"][:]


@pytest.mark.parametrize("suffix", [".npz", ".h5", ".csv", ".parquet", ".tar"])
def test_each_sample_keeps_its_number_in_the_source(ask_hpcdl: CommandLine, tmp_path: Path, suffix: str) -> None:
    source, folder = tmp_path / f"new{suffix}", tmp_path / "data"
    write(source)
    made = ask_hpcdl(["shard", source, folder, "--target", "nothing"])
    assert made.code == 0 and "hpcdl docs infer" in made.err, made.err
    values, numbers = fields_in(folder)
    assert sorted(numbers) == [*range(50)] and [*numbers] != [*range(50)]
    np.testing.assert_array_equal(values.reshape(50, 3), ROWS[numbers])


def test_numbers_go_on_in_the_next_file_of_a_split(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for part in range(2):
        np.savez(tmp_path / "new" / f"part{part}.npz", x=ROWS[25 * part : 25 * part + 25])
    made = ask_hpcdl(["shard", tmp_path / "new", tmp_path / "data", "--target", "nothing", "--sample-is", "row"])
    assert made.code == 0, made.err
    values, numbers = fields_in(tmp_path / "data")
    np.testing.assert_array_equal(values, ROWS[numbers])


def test_nothing_is_trained_or_measured_on_them(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    write(tmp_path / "new.npz")
    assert ask_hpcdl(["shard", tmp_path / "new.npz", tmp_path / "data", "--target", "nothing"]).code == 0
    (tmp_path / "own.py").write_text("def build(input_shape, num_classes):\n    raise RuntimeError\n")
    refused = ask_hpcdl(["train", "--model", f"{tmp_path}/own.py:build", "--data", tmp_path / "data", "--loss", "mse"])
    assert refused.code == 2 and "new.npz has no targets (--target nothing): `hpcdl infer` alone" in refused.err


def test_who_gives_no_target_is_told(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    for suffix in (".npz", ".csv"):
        write(tmp_path / f"new{suffix}")
        refused = ask_hpcdl(["shard", tmp_path / f"new{suffix}", tmp_path / "data"])
        assert refused.code == 2 and "for hpcdl infer alone, --target nothing" in refused.err, refused.err


def test_an_array_of_that_name_is_a_target(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=ROWS, nothing=ROWS[:, 0])
    assert ask_hpcdl(["shard", tmp_path / "new.npz", tmp_path / "data", "--target", "nothing"]).code == 0
    with h5py.File(next((tmp_path / "data").rglob("shard-*.h5"))) as shard:
        assert "nothing" in shard and "row" not in shard
