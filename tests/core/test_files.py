import json
import os
import stat
from pathlib import Path

import pytest

from hpcdl.core import files
from hpcdl.core.errors import CorruptError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    files.write_text(target, "old")

    def interrupted() -> None:
        with files.replacing(target) as temporary:
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


def test_damaged_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"a": [1, 2]})[:-2])
    with pytest.raises(CorruptError, match=r"x\.json is not valid JSON"):
        files.read_json(tmp_path / "x.json")
