"""`hpcdl examples` lists each example and copies it completely, and replaces no existing file."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.core.pages import manual
from hpcdl.core.storage import disk
from tests.conftest import ROOT, CommandLine

EXAMPLES = ROOT / "share" / "hpcdl" / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix != ".md")


def test_each_is_listed_with_what_it_is(ask_hpcdl: CommandLine) -> None:
    reported = ask_hpcdl(["examples", "--json"])
    assert reported.code == 0, reported.err
    listed = reported.json()["examples"]
    assert [item["name"] for item in listed] == NAMES and all(len(item["summary"]) > 20 for item in listed)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_whole(ask_hpcdl: CommandLine, tmp_path: Path, name: str) -> None:
    for _ in range(2):  # the second time changes nothing
        reported = ask_hpcdl(["examples", name, "--to", tmp_path / "here"])
        assert reported.code == 0, reported.err
    source, copy = EXAMPLES / name, tmp_path / "here" / name
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()] if source.is_dir() else [Path()]
    assert files and all((copy / path).read_bytes() == (source / path).read_bytes() for path in files)


def test_what_is_there_is_not_replaced(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    own = tmp_path / "my_model.py"
    own.write_text("mine")
    refused = ask_hpcdl(["examples", "digits", "my_model.py", "--to", tmp_path])
    assert refused.code == 2 and f"{own} exists and differs" in refused.err and own.read_text() == "mine"
    assert not (tmp_path / "digits").exists(), "nothing else is copied either"


@pytest.mark.parametrize("other_ends", [True, False])
def test_two_calls_at_once_make_one_copy(other_ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, target = (EXAMPLES / "my_model.py").read_bytes(), tmp_path / "my_model.py"
    rest = threading.Timer(0.1, target.write_bytes, (content,))
    create = disk.create

    def create_too_late(path: Path, text: bytes) -> None:
        target.write_bytes(content[:100])  # by another call, which has not ended
        if other_ends:
            rest.start()
        create(path, text)

    monkeypatch.setattr(disk, "create", create_too_late)
    refused = contextlib.nullcontext() if other_ends else pytest.raises(UsageError, match="exists and differs")
    with refused:
        manual.copy_examples(["my_model.py"], tmp_path)
        assert target.read_bytes() == content
        rest.join()


def test_a_folder_that_is_not_writable_is_named(ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(["examples", "readers", "my_model.py", "--to", "/sys"])  # where root cannot write either
    assert refused.code == 2 and refused.err.startswith("hpcdl: cannot write /sys/readers"), refused.err


def test_an_unknown_one_is_named(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    refused = ask_hpcdl(["examples", "my_modl.py", "--to", tmp_path])
    assert refused.code == 2 and "did you mean 'my_model.py'" in refused.err


def test_what_python_leaves_beside_examples_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's compiled files beside examples, left after a user loads one in place, are not examples."""
    share = tmp_path / "share"
    shutil.copytree(ROOT / "share" / "hpcdl" / "examples", share / "examples")
    for folder in (share / "examples", share / "examples" / "readers"):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"compiled")
    monkeypatch.setattr(manual, "share_folder", lambda: share)
    assert "__pycache__" not in [item.name for item in manual.list_examples()]
    manual.copy_examples(["readers"], tmp_path)
    assert sorted(path.name for path in (tmp_path / "readers").iterdir()) == sorted(
        path.name for path in (ROOT / "share" / "hpcdl" / "examples" / "readers").iterdir() if path.suffix == ".py"
    )


def test_a_file_in_the_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="file is no folder; choose another one with --to DIR"):
        manual.copy_examples(["digits"], tmp_path / "file")
