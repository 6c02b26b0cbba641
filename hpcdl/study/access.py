"""Scaling evidence for a centre: the study that its template needs, and the case of a document (report/evidence)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.cluster.batch.submission import script_of, wanted_by
from hpcdl.config.commands import load_submit
from hpcdl.config.load import settings_by_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.study import Study, load_study, study_tables
from hpcdl.core.errors import CorruptError, UnknownNameError, UsageError
from hpcdl.core.records.run_record import RunRecord, read_record
from hpcdl.core.storage.files import read_bytes, toml_text, write_output
from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.caveats import caveats
from hpcdl.report.analysis.scaling import build_curves
from hpcdl.report.evidence.checks import AttachedFile, Case, Measured, choose_curve, measure
from hpcdl.report.evidence.template import AccessTemplate
from hpcdl.report.runs.sources import Gathered
from hpcdl.strategies.refusals import unused_settings
from hpcdl.strategies.table import find_strategy
from hpcdl.study.jobs import part_folder
from hpcdl.study.plan import StudyRuns, make_plan
from hpcdl.study.points import prepare_points

MOST_ATTACHED_BYTES = 1 << 20
_NOT_HANDED_ON = ("ranks", "run-dir", "resume", "allow", "inject")
"""Settings that a new job chooses itself, or that only a test of failures uses."""


@dataclass(frozen=True, kw_only=True)
class AccessCase:
    """A case, the caveats about its runs, and a description of its parallel strategy."""

    case: Case
    caveats: Sequence[str]
    described: str


def node_counts_for(template: AccessTemplate, target: int) -> list[int]:
    """Return as many numbers of nodes up to `target` as the template asks for: halves of it, else equal parts.

    Raises UsageError if `target` is too small for that many, or outside the sizes of the template's partition.
    """
    if template.nodes is not None and not template.nodes[0] <= target <= template.nodes[1]:
        least, most = template.nodes
        raise UsageError(
            f"--target {target}: {template.title} takes jobs of {least} to {most} nodes; choose a number of these"
        )
    num_counts = max(int(template.at_least("node-counts") or 1), 2)
    halves = [target]
    while len(halves) < num_counts and halves[-1] % 2 == 0:
        halves.append(halves[-1] // 2)
    parts = {-(-target * part // num_counts) for part in range(1, num_counts + 1)}
    counts = sorted(halves if len(halves) == num_counts else parts)
    if len(counts) < num_counts:
        raise UsageError(
            f"--target {target}: {template.title} asks for {num_counts} numbers of nodes, and there are not so many up "
            f"to it; ask for {num_counts} nodes or more"
        )
    return counts


def access_study(
    template: AccessTemplate,
    target: int | None,
    path: Path | None,
    flags: Mapping[str, Any],
    pairs: list[str] | None = None,
    *,
    axes: Sequence[str] = (),
    zipped: Sequence[str] = (),
) -> tuple[Study, StudyRuns]:
    """Return the study that `template` needs, from a study's file and flags as for a sweep, and its plan.

    Raises UsageError without a target or numbers of nodes, and if a size cannot run.
    """
    if target is None and not flags.get("nodes"):
        raise UsageError("--for needs the number of nodes that you will ask for: add --target NODES")
    if flags.get("mode") not in (None, template.mode):
        raise UsageError(f"--mode {flags['mode']}, but {template.title} asks for {template.mode} scaling; leave it out")
    given_flags = {key: value for key, value in flags.items() if value is not None}
    if "nodes" not in given_flags and target is not None:
        given_flags["nodes"] = ",".join(map(str, node_counts_for(template, target)))
    values = {
        "name": f"evidence-{template.name}",
        "repeats": str(template.repeats),
        **given_flags,
        "mode": template.mode,
    }
    study = load_study(path, values, pairs, axes=axes, zipped=zipped)
    plan, _ = prepare_points(study, make_plan(study))
    missing = sorted({nodes for matrix in study.matrices for nodes in matrix.shape.nodes} - {*plan.node_counts})
    if missing:
        reasons = f": {listed(plan.left_out, 2)}" if plan.left_out else ""
        raise UsageError(f"no run on {listed(list(map(str, missing)), 6)} nodes is possible{reasons}")
    return study, plan


def write_study(study: Study, template: AccessTemplate, target: int | None) -> Path:
    """Write the study's file into the current folder and return its path."""
    path = Path(f"{study.name}.toml")
    wanted = f" --target {target}" if target is not None else ""
    rules = f"{template.source.url}, read {template.source.read}"
    head = f"# Made by `hpcdl sweep --for {template.name}{wanted}`. Rules: {rules}.\n"
    write_output(path, head + toml_text(study_tables(study)))
    return path


