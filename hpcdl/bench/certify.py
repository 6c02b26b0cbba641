"""Tests which faults this installation survives: small runs with injected faults, and the result of each.

A run survives if it takes all of its steps and ends with 0, possibly with new ranks (`--elastic`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.cluster.launchers import find_launcher
from hpcdl.core.errors import CorruptError, StoppedEarly, UnknownNameError, UsageError
from hpcdl.core.pages.page import escaped, page
from hpcdl.core.paths import own_program
from hpcdl.core.processes.streams import caught
from hpcdl.core.records.from_json import from_json
from hpcdl.core.records.run_record import read_record
from hpcdl.core.storage.disk import check_outputs, make_output_folder
from hpcdl.core.storage.files import json_text, read_json, write_output
from hpcdl.core.storage.lock import FILE_NAME as LOCK_NAME
from hpcdl.core.storage.lock import writing
from hpcdl.core.units import counted, format_seconds
from hpcdl.faults.inject import INJECTED
from hpcdl.run.journal import JournalReader, seconds_between
from hpcdl.strategies.table import find_strategy

STEPS, STRIKE_AT = 60, 30
FAULTS: Mapping[str, str] = {
    "worker killed": "kill:rank=1@step={at}",
    "rank 0 killed": "kill:rank=0@step={at}",
    "rank 0 killed, state in memory": "kill:rank=0@step={at}",
    "server killed": "kill:rank={last}@step={at}",
    "worker killed, the others continue": "kill:rank=1@step={at}",
    "rank 0 killed, the others continue": "kill:rank=0@step={at}",
    "server killed, the others continue": "kill:rank={last}@step={at}",
    "worker stopped": "stop:rank=1@step={at}",
    "worker exits with 0": "exit:rank=1@step={at}",
    "worker three times slower": "slow:rank=1:x3@step={at}",
    "no room for a checkpoint": "full:checkpoint@step={half}",
    "worker stopped for 3 s": "stop:rank=1@step={at}+3s",
    "partition that heals": "partition:{place}=1@step={at}+3s",
    "partition that stays": "partition:{place}=1@step={at}",
    "slow link": "link:{place}=1:100mbit",
    "skewed clock": "skew:host=1:+2s",
}
"""The faults to test, by name.

