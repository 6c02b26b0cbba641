"""What hpcdl removes of a run directory: only its own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdl.run.rundir import discard

OWN = ("run.toml", "record.json", "ranks/all.json", "trace/rank-0.trace", "trace/.rank-1.place.0123456789abcdef.tmp")


@pytest.mark.parametrize("user_s", ["", "notes.txt", "trace/timeline.html", "trace/rank-0.trace.html"])
def test_a_run_that_is_repeated_is_removed_unless_a_user_has_put_something_there(tmp_path: Path, user_s: str) -> None:
    run_dir, aside = tmp_path / "run", tmp_path / "failed" / "run.1"
    for name in filter(None, (*OWN, user_s)):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("x")
    discard(run_dir, aside)
    assert not run_dir.exists()
    assert aside.exists() == bool(user_s)
    assert not user_s or (aside / user_s).is_file()
