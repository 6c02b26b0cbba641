"""The installed schema, the dataclass and the documentation name the same fields."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hpcdl.core.errors import CorruptError
from hpcdl.core.records.run_record import (
    HistoryPoint,
    InferenceRecord,
    RankRecord,
    RunRecord,
    read_record,
    record_schema,
    write_record,
)

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / "share" / "hpcdl" / "schemas" / "run-1.json"
RECORD = RunRecord(
    status="finished", strategy="ring", model="lenet", data="digits", ranks=2, workers=2, batch_per_rank=16,
    global_batch=32, step_seconds=(0.1, 0.2), parts={"compute": 0.1}, images_per_second=213.0, hosts=("a", "b"),
    history=(HistoryPoint(epoch=1.0, step=10, seconds=2.0, val_accuracy=0.9),),
    rank_records=(RankRecord(rank=0, host="a", parts={"compute": 0.1}),), software={"hpcdl": "1"}, repeat=1,
    inference=InferenceRecord(identity={"the model": "1"}, splits=("val",), outputs=("output",), num_computed=3),
)  # fmt: skip


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(INSTALLED.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_installed_schema_is_the_dataclass_s() -> None:
    how = "run: python -m hpcdl.core.records.run_record > share/hpcdl/schemas/run-1.json"
    assert json.loads(INSTALLED.read_text()) == json.loads(json.dumps(record_schema())), how


def test_schema_and_dataclass_list_the_same_fields() -> None:
    schema = json.loads(INSTALLED.read_text())
    for cls in (RunRecord, HistoryPoint, RankRecord, InferenceRecord):
        listed = schema if cls is RunRecord else schema["$defs"][cls.__name__]
        assert set(listed["properties"]) == {item.name for item in dataclasses.fields(cls)}


@pytest.mark.parametrize("cls", [RunRecord, HistoryPoint, RankRecord, InferenceRecord])
def test_every_field_is_documented(cls: type) -> None:
    text = (ROOT / "docs" / "run-record.md").read_text()
    missing = [item.name for item in dataclasses.fields(cls) if f"`{item.name}`" not in text]
    assert not missing


def test_a_record_validates_and_comes_back(tmp_path: Path, validator: jsonschema.Draft202012Validator) -> None:
    write_record(tmp_path, RECORD)
    validator.validate(json.loads((tmp_path / "record.json").read_text()))
    assert read_record(tmp_path) == RECORD


@pytest.mark.parametrize(
    "change",
    [{"ranks": "two"}, {"ranks": True}, {"parts": {"compute": "fast"}}, {"history": [{"epoch": 1.0}]}, {"schema": "x"}],
)
def test_wrong_types_are_refused_by_both(
    tmp_path: Path, change: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    document = json.loads(json.dumps(dataclasses.asdict(RECORD))) | change
    (tmp_path / "record.json").write_text(json.dumps(document))
    assert list(validator.iter_errors(document))
    with pytest.raises(CorruptError):
        read_record(tmp_path)


def test_unknown_fields_are_accepted(tmp_path: Path, validator: jsonschema.Draft202012Validator) -> None:
    document = json.loads(json.dumps(dataclasses.asdict(RECORD))) | {"from_the_future": 1}
    (tmp_path / "record.json").write_text(json.dumps(document))
    validator.validate(document)
    assert read_record(tmp_path) == RECORD


def test_what_is_nested_deep_is_refused_where_anything_may_stand(tmp_path: Path) -> None:
    document = dataclasses.asdict(RECORD)
    for depth, refused in ((60, False), (70, True), (10_000, True)):
        text = json.dumps({**document, "config": {"a": 0}}).replace(
            '{"a": 0}', '{"a": ' + "[" * depth + "]" * depth + "}"
        )
        (tmp_path / "record.json").write_text(text)
        if not refused:
            assert read_record(tmp_path).config["a"]
            continue
        with pytest.raises(CorruptError, match=r"record\.json"):
            read_record(tmp_path)