{last} is the last rank, a server if there are servers. {place} is a node or, on a single node, a rank. {at} is a step,
and {half} a step at half that time.
"""
SAVING: Mapping[str, Sequence[str]] = {
    "rank 0 killed, state in memory": ("--checkpoint-every", "1h", "--local-checkpoint-every", "5"),
}
"""Checkpoint settings of a run under a fault, if other than the default."""
OTHERS_CONTINUE = tuple(fault for fault in FAULTS if fault.endswith("the others continue"))
"""The run may continue with fewer workers: in place, if MPI and the strategy support it."""
LEAVES_NODES_OUT = ("partition that stays",)
"""Faults that remove one of several nodes for good: the run continues with fewer workers."""
BY_CHECKPOINTS = ("--checkpoint-every", "0.2s")
RUN_TIMEOUT_S = 900.0
LOOK_S, LEAVE_S = 0.5, 60.0
"""Seconds between checks whether a run should end, and how long it may then take to leave."""
JSON_CARD, PAGE, TEXT = "card.json", "card.html", "card.md"
"""The files of a card."""


def faults_in(text: str) -> list[str]:
    """The faults that `text` names, with commas between them; some of their names hold a comma. UnknownNameError."""
    if text in FAULTS:
        return [text]
    for name in sorted(FAULTS, key=len, reverse=True):
        if text.startswith(f"{name},"):
            return [name, *faults_in(text[len(name) + 1 :].strip())]
    raise UnknownNameError("fault", text, FAULTS)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run under one fault; `recover_s` is the time from the fault to the next reported step.

    `steps_lost` were taken twice. `said` is the last line of a run that did not survive. `load` is this node's mean
    load of the minute before the start: if it exceeds the number of cores, the seconds mean little.
    """

    fault: str
    strategy: str
    survived: bool
    struck: bool
    recover_s: float | None
    steps_lost: int
    said: str
    load: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether the run says anything of its fault: one that ended well before the fault struck does not."""
        return self.struck or bool(self.said)


def nodes_here() -> int:
    """Return the number of nodes of this job; 1 outside of any job."""
    return max(1, len(find_launcher().hosts(os.environ)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The test plan: each of `faults` on each of `strategies`, `tries` times, in runs of `num_ranks` ranks."""

    strategies: Sequence[str]
    faults: Sequence[str]
    tries: int
    num_ranks: int
    out: Path
    num_nodes: int = field(default_factory=nodes_here)

    def cases(self) -> list[tuple[str, str, int]]:
        """Return (strategy, fault, number of the try) of each case. Raises UnknownNameError for an unknown fault."""
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
        """Return the combinations that are not tested, and `why`."""
        return [
            {"fault": fault, "strategy": strategy, "why": why}
            for strategy in self.strategies
            for fault in self.faults
            if (why := self._against(fault, strategy))
        ]

    def _against(self, fault: str, strategy: str) -> str:
        """Return why the fault cannot occur here; empty if it can."""
        features, text = find_strategy(strategy).features, FAULTS[fault]
        if "server" in fault and not features.servers:
            return f"{strategy} has no servers"
        if fault in OTHERS_CONTINUE and not find_launcher().leaves_nodes_out:
            return "the launcher takes all nodes of a job or none"
        if fault in OTHERS_CONTINUE and not features.servers and self.num_ranks < 3:
            return f"fewer than two of {self.num_ranks} ranks would be left"
        if "host=" in text and self.num_nodes < 2:
            return "all ranks are on one node and share its clock"
        if text.startswith(("partition:", "link:")) and not features.mpi:
            return f"TensorFlow carries the messages of {strategy}, so hpcdl cannot delay or drop them"
        return ""

    def words(self, fault: str, strategy: str) -> list[str]:
        """Return the arguments of a run with `fault`: how it saves, and the injection."""
        features = find_strategy(strategy).features
        least = "2" if features.optimizers and not features.servers else "1"  # a mean over one worker is refused
        may_be_fewer = fault in OTHERS_CONTINUE or (fault in LEAVES_NODES_OUT and self.num_nodes > 1)
        shrunk = ("--min-workers", least) if may_be_fewer else ()
        unit = "host" if self.num_nodes > 1 else "rank"
        # In an asynchronous run a rank takes as many steps as it can, so few on a busy machine.
        strike_at = STRIKE_AT if features.synchronous else STRIKE_AT // 3
        injected = FAULTS[fault].format(last=self.num_ranks - 1, place=unit, at=strike_at, half=strike_at // 2)
        return [*SAVING.get(fault, BY_CHECKPOINTS), *shrunk, "--inject", injected]


def try_out(
    plan: Plan, earlier: Sequence[Trial], on_progress: Callable[[str], None], ended: Callable[[Trial], None]
) -> list[Trial]:
    """Run all cases after the `earlier` ones, one after another; call `on_progress` before and `ended` after each.

    Writes the card after each case. Raises StoppedEarly after a signal: the interrupted run does not count.
    """
    trials, stop_signals = [*earlier], list[int]()
    num_done = Counter((trial.strategy, trial.fault) for trial in earlier if trial.counts)
    # Tries of a case are numbered from 0: as many as count already are done.
    waiting = [case for case in plan.cases() if case[2] >= num_done[case[:2]]]
    with writing(plan.out), caught(stop_signals.append):
        for strategy, fault, number in waiting:
            on_progress(f"{strategy}: {fault}")
            run_dir = _free(plan.out / "runs" / f"{strategy}-{fault.replace(' ', '-').replace(',', '')}-{number}")
            trial = _try(strategy, fault, plan, run_dir, lambda: bool(stop_signals))
            if stop_signals:
                still = len(earlier) + len(waiting) - len(trials)
                done = counted(len(trials), "run")
                raise StoppedEarly(f"stopped after {done}, {still} left to do; continue with --resume")
            trials.append(trial)
            write_card(plan, trials)
            ended(trial)
    return trials


def _free(folder: Path) -> Path:
    """Return `folder`, or one with another number if an incomplete run occupies it."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in (folder, *itertools.islice(numbered, 1000)) if not candidate.exists())


def _try(strategy: str, fault: str, plan: Plan, run_dir: Path, stopping: Callable[[], bool]) -> Trial:
    features, load = find_strategy(strategy).features, os.getloadavg()[0]
    journal = JournalReader(run_dir)
    arguments = [
        "train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--strategy", strategy,
        "--ranks", plan.num_ranks,
        "--batch-size", 16, "--steps", STEPS, "--profile", "none", "--elastic",
        "--stall-timeout", "10s", "--run-dir", run_dir, *plan.words(fault, strategy),
    ]  # fmt: skip
    arguments += ["--optimizer", features.optimizers[0]] if features.optimizers else []
    arguments += [] if features.mpi else ["--allow-grpc"]
    exit_code, last_line = _run(own_program("hpcdl", *map(str, arguments)), stopping)
    events = journal.read()
    struck = next((event for event in events if str(event.get("text", "")).startswith(INJECTED)), None)
    return Trial(
        fault=fault,
        strategy=strategy,
        survived=exit_code == 0 and struck is not None,
        struck=struck is not None,
        # A fault that lasts from the start has no moment to recover from.
        recover_s=None if struck is None or "@" not in FAULTS[fault] else _recovered_after(events, struck),
        steps_lost=0 if struck is None else _steps_lost(run_dir, struck["step"]),
        said="" if exit_code == 0 else last_line or f"it ended with exit code {exit_code}",
        load=round(load, 1),
    )


def _run(line: Sequence[str], stopping: Callable[[], bool] = lambda: False) -> tuple[int | None, str]:
    """Return exit code and last line of a run; the code is None if it does not end, or was ended by `stopping`."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    process = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # The last line goes into the card, without a terminal's codes.
        env={**os.environ, "NO_COLOR": "1"},
        start_new_session=True,  # Ctrl-C reaches only this process, which asks the run to leave
    )
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Not `wait`: a pipe that nobody reads would fill up and stop the run.
            _, stderr = process.communicate(timeout=LOOK_S)
            return process.returncode, (stderr.strip().splitlines() or [""])[-1]
        if stopping() or time.monotonic() > deadline:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=LEAVE_S)
            process.kill()
            process.communicate()
            return None, f"the run had not ended after {format_seconds(RUN_TIMEOUT_S)}"
    raise AssertionError("communicate waits for the end")


