"""Runs and records with known numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hpcdl.core.records.run_record import HistoryPoint, RankRecord, RunRecord, from_json, write_record
from hpcdl.report.runs.run import Run, from_record


def make_run(workers: int = 1, rate: float | None = 100.0, **changes: Any) -> Run:
    """Return a run in the report's form: ring, lenet, batch 32 per worker, one worker per node."""
    servers = changes.get("servers", 0)
    batch = changes.get("batch_per_rank", 32)
    values: dict[str, Any] = {
        "name": f"run-{workers}", "status": "finished", "strategy": "ring", "model": "lenet", "data": "digits",
        "nodes": workers, "ranks": workers + servers, "workers": workers, "ranks_per_node": 1,
        "batch_per_rank": batch, "global_batch": batch * workers, "machine": "lab", "version": "hpcdl 1",
        "images_per_second": rate,
    }  # fmt: skip
    return Run(**(values | changes))


def make_record(workers: int = 1, rate: float | None = 100.0, **changes: Any) -> RunRecord:
    """Return a record of `hpcdl train`, with parts, history and one rank record per worker."""
    batch = changes.get("batch_per_rank", 32)
    step = workers * batch / rate if rate else 1.0
    parts = {"input": 0.05, "compute": 0.7, "wait": 0.05, "exposed_communication": 0.1, "update": 0.05, "other": 0.05}
    values: dict[str, Any] = {
        "status": "finished", "strategy": "ring", "model": "lenet", "parameters": 431_080, "gradient_bytes": 1_724_320,
        "data": "digits", "ranks": workers, "workers": workers, "nodes": workers, "ranks_per_node": 1,
        "hosts": [f"node{number}" for number in range(workers)], "intra_op_threads": 2, "batch_per_rank": batch,
        "global_batch": batch * workers, "steps": 50, "warmup_steps": 3, "step_seconds": [step] * 50,
        "images_per_second": rate, "seconds_per_epoch": 40 * step, "seconds_total": 200 * step,
        "parts": {name: share * step for name, share in parts.items()}, "imbalance_seconds": 0.02 * step,
        "bytes_sent_per_step": 2 * 1_724_320 * (workers - 1) / workers, "machine": "lab", "processor": "cpu",
        "cores_per_node": 2, "software": {"hpcdl": "1", "tensorflow": "2"},
        "history": [
            HistoryPoint(
                epoch=float(epoch), step=10 * epoch, seconds=10 * epoch * step, loss=2.0 / epoch,
                accuracy=1 - 0.5 / epoch, val_loss=2.2 / epoch, val_accuracy=1 - 0.6 / epoch,
            )
            for epoch in range(1, 6)
        ],
        "rank_records": [
            RankRecord(
                rank=number, host=f"node{number}", rounds_per_step=2 * (workers - 1),
                round_bytes_per_step=2 * 1_724_320 * (workers - 1) / workers,
            )
            for number in range(workers)
        ],
    }  # fmt: skip
    return RunRecord(**(values | changes))


def as_run(record: RunRecord, name: str) -> Run:
    """Return `record` in the report's form."""
    return from_record(from_json(RunRecord, json.loads(json.dumps(dataclasses.asdict(record)))), name)


def write_run(folder: Path, record: RunRecord) -> Path:
    """Write `record` as the run directory `folder`."""
    folder.mkdir(parents=True)
    write_record(folder, record)
    return folder


NOISE = (1.0, 0.99, 1.01)
"""Factors of three repeats around their mean, without a drift."""


def weak_study(folder: Path, efficiency: float = 0.9, **changes: Any) -> Path:
    """Three repeats at 1, 2 and 4 workers; each doubling keeps `efficiency` of the throughput per worker."""
    for doublings, workers in enumerate((1, 2, 4)):
        for repeat, noise in enumerate(NOISE):
            rate = 100 * workers * efficiency**doublings * noise
            record = make_record(workers, rate, mode="weak", repeat=repeat, **changes)
            write_run(folder / f"w{workers}-r{repeat}", record)
    return folder
