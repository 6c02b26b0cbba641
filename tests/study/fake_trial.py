"""A fake `hpcdl train` for tests of the search: a known function of the learning rate, epoch by epoch.

`trials.jsonl` in the folder of the first argument records each start: its folder, settings, processors. Learning rates
above 0.5 fail, as training that diverges. In a folder called train-only its data have no held-out samples.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from hpcdl.core.records.run_record import RunRecord, write_record

here, pace_s = Path(sys.argv[1]), float(sys.argv[2])
words = sys.argv[3:]
run_dir = Path(words[words.index("--run-dir") + 1])
pairs = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
settings = dict(pair.split("=", 1) for pair in pairs)
with (here / "trials.jsonl").open("a") as file:
    told = {"run": run_dir.name, "settings": settings, "cpus": sorted(os.sched_getaffinity(0)), "at": time.time()}
    file.write(json.dumps(told) + "\n")
run_dir.mkdir(parents=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
rate = float(settings["learning-rate"])
if rate > 0.5:
    print("hpcdl: the loss is not finite; lower --learning-rate", file=sys.stderr)
    sys.exit(1)
held_out = here.name != "train-only"
accuracy, measured = 0.0, "val_accuracy" if held_out else "accuracy"
for epoch in range(1, 10):
    accuracy = (1 - (math.log10(rate) + 2) ** 2 / 16) * (1 - 0.5**epoch)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "epoch", "epoch": float(epoch), measured: accuracy}) + "\n")
    time.sleep(pace_s)
record = RunRecord(
    strategy="single", model="lenet", data="digits", ranks=1, workers=1, batch_per_rank=32, global_batch=32,
    status="finished", accuracy=accuracy, loss=1 - accuracy, seconds_total=rate, images_per_second=100.0,
    evaluated_on="val" if held_out else "",
)  # fmt: skip
write_record(run_dir, record)
