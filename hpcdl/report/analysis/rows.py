"""The points of all curves as rows: `scaling` in report.json, the columns of scaling.csv (docs/report-json.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcdl.core.statistics import Estimate, Ratio
from hpcdl.report.analysis.scaling import Curve, Point

_SETTINGS = (
    "strategy", "model", "nodes", "ranks", "workers", "servers", "ranks_per_node", "threads", "batch_per_rank",
    "global_batch", "machine", "version",
)  # fmt: skip
_RATIOS = ("speedup", "efficiency", "efficiency_per_node")
_MEASURES = ("images_per_second", *_RATIOS)
COLUMNS = (
    "mode",
    *_SETTINGS,
    "n",
    "data",
    "variant",
    "base",
    *(f"images_per_second_{name}" for name in ("mean", "std", "ci95")),
    *(f"{measure}_{name}" for measure in _RATIOS for name in ("mean", "std", "ci95", "low", "high")),
)
"""The columns of scaling.csv."""


def scaling_rows(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """One row for each point; `n` counts the runs behind it, `base` is the n of its curve's base."""
    return [_row(curve, point) for curve in curves for point in curve.points]


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its measures spread over columns: `efficiency_mean`, `efficiency_std`, `efficiency_ci95`."""
    flat = {name: value for name, value in row.items() if name not in _MEASURES}
    for measure in _MEASURES:
        flat |= {f"{measure}_{name}": value for name, value in row[measure].items()}
    return flat


def _row(curve: Curve, point: Point) -> dict[str, Any]:
    run = point.first
    return {
        "mode": curve.mode,
        **{name: getattr(run, name) for name in _SETTINGS},
        "n": len(point.runs),
        "images_per_second": _estimate(point.throughput),
        "speedup": _ratio(point.speedup),
        "efficiency": _ratio(point.efficiency),
        "efficiency_per_node": _ratio(point.efficiency_per_node),
        "data": run.data,
        "variant": run.variant,
        "base": curve.base.n,
    }


def _estimate(value: Estimate) -> dict[str, float | None]:
    return {"mean": value.mean, "std": value.std, "ci95": value.ci95}


def _ratio(value: Ratio) -> dict[str, float | None]:
    return {"mean": value.value, "std": value.std, "ci95": value.ci95, "low": value.low, "high": value.high}
