"""Models of runs loaded again, and exported on a disk without space."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdl.core.errors import UsageError


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


@pytest.mark.parametrize("reason", ["No space left on device", "Disk quota exceeded", "File too large"])
def test_tensorflows_error_of_a_full_disk_names_folder_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    import tensorflow as tf

    from hpcdl.core.errors import without_place
    from hpcdl.rank import outputs

    class Model:
        def export(self, folder: Path, **_: object) -> None:
            text = f"{{{{function_node __wrapped__SaveV2}}}} {folder}/variables/part-00000; {reason} [Op:SaveV2]"
            raise tf.errors.ResourceExhaustedError(None, None, text)

    monkeypatch.setattr(outputs, "load_run", lambda _: (Model(), []))
    with pytest.raises(OSError, match=reason) as caught:
        outputs.export_run(tmp_path, "savedmodel", tmp_path / "exported")
    assert without_place(caught.value).startswith(f"cannot write {tmp_path / 'exported'}: {reason}; ")
    assert not (tmp_path / "exported").exists()


def test_of_two_exports_into_one_folder_the_second_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the folder free and load their models; then one writes."""
    from hpcdl.core.storage.lock import writing
    from hpcdl.rank import outputs

    target = tmp_path / "exported"

    def loaded(_: Path) -> tuple[None, list[str]]:
        target.mkdir()
        (target / "model.keras").write_text("the first")
        return None, []

    monkeypatch.setattr(outputs, "load_run", loaded)
    with pytest.raises(UsageError, match="exported exists; choose another folder"):
        outputs.export_run(tmp_path, "keras", target)
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [("model.keras", "the first")]
    monkeypatch.setattr(outputs, "load_run", lambda _: (None, []))
    (tmp_path / "empty").mkdir()
    with writing(tmp_path / "empty"), pytest.raises(UsageError, match="another hpcdl writes to"):
        outputs.export_run(tmp_path, "keras", tmp_path / "empty")


@pytest.mark.parametrize(("status", "warned"), [("finished", False), ("stopped", True), ("running", True)])
def test_a_model_of_a_run_that_continues_is_said_to_be_of_an_earlier_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, warned: bool
) -> None:
    from hpcdl.rank import outputs

    (tmp_path / "model.keras").touch()
    monkeypatch.setattr(outputs, "load_saved", lambda *_: None)
    monkeypatch.setattr(outputs, "read_record", lambda _: SimpleNamespace(status=status))
    _, warnings = outputs.load_run(tmp_path)
    assert warned == any("may be that of an earlier end" in text for text in warnings), warnings
