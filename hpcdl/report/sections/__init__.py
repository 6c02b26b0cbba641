"""The sections of a report, in order: after the summary, first how it scales and where the time goes.

Each `build(analysis)` returns a Section, or None if its data are missing.
"""

from __future__ import annotations

from hpcdl.core.registry import Entry, Registry

_HERE = "hpcdl.report.sections"

SECTIONS = Registry(
    "section",
    {
        "baseline": Entry(target=f"{_HERE}.comparisons:build_baseline", summary="What changed against a baseline."),
        "strong": Entry(target=f"{_HERE}.scaling:build_strong", summary="Fixed global batch."),
        "weak": Entry(target=f"{_HERE}.scaling:build_weak", summary="Fixed batch per worker."),
        "scale-up": Entry(target=f"{_HERE}.scaling:build_scale_up", summary="Speed-up by threads."),
        "time": Entry(target=f"{_HERE}.time:build", summary="Parts of a step, lost efficiency."),
        "setup": Entry(target=f"{_HERE}.setup:build", summary="Machine, software, what ran, what failed."),
        "learning": Entry(target=f"{_HERE}.learning:build", summary="Throughput, latency, loss and accuracy."),
        "strategies": Entry(target=f"{_HERE}.comparisons:build", summary="Strategies side by side, verdicts."),
        "compared": Entry(target=f"{_HERE}.comparisons:build_compared", summary="What --compare names, side by side."),
        "network": Entry(target=f"{_HERE}.network:build", summary="Bytes, bandwidth, balance of servers."),
        "traffic": Entry(target=f"{_HERE}.traffic:build", summary="Accuracy against bytes sent."),
        "trace": Entry(target=f"{_HERE}.trace:build", summary="Inside the steps of traced runs."),
        "inference": Entry(target=f"{_HERE}.inference:build", summary="Rate and latency of hpcdl infer."),
        "fits": Entry(target=f"{_HERE}.fits:build", summary="Amdahl, Gustafson, USL, alpha-beta."),
        "prediction": Entry(target=f"{_HERE}.prediction:build", summary="Sizes that were not run."),
        "tuning": Entry(target=f"{_HERE}.tuning:build", summary="Search for a node's best settings."),
        "search": Entry(target=f"{_HERE}.search:build", summary="Search for hyper-parameters."),
        "references": Entry(target=f"{_HERE}.references:build", summary="Beside published points."),
        "cost": Entry(target=f"{_HERE}.time:build_cost", summary="Node-hours."),
    },
)
