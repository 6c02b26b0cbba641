from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import DIGITS, CommandLine
from tests.data.sharding import contents, image_folder, make
from tests.data.test_formats import npy, tar

FIELDS = ("--input", "x.npy=x", "--target", "cls=label")


def test_what_is_in_it(ask_hpcdl: CommandLine, shards: Path) -> None:
    done = ask_hpcdl(["inspect", shards, "--json", "--samples", "4", "--out", ask_hpcdl.home / "pictures"])
    found = done.json()
    assert found["sample_shape"] == [28, 28, 1] and found["encoding"] == "raw" and found["num_classes"] == 10
    train, val = found["splits"]
    assert sum(train["histogram"].values()) == 1438 and sum(val["histogram"].values()) == 359
    truth = {folder.name: len(list(folder.iterdir())) for folder in DIGITS.iterdir() if folder.is_dir()}
    assert {name: train["histogram"][name] + val["histogram"][name] for name in truth} == truth
    assert all(abs(val["histogram"][name] - 0.2 * count) <= 1 for name, count in truth.items())
    assert len(found["pictures"]) == 4
    for path in found["pictures"]:
        with Image.open(path) as picture:
            assert picture.size == (28, 28) and picture.mode == "L"
    table = ask_hpcdl(["inspect", shards])
    assert "28x28x1 uint8, raw" in table.out and "1,438" in table.out and "--verify" in table.err