def _recovered_after(events: Sequence[Mapping[str, Any]], struck: Mapping[str, Any]) -> float | None:
    """Return the seconds from the fault to the first step or epoch after it; None if there is none.

    If new ranks were started, only their steps count: a step in progress may still be reported after the fault.
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
    """Return the output of `--json`: for each fault and strategy how many runs survived, and the cost of survival.

    A run that ended well before its fault struck is no try.
    `left_out` lists the combinations that were not tested.
    """
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.fault, trial.strategy), []).append(trial)
    rows = []
    for (fault, strategy), members in groups.items():
        num_unstruck = sum(not trial.counts for trial in members)
        seconds = [trial.recover_s for trial in members if trial.survived and trial.recover_s is not None]
        rows.append(
            {
                "fault": fault,
                "strategy": strategy,
                "tries": len(members) - num_unstruck,
                "survived": sum(trial.survived for trial in members),
                "recover_seconds": {
                    "median": statistics.median(seconds) if seconds else None,
                    "max": max(seconds, default=None),
                },
                "steps_lost": max(trial.steps_lost for trial in members),
                **({"not_struck": num_unstruck} if num_unstruck else {}),
            }
        )
    return {"faults": rows, "left_out": [*left_out]}


def earlier_trials(plan: Plan, nodes: int | None, *, resume: bool) -> list[Trial]:
    """Return the trials on the card in the folder: none without `resume`, which a non-empty folder requires.

    Creates the folder if it is missing. A run that its fault never struck is repeated. Raises UsageError if the card
    was made with other settings, or if the job has fewer than `nodes` nodes.
    """
    num_nodes = plan.num_nodes
    if nodes is not None and num_nodes < nodes:
        raise UsageError(f"--nodes {nodes}, but this job has {num_nodes}; ask the scheduler for more")
    make_output_folder(plan.out)
    # The lock file of an earlier call stays, and is no content.
    names, card = {path.name for path in plan.out.iterdir()} - {LOCK_NAME}, plan.out / JSON_CARD
    if not names:
        return []
    if not resume:
        raise UsageError(f"{plan.out} exists; choose another folder with --out, or continue its card with --resume")
    if names == {"runs"}:
        return []  # stopped in its first run
    if not card.exists():
        raise UsageError(f"{plan.out} has no {JSON_CARD} to continue; choose another folder with --out")
    facts, trials = read_card(card)
    for name, value in _size(plan).items():
        if facts.get(name) != value:
            raise UsageError(
                f"{card} was made with {facts.get(name)} {name}, not with {value}; choose another folder with --out"
            )
    check_outputs(plan.out / name for name in (JSON_CARD, TEXT, PAGE))
    return [trial for trial in trials if trial.struck]


def read_card(path: Path) -> tuple[dict[str, str], list[Trial]]:
    """Return the facts and trials of a card.json. Raises CorruptError if it is invalid."""
    try:
        document = read_json(path)
        facts = {str(name): str(value) for name, value in document["facts"].items()}
        return facts, [from_json(Trial, trial) for trial in document["trials"]]
    except (AttributeError, FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} is not a certify card: {error}; choose another folder with --out") from error


def _size(plan: Plan) -> dict[str, str]:
    return {"nodes": str(plan.num_nodes), "ranks": str(plan.num_ranks)}


def facts_of(plan: Plan, trials: Sequence[Trial]) -> dict[str, str]:
    """Return facts about the runs: time, machine, software, and the load of the machine."""
    loads = [trial.load for trial in trials]
    busy = f"{min(loads):.1f} to {max(loads):.1f}, of {os.cpu_count()} cores" if loads else ""
    records = []
    for path in (plan.out / "runs").glob("*/record.json"):
        with contextlib.suppress(CorruptError):  # the fault may have damaged it
            records.append(read_record(path.parent))
    if not records:
        return {**_size(plan), "load": busy}
    records.sort(key=lambda record: record.started_at)
    # A card that continued elsewhere, or after an update, is of all machines and versions.
    machines = dict.fromkeys(record.machine for record in records)
    software = dict.fromkeys(f"{name} {version}" for record in records for name, version in record.software.items())
    return {
        "when": records[0].started_at, "machine": ", ".join(machines), **_size(plan), "load": busy,
        "software": ", ".join(software),
    }  # fmt: skip


HEADINGS = ("fault", "strategy", "survived", "recovered after", "steps lost")


def rows_of(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the summary as rows of a table under HEADINGS."""
    return [
        (
            row["fault"],
            row["strategy"],
            _survived(row),
            _recovered(row["recover_seconds"], row["tries"]),
            str(row["steps_lost"]),
        )
        for row in document["faults"]
    ]


