"""Exports of a run's model on a disk without space."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize("form", ["keras", "savedmodel"])
def test_an_export_that_found_no_room_is_not_in_the_next_ones_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    from hpcdl.rank import outputs

    class Model:
        def save(self, path: Path) -> None:
            self.export(Path(path))

        def export(self, folder: Path, **_: object) -> None:
            Path(folder, "variables").mkdir(parents=True)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "load_run", lambda _: (Model(), []))
    (tmp_path / "mine").mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            outputs.export_run(tmp_path, form, tmp_path / "mine" / "new" / "exported")
        assert not list((tmp_path / "mine").iterdir())
