"""A fake `hpcdl train` for tests of the sweep: it obeys `behaviour.json` beside it and writes a record.

`behaviour.json` lists, by run name, what each start does in turn: ok, fail, diverge, crash,
silent, stopped, refuse, hang.
`starts.jsonl` records which run started, when it ended, and its flags.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from hpcdl.core.errors import NOT_FINITE
from hpcdl.core.records.run_record import RunRecord, write_record
from hpcdl.run.rundir import removal_of

here = Path(sys.argv[1])
flags = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
run_dir = Path(flags["--run-dir"])
assert not run_dir.exists(), "train refuses a folder that is there"
plans = json.loads((here / "behaviour.json").read_text())
log = here / "starts.jsonl"


def tell(**facts: object) -> None:
    with log.open("a") as file:
        file.write(json.dumps({"run": run_dir.name, "pid": os.getpid(), "at": time.time(), **facts}) + "\n")


before = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
starts = sum(item["run"] == run_dir.name and item["what"] == "start" for item in before)
behaviours = plans.get(run_dir.name, [])
behaviour = behaviours[starts] if starts < len(behaviours) else "ok"
tell(what="start", flags=flags)
ranks, batch, servers = (int(flags.get(f"--{key}", "0")) for key in ("ranks", "batch-size", "servers"))
record = RunRecord(
    strategy=flags["--strategy"], model=flags["--model"], data=flags["--data"], ranks=ranks, workers=ranks - servers,
    servers=servers, batch_per_rank=batch, global_batch=batch * (ranks - servers),
)  # fmt: skip
run_dir.mkdir(parents=True)
(run_dir / "checkpoints").mkdir()
(run_dir / "model.keras").write_text("weights")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if behaviour == "silent":
    sys.exit(0)
write_record(run_dir, record)
if behaviour == "stopped":
    sys.exit(75)
if behaviour == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "diverge":
    write_record(run_dir, dataclasses.replace(record, status="failed", failure=NOT_FINITE))
    print("hpcdl: the gradient of a/kernel is not finite at step 3 on rank 0", file=sys.stderr)
    sys.exit(1)
if behaviour == "refuse":
    shutil.rmtree(run_dir)
    print(f"hpcdl: no loss of that name{removal_of(run_dir)}", file=sys.stderr)
    sys.exit(2)
if behaviour == "fail":
    print("noise of a launcher\nhpcdl: rank 1 on c401: out of memory\nmore noise", file=sys.stderr)
    sys.exit(1)
time.sleep(60 if behaviour == "hang" else float(plans.get("seconds", 0)))
times = {"started_at": "2026-03-14T10:00:00+0100", "finished_at": "2026-03-14T09:00:20+0000", "seconds_total": 1.0}
values = {**vars(record), **times, "status": "finished", "images_per_second": 100.0 * record.workers}
write_record(run_dir, RunRecord(**values))
tell(what="end")
