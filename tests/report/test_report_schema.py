"""report.json conforms to its published schema, whatever it reports."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hpcdl.report.runs.imported import read_csv
from tests.conftest import ROOT, CommandLine
from tests.report.synthetic import NOISE, make_record, weak_study, write_run

SCHEMA = ROOT / "share" / "hpcdl" / "schemas" / "report-1.json"
EVERY_COLUMN = (
    "mode", "strategy", "model", "nodes", "ranks", "workers", "servers", "ranks_per_node", "threads",
    "batch_per_rank", "global_batch", "repeat", "images_per_second", "step_seconds", "compute_seconds",
    "exposed_communication_seconds", "input_seconds", "wait_seconds", "update_seconds", "gradient_bytes",
    "seconds_per_epoch", "seconds_total", "accuracy", "machine", "version", "data", "rounds_per_step",
    "round_bytes_per_step", "learning_rate",
)  # fmt: skip


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV file of three sizes, two strategies and three repeats, with every documented column."""
    path = tmp_path_factory.mktemp("old") / "old.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, EVERY_COLUMN)
        writer.writeheader()
        for strategy, servers, loss in (("horovod", 0, 0.95), ("grpc-ps", 1, 0.7)):
            for doublings, workers in enumerate((1, 2, 4)):
                for repeat, noise in enumerate(NOISE):
                    step = 0.4 / loss**doublings * noise
                    writer.writerow(
                        dict(zip(EVERY_COLUMN, (
                            "weak", strategy, "resnet50", workers + servers, workers + servers, workers, servers, 1, 8,
                            32, 32 * workers, repeat, 32 * workers / step, step, 0.3, step - 0.36, 0.02, 0.01, 0.03,
                            102_228_128, 40 * step, 400 * step, 0.7, "old cluster", "0.28", "imagenet",
                            2 * workers, 1e8 * (workers**2 + 1), 0.1,
                        ), strict=True))
                    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def document(table: Path, tmp_path_factory: pytest.TempPathFactory, session_hpcdl: CommandLine) -> dict[str, Any]:
    """A report with entries in every part: new and imported runs, a failed run, a baseline."""
    folder = tmp_path_factory.mktemp("schema")
    study = weak_study(folder / "study")
    write_run(study / "failed", make_record(2, None, status="failed", message="rank 1 died"))
    before = weak_study(folder / "before", software={"hpcdl": "0"})
    words: list[str | Path] = ["report", study, "--import", "csv", table, "--baseline", before, "--json"]
    finished = session_hpcdl([*words, "--format", "json", "--out", folder / "out"])
    assert finished.code == 0, finished.err
    found: dict[str, Any] = finished.json()
    return found


def test_every_documented_column_is_read(table: Path) -> None:
    found = read_csv(table)
    assert found.remarks == ()
    run = found.runs[0]
    assert (run.machine, run.data, run.threads, run.gradient_bytes) == ("old cluster", "imagenet", 8, 102_228_128)
    assert set(run.parts) == {"input", "compute", "wait", "exposed_communication", "update", "other"}
    reported = (ROOT / "docs" / "reference" / "report-json.md").read_text()
    assert all(f"`{column}`" in reported for column in EVERY_COLUMN)


def test_a_report_of_everything_is_valid(document: dict[str, Any], validator: jsonschema.Draft202012Validator) -> None:
    assert [error.message for error in validator.iter_errors(document)] == []
    assert all(document[key] for key in ("summary", "warnings", "scaling", "fits", "verdicts", "parts", "runs"))
    assert {item["kind"] for item in document["verdicts"]} == {"strategies", "baseline"}
    assert {item["law"] for item in document["fits"]} == {"gustafson", "usl", "alpha-beta"}
    assert {row["strategy"] for row in document["scaling"]} == {"ring", "horovod", "grpc-ps"}


@pytest.mark.parametrize("key", ["summary", "warnings", "scaling", "fits", "verdicts", "parts", "runs"])
def test_what_is_not_as_documented_is_found(
    key: str, document: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    """The schema checks each part: it refuses one without its keys or of another type."""
    wrong = copy.deepcopy(document)
    wrong[key][0] = {name: {} for name in wrong[key][0]} if isinstance(wrong[key][0], dict) else 5
    assert not validator.is_valid(wrong)
    del wrong[key]
    assert not validator.is_valid(wrong)


def test_the_schema_names_what_the_page_of_the_docs_names() -> None:
    reported = (ROOT / "docs" / "reference" / "report-json.md").read_text()
    schema = json.loads(SCHEMA.read_text())
    rows = schema["properties"]["scaling"]["items"]["properties"]
    assert [name for name in rows if f"`{name}`" not in reported] == []
    assert set(schema["properties"]) <= {name.strip("`") for name in reported.replace(",", " ").split()}
