"""`hpcdl inspect DIR --show` draws every kind of field, finds duplicates, and writes a page that a browser shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from hpcdl.data.show.inspection import look
from hpcdl.data.show.page import page
from tests.conftest import CommandLine
from tests.data.sharding import image_folder, make

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--enable-logging=stderr", "--v=0")  # fmt: skip
COUNT = 24
INPUTS = "picture=picture,series=series,volume=volume,hits=hits,note=note,row=row"


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a field of each kind; samples 0 to 4 of train are also in test."""
    folder = tmp_path_factory.mktemp("show")
    rng = np.random.default_rng(0)
    series = rng.random((COUNT, 40, 3), dtype=np.float32)
    series[3, 5, 1] = np.nan
    arrays = {
        "picture": rng.integers(0, 255, (COUNT, 20, 24, 3), dtype=np.uint8), "series": series,
        "volume": rng.random((COUNT, 6, 18, 18)), "row": rng.random((COUNT, 5)),
        "mask": rng.random((COUNT, 20, 24)) > 0.5, "energy": rng.random(COUNT),
    }  # fmt: skip
    with h5py.File(folder / "e.h5", "w") as file:
        for split, chosen in (("train", np.arange(COUNT)), ("test", np.arange(5))):
            for name, value in arrays.items():
                file[f"{split}/{name}"] = value[chosen]
            file[f"{split}/note"] = [f"<b>né</b>\n{number}" for number in chosen]
            file[f"{split}/kind"] = [["muon", "<i>pion"][number % 2] for number in chosen]
            lists = file.create_dataset(f"{split}/hits", (len(chosen),), h5py.vlen_dtype(np.dtype("<f4")))
            for number in range(len(chosen)):
                lists[number] = arrays["row"][number, : number % 3]
    make(folder / "e.h5", folder / "out", input=INPUTS, target="mask=mask,kind=kind,energy=energy", nan="keep")
    return folder / "out"


def test_every_kind_is_drawn_and_doubles_are_found(every_kind: Path) -> None:
    found = look(every_kind)
    assert found.repeats is not None
    assert [(item.split, item.other, item.num_samples) for item in found.repeats] in (
        [("test", "train", 5)],
        [("train", "test", 5)],
    )
    missing = {(item.field, item.split): item.missing for item in found.ranges}
    assert missing["series", "train"] == missing["series", "test"] == 1 and missing["picture", "train"] == 0
    text = page(found)
    assert "have the inputs of" in text and "learnt by heart" in text and "none" in text
    assert text.count('<figure class="sample">') == 12
    assert text.count("<b>mask</b> over its image") == 12 and text.count(", slice 3 of 6") == 12
    assert text.count("<polyline") == 12 * 3 and "&lt;i&gt;pion" in text and "<b>né" not in text
    assert not re.search(r"<script|https?:|@import", text)


def test_doubles_are_found_beside_larger_numbers_in_one_shard(tmp_path: Path) -> None:
    series, number = np.random.default_rng(0).random((8, 40), dtype=np.float32), np.arange(8)
    np.savez(tmp_path / "train.npz", x=series, number=number, y=series[:, 0])
    # 300 needs another type in memory than the numbers of train do.
    np.savez(tmp_path / "test.npz", x=series, number=np.where(number == 7, 300, number), y=series[:, 0])
    make(tmp_path, tmp_path / "out", input="x=x,number=number", target="y=y", sample_is="row", shards=1)
    found = look(tmp_path / "out")
    assert found.repeats is not None
    assert [item.num_samples for item in found.repeats] == [7]


def test_images_with_a_class_raw_encoded_and_compressed(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "s", {"cat": 6, "dog": 2})
    shutil.copy(source / "cat" / "0001.png", source / "dog" / "9.png")
    for options in ({}, {"encoding": "encoded"}, {"compression": "gzip"}):
        name = "-".join(options.values()) or "raw"
        make(source, tmp_path / name, **options)
        text = page(look(tmp_path / name))
        assert text.count("data:image/png") == 9 and ">cat</th>" in text
        assert ("1 samples of all have the inputs of another sample" in text) == (name != "gzip"), name
        assert ("Not looked for" in text) == (name == "gzip")


def test_the_command_writes_one_file_and_says_where(every_kind: Path, ask_hpcdl: CommandLine) -> None:
    done = ask_hpcdl(["inspect", every_kind, "--show", "--out", "look", "--json"])
    assert done.code == 0, done.err
    assert done.json()["page"] == "look/out-data.html"
    assert [path.name for path in (ask_hpcdl.home / "look").iterdir()] == ["out-data.html"]
    assert ask_hpcdl(["inspect", "nothing", "--show"]).code == 2
    impossible = ask_hpcdl(["inspect", every_kind, "--show", "--out", "/proc/look"])
    assert impossible.code == 2 and "--out /proc/look" in impossible.err


@pytest.fixture
def browser() -> str:
    return str(shutil.which("chromium"))


@pytest.mark.lab
def test_a_browser_shows_the_page(browser: str, every_kind: Path, tmp_path: Path) -> None:
    path, shot = tmp_path / "page.html", tmp_path / "shot.png"
    path.write_text(page(look(every_kind)))
    finished = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,3200",
         "--virtual-time-budget=4000", f"--screenshot={shot}", path.as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert ":CONSOLE" not in finished.stderr
    with Image.open(shot) as opened:
        picture = opened.convert("RGB")
    assert len(picture.getcolors(2**24) or ()) > 1000, "no samples are drawn"