def _survived(row: Mapping[str, Any]) -> str:
    never = f", {row['not_struck']} not struck" if "not_struck" in row else ""
    return f"{row['survived']} of {row['tries']}{never}"


def lines_left_out(document: Mapping[str, Any]) -> list[str]:
    """Return a line for each fault that was not tested."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in document["left_out"]:
        reasons.setdefault((case["fault"], case["why"]), []).append(case["strategy"])
    return [f"{fault} ({', '.join(strategies)}): {why}" for (fault, why), strategies in reasons.items()]


def _recovered(seconds: Mapping[str, float | None], tries: int) -> str:
    median, longest = seconds["median"], seconds["max"]
    if median is None or longest is None:
        return "-"
    return f"{median:.1f} s" + (f", at most {longest:.1f} s" if tries > 1 else "")


def document_of(plan: Plan, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return a card's summary, with the cases not tested by this call or by the calls that it continues."""
    strategies = dict.fromkeys([*(trial.strategy for trial in trials), *plan.strategies])
    return summary(trials, dataclasses.replace(plan, strategies=[*strategies]).left_out())


def write_card(plan: Plan, trials: Sequence[Trial]) -> Path:
    """Write the resilience card: OUT/card.json, OUT/card.md and OUT/card.html; return the path of the last."""
    document, facts = document_of(plan, trials), facts_of(plan, trials)
    complete = {**document, "facts": facts, "trials": [asdict(trial) for trial in trials]}
    write_output(plan.out / JSON_CARD, json_text(complete))
    write_output(plan.out / TEXT, card_text(document, facts))
    path = plan.out / PAGE
    body = _card_body(document, facts)
    write_output(path, page("What this installation survives", body, see="docs/reference/certify.md"))
    return path


def _card_body(document: Mapping[str, Any], facts: Mapping[str, str]) -> Iterator[str]:
    yield "<main>\n<dl>"
    yield from (f"<dt>{escaped(key)}</dt><dd>{escaped(value)}</dd>" for key, value in facts.items())
    heads = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    yield f'</dl>\n<div class="wide" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>'
    for row in rows_of(document):
        yield "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>\n<p>A run survives if it completes all of its steps and exits with 0. New ranks may"
    yield "replace lost ones (--elastic). The time to recover runs from the fault to the next reported step. Faults"
    yield "that last from the start have none.</p>"
    if not_tried := lines_left_out(document):
        yield "<h2>Not tried here</h2>\n<ul>"
        yield from (f"<li>{escaped(line)}</li>" for line in not_tried)
        yield "</ul>"
    yield "</main>"


def card_text(document: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """Return the card as Markdown, for inclusion in another page."""
    lines = [f"- {key}: {_plain(value)}" for key, value in facts.items()]
    table = [_row(HEADINGS), _row("---" for _ in HEADINGS), *(_row(map(_plain, row)) for row in rows_of(document))]
    not_tried = [f"- not tried: {_plain(line)}" for line in lines_left_out(document)]
    return "\n".join([*lines, "", *table, *(["", *not_tried] if not_tried else [])]) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Return the text without special characters of Markdown or HTML."""
    return " ".join(html.escape(text, quote=False).replace("|", "\\|").split())