def access_case(
    template: AccessTemplate,
    paths: Sequence[Path],
    gathered: Gathered,
    *,
    curve: str = "",
    target: int | None = None,
    attached: Sequence[str] = (),
) -> AccessCase:
    """Return everything that a document is based on. `gathered` are runs with their distinguishing settings.

    Raises UsageError if the runs form several curves and none is named, and for an unsuitable file.
    """
    files = _attached(template, attached)
    name, chosen = choose_curve(build_curves(gathered.runs), curve)
    names = {run.name for point in chosen.points for run in point.runs}
    records = {run: read_record(run_dir) for run, run_dir in gathered.run_dirs if run in names}
    measured = measure(name, chosen, records, template.time)
    if target is not None and target < measured.points[0].nodes:
        raise UsageError(
            f"--target {target}: these runs are on {measured.points[0].nodes} nodes and more; run the study on fewer"
        )
    script, origin = batch_script(measured, paths)
    case = Case(
        template=template, measured=measured, target=target, script=script, script_source=origin, attached=files
    )
    strategy = chosen.first.strategy
    try:
        described = find_strategy(strategy).summary
    except UnknownNameError:  # measured elsewhere with a strategy that hpcdl does not have
        described = ""
    matching = [run for run in gathered.runs if run.strategy == strategy and run.model == chosen.first.model]
    return AccessCase(case=case, caveats=caveats(matching, gathered.unreadable, [chosen]), described=described)


def _attached(template: AccessTemplate, given: Sequence[str]) -> dict[str, AttachedFile]:
    """Return the user's files, given as `KIND=FILE`, by kind."""
    kinds = {kind.name: kind for kind in template.attachments}
    attached = {}
    for text in given:
        kind, equals, name = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--attach {text}: write --attach KIND=FILE; kinds: {', '.join(kinds) or 'none'}")
        if kind not in kinds:
            raise UnknownNameError("attachment", kind, kinds)
        try:
            content = read_bytes(name, MOST_ATTACHED_BYTES).decode(errors="replace")
        except OSError as error:
            raise UsageError(f"--attach {text}: cannot read {name}: {error.strerror}") from None
        if kinds[kind].holds.casefold() not in content.casefold() or not content.strip():
            raise UsageError(
                f"--attach {text}: {name} does not hold {kinds[kind].holds!r}; it should be: {kinds[kind].says}"
            )
        attached[kind] = AttachedFile(kind=kind, name=Path(name).name, text=content)
    return attached


def batch_script(measured: Measured, paths: Sequence[Path]) -> tuple[str, str]:
    """Return the script of the largest point's job and its origin, or "" and the reason why there is none.

    A script that `hpcdl sweep --jobs` has submitted comes first, then what `hpcdl submit --dry-run` would print here.
    """
    point = measured.points[-1]
    for path in paths:
        script = path / "jobs" / part_folder(path, point.nodes).name / "job.sh"
        if script.is_file():
            return read_bytes(script, MOST_ATTACHED_BYTES).decode(errors="replace"), (
                f"the script of the job that ran the study on {counted(point.nodes, 'node')}"
            )
    record = measured.records.get(point.first.name)
    if record is None or not record.config.get("model"):
        return "", "the runs are none of hpcdl train, so their batch script is not known"
    flags = {"nodes": str(record.nodes), "ranks-per-node": str(record.ranks_per_node)}
    try:
        script_text = script_of(wanted_by(load_submit(flags).config, ["train", *train_words(record)]))
    except (UsageError, CorruptError) as error:
        return "", f"no script: {error}"
    remark = (
        f"as `hpcdl submit --dry-run` prints it here for a run on {counted(point.nodes, 'node')}; not the one that ran"
    )
    return script_text, remark


def train_words(record: RunRecord) -> list[str]:
    """Return the flags of `hpcdl train` that reproduce those settings of a record that are not defaults."""
    arguments = []
    settings = settings_by_key(TrainConfig)
    # A file or a site may set what the run did not use; as a flag `hpcdl train` would refuse it.
    unused = {*unused_settings(find_strategy(record.strategy), record.config)}
    unused |= set() if record.evaluated_on else {"target-accuracy"}
    for key, setting in settings.items():
        value = record.config.get(key)
        if value is None or key in _NOT_HANDED_ON or key in unused:
            continue
        # Compared as text, because a record has JSON's types and a default Python's.
        if not setting.required and setting.show(setting.parse(value)) == setting.show(setting.default):
            continue
        if isinstance(value, bool):
            arguments.append(f"--{key}" if value else f"--no-{key}")
        else:
            arguments += [f"--{key}", ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]
    return arguments