def test_data_without_classes_shows_no_count_of_them(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    np.savez(tmp_path / "waves.npz", x=np.random.default_rng(1).normal(size=(9, 4)), y=np.linspace(0, 1, 9))
    assert ask_hpcdl(["shard", tmp_path / "waves.npz", tmp_path / "waves"]).code == 0
    assert "classes" not in ask_hpcdl(["inspect", tmp_path / "waves"]).out


def test_damage_is_named_and_mended(ask_hpcdl: CommandLine) -> None:
    home = ask_hpcdl.home
    source = image_folder(home / "s", {"a": 40, "b": 40}, size=20)
    options: dict[str, object] = {"shards": 3, "split": "train=0.75,val=0.25", "image_size": "16x12", "max_ranks": 5}
    (source / "a" / "bad.png").write_bytes((source / "a" / "0000.png").read_bytes()[:60])
    make(source, home / "out", on_error="skip", **options)
    whole = contents(home / "out")
    shutil.copytree(source, home / "elsewhere" / "copy")  # another path and other times, the same content
    path = home / "out" / "train" / "shard-00001.h5"
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    (home / "out" / "val" / "shard-00002.h5").unlink()
    checked = ask_hpcdl(["inspect", "out", "--verify", "--json"])
    assert checked.code == 3
    assert "damaged: train/shard-00001.h5: block" in checked.err and "val/shard-00002.h5: cannot be read" in checked.err
    assert checked.json()["bad_shards"] == ["train/shard-00001.h5", "val/shard-00002.h5"]
    assert ask_hpcdl(["inspect", "out"]).code == 3
    mended = ask_hpcdl(["inspect", "out", "--repair", "--from", "elsewhere/copy"])
    assert mended.code == 0, mended.err
    assert contents(home / "out") == whole
    path.write_bytes(content)
    (home / "elsewhere" / "copy" / "b" / "0001.png").unlink()
    refused = ask_hpcdl(["inspect", "out", "--repair", "--from", "elsewhere/copy"])
    assert refused.code == 2 and "is not what" in refused.err
    assert path.read_bytes() == content and sorted(contents(home / "out")) == sorted(whole)


def test_samples_in_two_splits_are_warned_of(ask_hpcdl: CommandLine) -> None:
    home = ask_hpcdl.home
    image_folder(home / "s" / "train", {"a": 20, "b": 20})
    image_folder(home / "s" / "test", {"a": 8, "b": 8})  # the same random pixels as the first of train
    warning = "warning: 16 of 16 samples of test have the same inputs as samples of train"
    assert warning in ask_hpcdl(["shard", "s", "out", "-q"]).err
    assert warning in ask_hpcdl(["inspect", "out", "-q"]).err
    (home / "apart").mkdir()
    make(image_folder(home / "apart" / "s", {"a": 20, "b": 20}), home / "parts", split="train=0.5,val=0.5")
    assert "same inputs" not in ask_hpcdl(["inspect", "parts"]).err


@pytest.mark.parametrize("encoding", ["raw", "encoded"])
def test_pictures_of_two_classes_are_warned_of(ask_hpcdl: CommandLine, encoding: str) -> None:
    home = ask_hpcdl.home
    image_folder(home / "s", {"a": 8, "b": 8})
    shutil.copy(home / "s" / "a" / "0003.png", home / "s" / "b" / "copy.png")
    warning = "warning: 2 samples have the same inputs as samples of another class, such as sample "
    said = ask_hpcdl(["shard", "s", "out", "-q", "--encoding", encoding]).err
    assert warning in said and "('a')" in said and "('b')" in said
    assert warning in ask_hpcdl(["inspect", "out", "-q"]).err
    assert warning in ask_hpcdl(["shard", "s", "parts", "-q", "--split", "train=0.5,val=0.5"]).err
    (home / "s" / "b" / "copy.png").rename(home / "s" / "a" / "copy.png")
    assert "another class" not in ask_hpcdl(["shard", "s", "alike", "-q"]).err


@pytest.mark.parametrize(("copies", "said"), [(20, True), (1, False)])
def test_an_archive_under_two_names_is_warned_of(ask_hpcdl: CommandLine, copies: int, said: bool) -> None:
    home = ask_hpcdl.home
    (home / "s").mkdir()
    pixels = np.random.default_rng(2).random((20, 8, 8), np.float32)
    members = {f"{n}.x.npy": npy(pixels[n]) for n in range(20)} | {f"{n}.cls": b"%d" % (n % 2) for n in range(20)}
    members = dict(sorted(members.items(), key=lambda item: int(item[0].partition(".")[0])))
    tar(home / "s" / "a-0.tar", members)
    tar(home / "s" / "a-1.tar", dict(itertools.islice(members.items(), 2 * copies)))
    line = "20 of 40 samples of all have the same inputs as others of it"
    for made in (ask_hpcdl(["shard", "s", "out", "-q", *FIELDS]), ask_hpcdl(["inspect", "out", "-q"])):
        assert made.code == 0 and (line in made.err) == said and ("as others" in made.err) == said, made.err


def test_the_doubts_of_the_plan_are_shown_again(ask_hpcdl: CommandLine) -> None:
    np.savez(ask_hpcdl.home / "a.npz", x=np.eye(12), y=np.arange(12) % 3 + 1, lengths=np.arange(12))
    assert ask_hpcdl(["shard", "a.npz", "out"]).code == 0
    shown = ask_hpcdl(["inspect", "out"]).out
    assert "understood   y: labels are renumbered: 1 -> 0" in shown
    assert "understood   arrays not used: 'lengths'" in shown


def test_rows_of_a_table_may_be_alike(ask_hpcdl: CommandLine) -> None:
    (ask_hpcdl.home / "t.csv").write_text("a,b,y\n" + "1,2,0\n1,2,1\n3,4,1\n" * 4)
    assert "another class" not in ask_hpcdl(["shard", "t.csv", "out"]).err


def test_shards_that_the_manifest_does_not_name_are_reported(ask_hpcdl: CommandLine) -> None:
    home = ask_hpcdl.home
    make(image_folder(home / "s", {"a": 20, "b": 20}), home / "out", shards=2, split="train=0.5,val=0.5")
    assert "warning" not in ask_hpcdl(["inspect", "out", "-q"]).err
    shutil.copy(home / "out" / "train" / "shard-00001.h5", home / "out" / "train" / "shard-00002.h5")
    shutil.copy(home / "out" / "train" / "shard-00001.h5", home / "out" / "shard-00000.h5")
    names = ["shard-00000.h5", "train/shard-00002.h5"]
    for flags in ([], ["--verify"]):
        done = ask_hpcdl(["inspect", "out", *flags])
        assert done.code == 0 and f"does not name {', '.join(names)}" in done.err, done.err
    assert ask_hpcdl(["inspect", "out", "--json"]).json()["unknown_shards"] == names


def test_repair_asks_for_its_source(ask_hpcdl: CommandLine, shards: Path) -> None:
    assert ask_hpcdl(["inspect", shards, "--repair"]).code == 2
    assert ask_hpcdl(["inspect", ask_hpcdl.home / "nothing"]).code == 2
    assert ask_hpcdl(["inspect", ask_hpcdl.home]).code == 2


def test_pictures_of_floats_and_of_encoded_files(tmp_path: Path) -> None:
    from hpcdl.data.format.dataset import open_dataset
    from hpcdl.data.show.inspection import write_pictures

    make("synthetic:hep", tmp_path / "hep", samples=3)
    make(image_folder(tmp_path / "s", {"x y": 3}, kind="jpg"), tmp_path / "jpg", encoding="encoded")
    for name in ("hep", "jpg"):
        dataset = open_dataset(str(tmp_path / name))
        written = write_pictures(dataset, dataset.train_split, 2, tmp_path / f"{name}-pictures")
        assert len(written) == 2
        for path in written:
            with Image.open(path) as picture:
                assert picture.mode == "RGB" and np.asarray(picture).std() > 1
