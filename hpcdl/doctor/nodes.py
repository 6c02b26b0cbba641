"""Differences between the nodes of a job: each answers for itself (survey), and this module compares the answers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.processes import NodesFailed, on_every_node
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import own_program
from hpcdl.doctor.links import check_links
from hpcdl.doctor.scheduler import check_clocks
from hpcdl.doctor.survey import NodeAnswer, read_answers
from hpcdl.doctor.table import FAILURE, WARNING, Finding, Subject, failure, ok, warning

TIMEOUT_S = 120.0
MOST_NAMED = 8
"""Most hosts that a sentence names; it counts the others."""
ANSWER_ANYWAY = '"$@" || echo "hpcdl: node $(uname -n): the survey ended with $?" >&2'
"""Keeps the launcher from ending the other nodes if one fails."""
_SAME_EVERYWHERE = "load the same module in the job script, or put the environment where all nodes see it"
_ONE_KIND = "ask for nodes of one kind (sbatch --constraint), or leave it out (--exclude): all wait for the slowest"
_STAFF = "ask the site's staff why that node is set up differently"
TEXTS: Mapping[str, tuple[str, str]] = {
    "kernel": (WARNING, _STAFF),
    "processor": (WARNING, _ONE_KIND),
    "clock-rate": (WARNING, _STAFF),
    "huge-pages": (WARNING, _STAFF),
    "python": (FAILURE, _SAME_EVERYWHERE),
    "hpcdl": (FAILURE, _SAME_EVERYWHERE),
    "tensorflow": (FAILURE, _SAME_EVERYWHERE),
    "keras": (FAILURE, _SAME_EVERYWHERE),
    "numpy": (FAILURE, _SAME_EVERYWHERE),
    "h5py": (FAILURE, _SAME_EVERYWHERE),
    "mpi4py": (FAILURE, _SAME_EVERYWHERE),
    "mpi": (FAILURE, _SAME_EVERYWHERE),
    "networks": (WARNING, _STAFF),
    "open-files": (WARNING, _STAFF),
    "locked-memory": (WARNING, _STAFF),
    "folder": (FAILURE, "is the file system mounted there? leave the node out (--exclude) and tell the site's staff"),
    "data": (FAILURE, "is the file system mounted there? leave the node out (--exclude) and tell the site's staff"),
}
"""Facts that should be equal on all nodes: the level of a difference, and its remedy."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number that nodes of one kind share. Below `low` of the median, warn; `unit` and `meaning` are for people."""

    low: float
    unit: str
    meaning: str
    remedy: str


_LOOK = "look there for other processes, a low clock rate or a power cap; or leave it out (sbatch --exclude)"
NUMBERS: Mapping[str, Quantity] = {
    "memory-gib": Quantity(low=0.98, unit="GiB", meaning="memory", remedy=_STAFF),
    "free-memory-gib": Quantity(low=0.7, unit="GiB free", meaning="free memory", remedy=_LOOK),
    "gflops": Quantity(low=0.85, unit="GFLOP/s", meaning="all cores multiplying matrices", remedy=_LOOK),
    "copy-gib-s": Quantity(low=0.8, unit="GiB/s", meaning="one core copying memory", remedy=_LOOK),
}
"""Shares of the median: TensorFlow's own steps vary by a few percent between nodes; memory does not."""


def survey(subject: Subject, wanted: str) -> tuple[list[NodeAnswer], list[Finding]]:
    """Return every node's answer, and the differences; `wanted` is `all`, or a number of the job's first nodes.

    Raises UsageError if the job has fewer.
    """
    launcher = find_launcher(subject.environment)
    hosts = launcher.hosts(subject.environment)
    num_nodes = _how_many(wanted, max(len(hosts), 1))
    program = own_program("hpcdl.doctor.survey", *(["--data", str(subject.data.absolute())] if subject.data else []))
    command = ["bash", "-c", ANSWER_ANYWAY, "survey", *program]
    findings: list[Finding] = []
    try:
        printed = on_every_node(
            launcher, num_nodes, command, subject.environment, timeout_s=TIMEOUT_S, what="asking the nodes"
        )
    except NodesFailed as error:
        printed = error.printed
        remedy = "look at the nodes that did not answer; leave them out (sbatch --exclude)"
        findings.append(replace(failure(str(error), remedy), check="nodes"))
    answers = list(read_answers(printed).values())
    findings += absent(answers, hosts[:num_nodes], num_nodes)
    if num_nodes == 1:
        alone = warning("one node: nothing to compare", "hpcdl submit --nodes 4 -- doctor --nodes all")
        findings.append(replace(alone, check="nodes"))
    findings += compare(answers)
    if num_nodes > 1:
        findings += [replace(finding, check="clocks") for finding in check_clocks(subject)]
        findings += [
            replace(finding, check="links") for finding in check_links(launcher, num_nodes, subject.environment)
        ]
    return answers, findings


