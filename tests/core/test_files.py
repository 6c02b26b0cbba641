import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.storage import disk, files
from hpcdl.core.storage.files import parse_json, parse_toml, read_json, read_toml, toml_text, write_toml


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    files.write_text(target, "old")

    def interrupted() -> None:
        with disk.replacing(target) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_umask_decides_the_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_json(tmp_path / "x.json", {"a": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o640


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner)))
def test_json_is_laid_out_as_the_standard_library_does(document: Any) -> None:
    assert files.json_text(document) == json.dumps(document, indent=1) + "\n"


@pytest.mark.parametrize("document", [{"\udcff": [1]}, ["\ud800"], {1: 2, None: [3], False: {}, 1.5: []}, "é", 10**30])
def test_json_holds_names_that_are_not_utf8(document: Any) -> None:
    assert files.json_text(document) == json.dumps(document, indent=1) + "\n"


def test_damaged_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"a": [1, 2]})[:-2])
    with pytest.raises(CorruptError, match=r"x\.json is not valid JSON"):
        files.read_json(tmp_path / "x.json")


WORDS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)
PLAIN = WORDS | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans()
NESTED = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(WORDS, NESTED, max_size=4))
def test_every_document_comes_back_from_toml(document: dict[str, Any]) -> None:
    assert parse_toml(toml_text(document)) == document


@pytest.mark.parametrize("path", ["C:\\x\\u00e9\\", "a'b\"c", "tab\t\x01\x1b[31m\x7f\x9b", "\\x41", "a\nb", "#[=]"])
def test_odd_paths_come_back_from_toml(path: str) -> None:
    text = toml_text({"run-dir": path, "facts": {path: [path, {path: path}]}})
    assert parse_toml(text) == {"run-dir": path, "facts": {path: [path, {path: path}]}}
    assert "\x1b" not in text and "\x9b" not in text


@pytest.mark.parametrize("value", [os.fsdecode(b"caf\xe9"), 2**63, object()])
def test_what_toml_cannot_hold_is_refused_and_nothing_written(value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stage: "):
        write_toml(tmp_path / "run.toml", {"stage": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("read", [read_json, read_toml], ids=["json", "toml"])
def test_only_plain_files_of_some_size_are_read(read: Callable[[Path], Any], tmp_path: Path) -> None:
    """Only plain files of limited size are read: pipes and devices would block the reader or fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10**12)
    for name, words in {"pipe": "a pipe", "zero": "a device", "loop": "symbolic", "folder": "directory"}.items():
        with pytest.raises(HpcdlError, match=words):
            read(tmp_path / name)
    with pytest.raises(HpcdlError, match="larger than"):
        read(tmp_path / "large")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[" * 70 + "]" * 70, '{"a":' * 900 + "1" + "}" * 900, "9" * 10_000, '"\\ud800', "\x00"],
    ids=["open", "lists", "objects", "digits", "cut", "zero"],
)
def test_odd_json_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    ["a=" + "[" * 100_000, ".".join("a" * 100_000) + "=1", "[" + ".".join(["'b'"] * 9999) + "]", "a=" + "9" * 10_000],
    ids=["lists", "dotted", "header", "digits"],
)
def test_odd_toml_is_no_toml(text: str) -> None:
    with pytest.raises(ValueError):
        parse_toml(text)
