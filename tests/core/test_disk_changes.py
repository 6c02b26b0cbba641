"""All disk changes go through core/storage/disk.py, and docs/security.md says what guards them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import disk_changes
from tests.core.disk_changes import HOME, PAGE, REPOSITORY, guarded, page, sources, unguarded

WORK = "in the work folder that this call has made for itself alone (data/write/target.py)"
ELSEWHERE = {
    "hpcdl/core/processes/streams.py": "the null device",
    "hpcdl/supervision/runtime.py": "the null device",
    "hpcdl/data/format/hdf5.py": "a new shard under the name that replacing() yields",
    "hpcdl/data/format/hdf5_source.py": f"copies {WORK}",
    "hpcdl/data/format/shard_file.py": "a new shard under the name that replacing() yields",
    "hpcdl/data/read/staging.py": "in the private folder that this call has made on its node",
    "hpcdl/data/sources": WORK,
    "hpcdl/data/write/division.py": WORK,
    "hpcdl/checkpoint/folders.py": "an archive in a file that creating() yields",
    "scripts/installer/build.py": "copies, into the new tree or the scratch folder that this call has made",
}
"""Places that change a disk by other means, and why that is safe."""


def _key(file: str) -> str:
    return next((name for name in ELSEWHERE if file == name or file.startswith(f"{name}/")), "")


def test_nothing_else_changes_a_disk() -> None:
    found = [place for path in sources() if str(path.relative_to(REPOSITORY)) != HOME for place in unguarded(path)]
    assert not [str(place) for place in found if not _key(place.file)]
    assert {_key(place.file) for place in found} == {*ELSEWHERE}, "an exception that nothing needs any more"


@pytest.mark.parametrize(
    "line",
    ["path.unlink()", "shutil.rmtree(folder)", "os.replace(a, b)", "a.rename(b)", "a.replace(b)", "os.truncate(a, 1)",
     "file.truncate(3)", "path.write_text(text)", "path.open('w')", "open(path, mode='ab')", "path.touch()",
     "os.open(path, os.O_WRONLY | os.O_CREAT)", "h5py.File(path, 'r+')", "shutil.copyfile(a, b)", "os.link(a, b)"],
)  # fmt: skip
def test_the_check_knows_a_change_when_it_sees_one(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_changes, "REPOSITORY", tmp_path)
    source = tmp_path / "new.py"
    source.write_text(f"def new():\n    {line}\n")
    assert len([*unguarded(source)]) == 1


def test_the_check_knows_what_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_changes, "REPOSITORY", tmp_path)
    source = tmp_path / "new.py"
    lines = ["text.replace('a', 'b')", "dataclasses.replace(item, name=1)", "path.open()", "path.open('rb')",
             "with replacing(path) as new:\n        new.write_text(text)"]  # fmt: skip
    source.write_text("def new():\n    " + "\n    ".join(lines) + "\n")
    assert not [*unguarded(source)]


def test_the_page_has_every_guard() -> None:
    assert page() == PAGE.read_text(), "write it again: python -m tests.core.disk_changes"
    assert len([place for path in sources() for place in guarded(path)]) > 100
