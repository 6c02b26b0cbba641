"""What this installation survives, tried out: small runs that faults strike, and what came of each.

A run survives where it takes all of its steps and ends with 0, be it with new ranks (`--elastic`).
"""

from __future__ import annotations

import html
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.cluster.launchers import find_launcher
from hpcdl.core.errors import CorruptError, UnknownNameError, UsageError
from hpcdl.core.files import json_text, write_output
from hpcdl.core.paths import own_program
from hpcdl.core.records import read_record
from hpcdl.core.units import format_seconds
from hpcdl.strategies.table import find_strategy
from hpcdl.training.loop.journal import JournalReader, seconds_between
from hpcdl.training.session.inject import TOLD

STEPS, STRIKE_AT = 60, 30
FAULTS: Mapping[str, str] = {
    "worker killed": f"kill:rank=1@step={STRIKE_AT}",
    "rank 0 killed": f"kill:rank=0@step={STRIKE_AT}",
    "rank 0 killed, state in memory": f"kill:rank=0@step={STRIKE_AT}",
    "server killed": f"kill:rank={{last}}@step={STRIKE_AT}",
    "worker killed, the others go on": f"kill:rank=1@step={STRIKE_AT}",
    "rank 0 killed, the others go on": f"kill:rank=0@step={STRIKE_AT}",
    "server killed, the others go on": f"kill:rank={{last}}@step={STRIKE_AT}",
    "worker stopped": f"stop:rank=1@step={STRIKE_AT}",
    "worker exits with 0": f"exit:rank=1@step={STRIKE_AT}",
    "worker three times slower": f"slow:rank=1:x3@step={STRIKE_AT}",
    "no room for a checkpoint": f"full:checkpoint@step={STRIKE_AT // 2}",
    "worker stopped for 3 s": f"stop:rank=1@step={STRIKE_AT}+3s",
    "partition that heals": f"partition:{{place}}=1@step={STRIKE_AT}+3s",
    "partition that stays": f"partition:{{place}}=1@step={STRIKE_AT}",
    "slow link": "link:{place}=1:100mbit",
    "skewed clock": "skew:host=1:+2s",
}
"""What is tried, by name; {last} is the last rank, a server where there are servers, {place} a node or, where there is
one node alone, a rank."""
SAVING: Mapping[str, Sequence[str]] = {
    "rank 0 killed, state in memory": ("--checkpoint-every", "1h", "--local-checkpoint-every", "5"),
}
"""How a run saves under a fault, where not by checkpoints alone."""
GO_ON = tuple(fault for fault in FAULTS if fault.endswith("the others go on"))
"""The run may go on with fewer workers: in place, where MPI and the strategy can."""
LEAVES_NODES_OUT = ("partition that stays",)
"""What of several nodes takes one for good: the run goes on with fewer workers."""
BY_CHECKPOINTS = ("--checkpoint-every", "0.2s")
RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run under one fault; `recover_s` from the fault to the next step of which anything is heard.

    `steps_lost` were taken twice. `said` is the last line of a run that did not survive.
    """

    fault: str
    strategy: str
    survived: bool
    struck: bool
    recover_s: float | None
    steps_lost: int
    said: str


def nodes_here() -> int:
    """Nodes of this job; 1 outside of any."""
    return max(1, len(find_launcher().hosts(os.environ)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is tried: each of `faults` on each of `strategies`, `tries` times, in runs of `num_ranks` ranks."""

    strategies: Sequence[str]
    faults: Sequence[str]
    tries: int
    num_ranks: int
    out: Path
    num_nodes: int = field(default_factory=nodes_here)

    def cases(self) -> list[tuple[str, str, int]]:
        """Strategy, fault, number of the try. UnknownNameError for a fault that is not known."""
        for fault in self.faults:
            if fault not in FAULTS:
                raise UnknownNameError("fault", fault, FAULTS)
        return [
            (strategy, fault, number)
            for strategy in self.strategies
            for fault in self.faults
            if not self._against(fault, strategy)
            for number in range(self.tries)
        ]

    def left_out(self) -> list[dict[str, str]]:
        """What is not tried, and `why`."""
        return [
            {"fault": fault, "strategy": strategy, "why": why}
            for strategy in self.strategies
            for fault in self.faults
            if (why := self._against(fault, strategy))
        ]

    def _against(self, fault: str, strategy: str) -> str:
        """Why there is nothing here that the fault could strike; nothing where there is."""
        features, text = find_strategy(strategy).features, FAULTS[fault]
        if "server" in fault and not features.servers:
            return f"{strategy} has no servers"
        if fault in GO_ON and not find_launcher().leaves_nodes_out:
            return "the launcher takes all nodes of a job or none"
        if fault in GO_ON and not features.servers and self.num_ranks < 3:
            return f"of {self.num_ranks} ranks fewer than two would be left"
        if "host=" in text and self.num_nodes < 2:
            return "all ranks are on one node, and have its clock"
        if text.startswith(("partition:", "link:")) and not features.mpi:
            return f"TensorFlow carries the messages of {strategy}, and hpcdl does not see them"
        return ""

    def words(self, fault: str, strategy: str) -> list[str]:
        """Of the command line of a run that `fault` strikes: how it saves, and what strikes."""
        features = find_strategy(strategy).features
        least = "2" if features.optimizers and not features.servers else "1"  # a mean over one worker is refused
        may_be_fewer = fault in GO_ON or (fault in LEAVES_NODES_OUT and self.num_nodes > 1)
        fewer = ("--min-workers", least) if may_be_fewer else ()
        place = "host" if self.num_nodes > 1 else "rank"
        injected = FAULTS[fault].format(last=self.num_ranks - 1, place=place)
        return [*SAVING.get(fault, BY_CHECKPOINTS), *fewer, "--inject", injected]