def _how_many(wanted: str, here: int) -> int:
    if wanted == "all":
        return here
    if not wanted.isdigit() or not int(wanted):
        raise UsageError(f"--nodes {wanted}: give a number of nodes, or `all`")
    if int(wanted) > here:
        raise UsageError(f"--nodes {wanted}, but this job has {here}; ask the scheduler for more, or say `all`")
    return int(wanted)


def absent(answers: Sequence[NodeAnswer], hosts: Sequence[str], num_nodes: int) -> Iterator[Finding]:
    """Report nodes that did not answer."""
    if len(answers) >= num_nodes:
        return
    heard = {_short(answer.host) for answer in answers}
    silent = [host for host in hosts if _short(host) not in heard]
    # Only if these are all that are missing: hosts may have answered by other names.
    who = f": {_named(silent)}" if len(silent) == num_nodes - len(answers) else ""
    text = f"{len(answers)} of {num_nodes} nodes answered{who}"
    yield replace(failure(text, "log in there (ssh), or ask for others: sbatch --exclude"), check="nodes")


def _short(host: str) -> str:
    # A node may know itself by a longer name than the scheduler does.
    return host.partition(".")[0]


def compare(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    """Report differences between nodes, and the problems that each node reports."""
    for name, (level, remedy) in TEXTS.items():
        yield from (replace(difference, check=name) for difference in _compare_texts(answers, name, level, remedy))
    for name, quantity in NUMBERS.items():
        yield from (replace(difference, check=name) for difference in _compare_numbers(answers, name, quantity))
    hosts_by_finding: dict[tuple[str, str, str, str], list[str]] = {}
    for answer in answers:
        for finding in answer.findings:
            hosts_by_finding.setdefault(finding, []).append(answer.host)
    for (level, check, text, remedy), hosts in hosts_by_finding.items():
        yield Finding(level=level, check=check, text=f"{_named(hosts)}: {text}", remedy=remedy)


def _compare_texts(answers: Sequence[NodeAnswer], name: str, level: str, remedy: str) -> Iterator[Finding]:
    hosts: dict[str, list[str]] = {}
    for answer in answers:
        if name in answer.texts:
            hosts.setdefault(answer.texts[name], []).append(answer.host)
    groups = sorted(hosts.items(), key=lambda item: -len(item[1]))
    if len(groups) == 1:
        yield ok(groups[0][0])
    elif groups:
        most, other_groups = groups[0], groups[1:]
        differing = "; ".join(
            f"{_named(names)} {'has' if len(names) == 1 else 'have'} {text}" for text, names in other_groups
        )
        text = f"{differing}; {_named(most[1]) if len(most[1]) <= len(other_groups[0][1]) else 'the others'} {most[0]}"
        yield Finding(level=level, text=text, remedy=remedy)


def _compare_numbers(answers: Sequence[NodeAnswer], name: str, quantity: Quantity) -> Iterator[Finding]:
    by_host = {answer.host: answer.numbers[name] for answer in answers if name in answer.numbers}
    if not by_host:
        return
    median = statistics.median(by_host.values())
    low = sorted((value, host) for host, value in by_host.items() if value < quantity.low * median)
    for value, host in itertools.islice(low, MOST_NAMED):
        text = f"{host}: {value:.4g} {quantity.unit} ({quantity.meaning}), {value / median:.0%} of the median node's"
        load = next(answer.numbers.get("load") for answer in answers if answer.host == host)
        yield warning(text + (f"; its load is {load:.1f}" if load is not None else ""), quantity.remedy)
    if len(low) > MOST_NAMED:
        yield warning(f"{len(low) - MOST_NAMED} more nodes are below {quantity.low:.0%} of the median", quantity.remedy)
    if not low:
        lowest, highest = min(by_host.values()), max(by_host.values())
        yield ok(f"{lowest:.4g} to {highest:.4g} {quantity.unit} ({quantity.meaning})")


def _named(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    return ", ".join(hosts[:MOST_NAMED]) + more
