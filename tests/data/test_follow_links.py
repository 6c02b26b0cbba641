"""--follow-links reads HDF5 values that are stored in other files, and never fills in missing ones."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdl.core.errors import SourceError, UsageError
from hpcdl.data.write.journal import source_state
from tests.data.sharding import everything, make, numbers, pixels, request, same_samples


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """A folder of three files of pictures with labels, and the two arrays of all samples."""
    folder = tmp_path / "parts"
    folder.mkdir()
    images, labels = pixels(12, (8, 8, 3)), numbers(12, 3)
    for number in range(3):
        with h5py.File(folder / f"part{number}.h5", "w") as file:
            file["images"], file["labels"] = images[4 * number :][:4], labels[4 * number :][:4]
    return folder, images, labels


def virtual(folder: Path, *, names: str = "parts/part{}.h5", count: int = 3, rows: int = 4) -> Path:
    """A file with its own labels, whose pictures are a virtual data set over the parts."""
    layout = h5py.VirtualLayout((4 * count, 8, 8, 3), "u1")
    for number in range(count):
        source = h5py.VirtualSource(names.format(number), "images", (rows, 8, 8, 3))
        layout[4 * number : 4 * number + rows] = source
    path = folder / "whole.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("images", layout)
        file["labels"] = numbers(4 * count, 3)
    return path


def pattern(folder: Path) -> Path:
    """A file whose pictures are a virtual data set over any number of parts, named by a pattern."""
    here, there = (
        h5py.h5s.create_simple((4, 8, 8, 3), (h5py.h5s.UNLIMITED, 8, 8, 3)),
        h5py.h5s.create_simple((4, 8, 8, 3)),
    )
    here.select_hyperslab((0,) * 4, (h5py.h5s.UNLIMITED, 1, 1, 1), (4, 1, 1, 1), (4, 8, 8, 3))
    there.select_hyperslab((0,) * 4, (1,) * 4, None, (4, 8, 8, 3))
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_virtual(here, b"parts/part%b.h5", b"images", there)
    path = folder / "pattern.h5"
    with h5py.File(path, "w", libver="latest") as file:
        h5py.h5d.create(file.id, b"images", h5py.h5t.STD_U8LE, here, made)
        file["labels"] = numbers(4, 3)
    return path


def test_a_virtual_data_set_is_read(parts: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    path = virtual(tmp_path)
    with pytest.raises(
        SourceError, match=r"whole\.h5: images is a virtual data set, .*parts/part0\.h5.*--follow-links"
    ):
        make(path, tmp_path / "out")
    manifest = make(path, tmp_path / "out", follow_links=True)
    assert same_samples(everything(tmp_path / "out", manifest, "all"), parts[1], parts[2])
    assert "links followed to 'parts/part0.h5', 'parts/part1.h5', 'parts/part2.h5'" in manifest.understood
    fields = make(path, tmp_path / "fields", follow_links=True, input="images=x", target="labels=y")
    assert [item.name for item in fields.fields] == ["x", "y"]
    with h5py.File(tmp_path / "fields" / fields.shards()[0].file) as file:
        assert sorted(own.tobytes() for own in file["x"][:]) == sorted(own.tobytes() for own in parts[1])


@pytest.mark.parametrize("whole", [True, False], ids=["group", "arrays"])
def test_external_links_are_read(whole: bool, parts: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    path = tmp_path / "links.h5"
    with h5py.File(path, "w") as file:
        if whole:
            file["first"] = h5py.ExternalLink("parts/part0.h5", "/")
        else:
            file["images"] = h5py.ExternalLink("parts/part0.h5", "/images")
            file["labels"] = h5py.ExternalLink("parts/part0.h5", "/labels")
    with pytest.raises(SourceError, match=r"is a link to /\w* in another file, parts/part0\.h5; give --follow-links"):
        make(path, tmp_path / "out")
    manifest = make(path, tmp_path / "out", follow_links=True)
    assert same_samples(everything(tmp_path / "out", manifest, "all"), parts[1][:4], parts[2][:4])
    fields = make(path, tmp_path / "fields", follow_links=True, input="images=x", target="labels=y")
    with h5py.File(tmp_path / "fields" / fields.shards()[0].file) as file:
        assert sorted(own.tobytes() for own in file["x"][:]) == sorted(own.tobytes() for own in parts[1][:4])


def test_values_that_are_not_there_are_no_zeros(parts: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    """Missing values are an error: HDF5 silently fills in zeros if a virtual data set's file is missing or short."""
    folder, *_ = parts
    (folder / "part1.h5").rename(folder / "gone.h5")
    with pytest.raises(SourceError, match=r"images in parts/part1\.h5, which is not there"):
        make(virtual(tmp_path), tmp_path / "out", follow_links=True)
    with h5py.File(folder / "part1.h5", "w") as file:
        file["images"] = pixels(3, (8, 8, 3))
    with pytest.raises(SourceError, match=r"part1\.h5, which has the shape \(3, 8, 8, 3\): some of its values"):
        make(virtual(tmp_path), tmp_path / "out", follow_links=True)
    (folder / "gone.h5").rename(folder / "part1.h5")
    with pytest.raises(SourceError, match=r"images is a virtual data set of which 576 of 2304 values exist nowhere"):
        make(virtual(tmp_path, rows=3), tmp_path / "out", follow_links=True)
    with pytest.raises(SourceError, match="a pattern of names"):
        make(pattern(tmp_path), tmp_path / "out", follow_links=True)
    assert not (tmp_path / "out").exists()


def test_links_that_lead_nowhere_or_round_are_named(tmp_path: Path) -> None:
    path = tmp_path / "round.h5"
    with h5py.File(path, "w") as file:
        file["labels"] = numbers(4, 2)
        file["images"] = h5py.ExternalLink("gone.h5", "/images")
    with pytest.raises(SourceError, match=r"images is a link to /images in gone\.h5, which is not there"):
        make(path, tmp_path / "out", follow_links=True)
    with h5py.File(path, "w") as file:
        file["again"] = h5py.ExternalLink("round.h5", "/")
    with pytest.raises(SourceError, match="in a circle or too far"):
        make(path, tmp_path / "out", follow_links=True)


@pytest.mark.parametrize("flags", [{}, {"input": "images=x", "target": "labels=y"}], ids=["images", "fields"])
def test_a_file_behind_a_link_belongs_to_the_source(
    flags: dict[str, str], parts: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    """--resume refuses a source if a linked file has changed."""
    from hpcdl.data.write.listing import make_job

    path = virtual(tmp_path)
    (tmp_path / "work").mkdir()
    wish = request(path, tmp_path / "out", follow_links=True, **flags)
    job = make_job(wish, tmp_path / "work")
    before = source_state(job.spec, job.facts, "")
    os.utime(parts[0] / "part2.h5", (1, 1))
    assert source_state(job.spec, job.facts, "") != before


def test_the_flag_is_for_hdf5(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 2), "f4"), y=np.arange(4) % 2)
    with pytest.raises(UsageError, match="--follow-links is not for --format numpy"):
        make(tmp_path / "data.npz", tmp_path / "out", follow_links=True)