def try_out(plan: Plan, told: Callable[[str], None]) -> list[Trial]:
    """Run all cases, one after another; `told` hears of each before it begins."""
    trials = []
    for strategy, fault, number in plan.cases():
        told(f"{strategy}: {fault}")
        run_dir = plan.out / "runs" / f"{strategy}-{fault.replace(' ', '-')}-{number}"
        trials.append(_try(strategy, fault, plan, run_dir))
    return trials


def _try(strategy: str, fault: str, plan: Plan, run_dir: Path) -> Trial:
    features = find_strategy(strategy).features
    journal = JournalReader(run_dir)
    words = [
        "train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--strategy", strategy,
        "--ranks", plan.num_ranks,
        "--batch-size", 16, "--steps", STEPS, "--profile", "none", "--elastic",
        "--stall-timeout", "10s", "--run-dir", run_dir, *plan.words(fault, strategy),
    ]  # fmt: skip
    words += ["--optimizer", features.optimizers[0]] if features.optimizers else []
    words += [] if features.mpi else ["--allow-grpc"]
    exit_code, said = _run(own_program("hpcdl", *map(str, words)))
    events = journal.read()
    struck = next((event for event in events if str(event.get("text", "")).startswith(TOLD)), None)
    return Trial(
        fault=fault,
        strategy=strategy,
        survived=exit_code == 0 and struck is not None,
        struck=struck is not None,
        recover_s=None if struck is None or "@" not in FAULTS[fault] else _recovered_after(events, struck),
        steps_lost=0 if struck is None else _steps_lost(run_dir, struck["step"]),
        said="" if exit_code == 0 else said,
    )


def _run(line: Sequence[str]) -> tuple[int | None, str]:
    """Exit code of a run, None where it does not end, and its last line."""
    try:
        finished = subprocess.run(
            line,
            capture_output=True,
            text=True,
            env={**os.environ, "NO_COLOR": "1"},
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"it had not come to an end after {format_seconds(RUN_TIMEOUT_S)}"
    return finished.returncode, (finished.stderr.strip().splitlines() or [""])[-1]


def _recovered_after(events: Sequence[Mapping[str, Any]], struck: Mapping[str, Any]) -> float | None:
    """Seconds from the fault to the first step or epoch behind it; None where none came any more.

    Where new ranks were started it is theirs: a step that was under way may still be told after the fault.
    """
    after = [(event["kind"], seconds_between(struck, event) or 0.0) for event in events]
    began_s = max((at_s for kind, at_s in after if kind == "start"), default=0.0)
    first_s = next((at_s for kind, at_s in after if kind in ("step", "epoch") and at_s > max(began_s, 0.0)), None)
    return None if first_s is None else round(first_s, 3)


def _steps_lost(run_dir: Path, struck_step: int) -> int:
    try:
        resumed = read_record(run_dir).resumed_from_steps
    except CorruptError:
        return 0
    return max([0, *(struck_step - step for step in resumed)])


def summary(trials: Sequence[Trial], left_out: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    """What `--json` prints: for each fault and strategy how many runs survived, and what it cost them.

    `left_out` is what was not tried.
    """
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.fault, trial.strategy), []).append(trial)
    rows = []
    for (fault, strategy), members in groups.items():
        seconds = [trial.recover_s for trial in members if trial.survived and trial.recover_s is not None]
        rows.append(
            {
                "fault": fault,
                "strategy": strategy,
                "tries": len(members),
                "survived": sum(trial.survived for trial in members),
                "recover_seconds": {
                    "median": statistics.median(seconds) if seconds else None,
                    "max": max(seconds, default=None),
                },
                "steps_lost": max(trial.steps_lost for trial in members),
            }
        )
    return {"faults": rows, "left_out": [*left_out]}


