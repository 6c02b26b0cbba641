"""The end of a run: its last files on a disk without space, and its last lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdl.checkpoint.folders import list_checkpoints
from hpcdl.core.errors import HpcdlError
from tests.checkpoint.test_checkpoints import write


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_old_checkpoints_make_room_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    from hpcdl.rank import worker

    write(tmp_path, [1, 2, 3])
    calls = []

    def save_model(model: Any, path: Path) -> None:
        calls.append(list_checkpoints(tmp_path / "checkpoints"))
        if len(calls) <= failures or path.parent.name == "new":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "save_model", save_model)
    if failures < 2:
        warnings = worker._save_finished(None, tmp_path)  # type: ignore[arg-type]
        assert len(warnings) == failures
        assert all("older checkpoints were removed" in warning for warning in warnings)
    else:
        with pytest.raises(HpcdlError, match="No space left on device; the newest checkpoint stays: make room"):
            worker._save_finished(None, tmp_path)  # type: ignore[arg-type]
        with pytest.raises(HpcdlError, match="there is no checkpoint, its steps are lost: make room"):
            worker._save_finished(None, tmp_path / "new")  # type: ignore[arg-type]
        calls[2:] = []
    assert calls == [[3, 2, 1], [3]][: min(failures, 1) + 1]


def test_a_model_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    from hpcdl.rank.worker import save_model

    class Half:
        def save(self, path: Path) -> None:
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_model(Half(), tmp_path / "model.keras")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("deterministic", "end"), [(True, "1 MiB"), (False, "another run may take another")])
def test_what_auto_chose_is_named_by_size(deterministic: bool, end: str) -> None:
    from hpcdl.rank import worker

    run = SimpleNamespace(deterministic=deterministic)
    plan: Any = SimpleNamespace(config=SimpleNamespace(run=run), info=SimpleNamespace(name="auto"))
    chosen = {"4 KiB": "recursive-doubling", "64 KiB": "ring", "1 MiB": "ring"}
    (line,) = worker._chosen_allreduces(chosen, plan)
    assert line.startswith("auto took recursive-doubling for 4 KiB, ring for 64 KiB, 1 MiB") and line.endswith(end)
    assert not [*worker._chosen_allreduces({}, plan)]