def check_free(plan: Plan, nodes: int | None) -> None:
    """UsageError where the folder of the card is taken, or the job has fewer than `nodes` nodes."""
    if plan.out.exists() and any(plan.out.iterdir()):
        raise UsageError(f"{plan.out} exists; choose another folder with --out")
    here = nodes_here()
    if nodes is not None and here < nodes:
        raise UsageError(f"--nodes {nodes}, but this job has {here}; ask the scheduler for more")


def facts_of(out: Path) -> dict[str, str]:
    """Where the runs below `out` were, and on what."""
    for path in sorted((out / "runs").glob("*/record.json")):
        record = read_record(path.parent)
        software = ", ".join(f"{name} {version}" for name, version in record.software.items())
        return {
            "when": record.started_at,
            "machine": record.machine,
            "nodes": str(record.nodes),
            "ranks": str(record.ranks),
            "software": software,
        }
    return {}


HEADINGS = ("fault", "strategy", "survived", "recovered after", "steps lost")


def rows_of(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The summary as lines of a table under HEADINGS."""
    return [
        (
            row["fault"],
            row["strategy"],
            f"{row['survived']} of {row['tries']}",
            _recovered(row["recover_seconds"], row["tries"]),
            str(row["steps_lost"]),
        )
        for row in document["faults"]
    ]


def told_left_out(document: Mapping[str, Any]) -> list[str]:
    """A line for each fault that was not tried."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in document["left_out"]:
        reasons.setdefault((one["fault"], one["why"]), []).append(one["strategy"])
    return [f"{fault} ({', '.join(strategies)}): {why}" for (fault, why), strategies in reasons.items()]


def _recovered(seconds: Mapping[str, float | None], tries: int) -> str:
    median, most = seconds["median"], seconds["max"]
    if median is None or most is None:
        return "-"
    return f"{median:.1f} s" + (f", at most {most:.1f} s" if tries > 1 else "")


def write_card(out: Path, document: Mapping[str, Any], trials: Sequence[Trial], facts: Mapping[str, str]) -> Path:
    """The resilience card: OUT/card.json and OUT/card.html, whose path is returned."""
    whole = {**document, "facts": dict(facts), "trials": [asdict(trial) for trial in trials]}
    write_output(out / "card.json", json_text(whole))
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows_of(document)
    )
    heads = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    told = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in facts.items())
    not_tried = "".join(f"<li>{html.escape(line)}</li>\n" for line in told_left_out(document))
    if not_tried:
        not_tried = f"<h2>Not tried here</h2>\n<ul>\n{not_tried}</ul>\n"
    path = out / "card.html"
    write_output(path, _PAGE.format(facts=told, heads=heads, rows=cells, not_tried=not_tried))
    return path


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>hpcdl: what this installation survives</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: 0.3rem 0.6rem; border-bottom: 1px solid #8888; }}
.wide {{ overflow-x: auto; }}
dt {{ font-weight: bold; }}
</style></head><body>
<h1>What this installation survives</h1>
<dl>{facts}</dl>
<div class="wide" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>
{rows}</tbody></table></div>
<p>A run survives where it takes all of its steps and ends with 0, with new ranks where some are lost (--elastic).
Time is counted from the fault to the next step that was heard of; what holds from the start on has no such time.</p>
{not_tried}</body></html>
"""
