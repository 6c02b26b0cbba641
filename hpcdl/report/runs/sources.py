"""Where runs come from: run directories and folders of them. Unreadable records are reported, not dropped.

Also the bandwidth of the network, as the user gives it or `hpcdl bench allreduce --json` measured it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.processes.collector import no_collection
from hpcdl.core.progress import NullProgress, Progress
from hpcdl.core.records.run_record import FILE_NAME, read_record, state_of
from hpcdl.core.storage.files import read_json
from hpcdl.core.units import counted, listed, parse_size
from hpcdl.report.runs.findings import Inferred, inferred_of
from hpcdl.report.runs.run import Run, from_record


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Runs in the order of their names, a line for each unreadable record, and other remarks.

    `run_dirs`: name and directory of each run that was read from one, in the order of `runs`, which begin with these.
    `inferences` are the records of `hpcdl infer`, which belong to no curve. `kept_apart`: whether the runs
    have their distinguishing settings (report/analysis/analyse.py).
    """

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    run_dirs: tuple[tuple[str, Path], ...] = ()
    inferences: tuple[Inferred, ...] = ()
    kept_apart: bool = False

    def __add__(self, other: Gathered) -> Gathered:
        """Return both together."""
        return Gathered(
            runs=self.runs + other.runs,
            unreadable=self.unreadable + other.unreadable,
            remarks=self.remarks + other.remarks,
            run_dirs=self.run_dirs + other.run_dirs,
            inferences=self.inferences + other.inferences,
        )


_BETWEEN_LOOKS = 100
"""Records between two updates of the progress bar."""
Walk = Sequence[tuple[str, Sequence[str]]]
"""Folders, each with the names of its files."""


STUDY_FILE, TRIES, PROFILES = "study.json", "tries", "profiles"
"""A study's own file, and the folders beside it for its tries (study/choice.py) and its runs' profiles."""


def walk(path: Path) -> Walk:
    """Return `path` and the folders below it, but none below a run's, so that thousands of runs are fast. No links."""
    folders = []
    for folder, below, files in os.walk(path):
        if FILE_NAME in files:
            below.clear()
        if STUDY_FILE in files and TRIES in below:
            below.remove(TRIES)  # a study's tries only choose its settings: they are not measurements
        # os.walk lists folders in the file system's order, in which the same report would differ between nodes.
        below.sort()
        folders.append((folder, files))
    return folders


def passed_over(walked: Walk, run_dirs: Iterable[Path]) -> list[str]:
    """Return a line for runs behind links, and one for closed folders: a walk enters neither.

    A link to a run of `run_dirs`, such as `latest`, is none.
    """
    visited = {folder for folder, _ in walked}
    links: list[str] = []
    closed: list[str] = []
    for folder, files in walked:
        if FILE_NAME in files:  # a run: nothing below it counts
            continue
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError):  # removed since the walk
            entries = sorted(os.scandir(folder), key=attrgetter("name"))
        for entry in entries:
            known = entry.path in visited or (STUDY_FILE in files and entry.name == TRIES)
            if entry.is_symlink():
                if any(os.access(f"{entry.path}/{name}", os.F_OK) for name in (FILE_NAME, STUDY_FILE)):
                    links.append(entry.path)
            elif entry.is_dir() and not known:
                closed.append(entry.path)
    if links:
        there = {folder for run_dir in map(Path.resolve, run_dirs) for folder in (run_dir, *run_dir.parents)}
        links = [link for link in links if Path(link).resolve() not in there]
    lines = [(f"links are not followed, so their runs are left out; name them too: {listed(links, 4)}", links)]
    lines.append((f"folders that cannot be read are left out: {listed(closed, 4)}", closed))
    return [line for line, places in lines if places]


def find_run_dirs(path: Path, walked: Walk | None = None) -> list[Path]:
    """Return `path` if it holds a record, else all folders below it that do. `walked` is its walk, if known."""
    walked = walk(path) if walked is None else walked
    run_dirs = [Path(folder) for folder, files in walked if FILE_NAME in files]
    if run_dirs:
        return run_dirs
    if path.is_dir():
        if lines := passed_over(walked, ()):
            raise UsageError(f"{path} holds no {FILE_NAME}: {'; '.join(lines)}")
        raise UsageError(f"{path} holds no {FILE_NAME}; name a run directory of `hpcdl train`, or a folder of them")
    kind = "a file" if path.exists() else "absent"
    raise UsageError(f"{path} is {kind}; name a run directory of `hpcdl train`, or a folder of them")


def holds_runs(walked: Walk) -> bool:
    """Return whether a folder, or one below it, holds a record."""
    return any(FILE_NAME in files for _, files in walked)


def gather(
    paths: Sequence[Path], bar: Progress | None = None, walks: Mapping[Path, Walk] = MappingProxyType({})
) -> Gathered:
    """Read the records of `paths`, some of which may have been walked.

    Raises CorruptError for a damaged record that was named itself; one among others in a folder becomes a line.
    """
    walks = {path: walks[path] if path in walks else walk(path) for path in paths}
    named = [(path, run_dir) for path in paths for run_dir in find_run_dirs(path, walks[path])]
    run_dirs_of_all = [run_dir for _, run_dir in named]
    left_out = dict.fromkeys(line for path in paths for line in passed_over(walks[path], run_dirs_of_all))
    if len(paths) > 1:  # several paths may lead to the same run
        # Only named paths are resolved, because resolving asks the file system for every component.
        resolved = {path: path.resolve() for path in paths}
        once: dict[Path, tuple[Path, Path]] = {}
        for path, run_dir in named:
            once.setdefault(resolved[path] / run_dir.relative_to(path), (path, run_dir))
        named = list(once.values())
    # Records hold no cycles, for which Python would search among thousands of them.
    with no_collection():
        records = _read_all(_named(named), bar or NullProgress())
    copies = _copies(record for record in records if isinstance(record, Run))
    kept_pairs = [pair for pair in zip(named, records, strict=True) if id(pair[1]) not in copies]
    records = [record for _, record in kept_pairs]
    runs = tuple(record for record in records if isinstance(record, Run))
    unreadable = tuple(record for record in records if isinstance(record, str))
    run_dirs = tuple((record.name, run_dir) for (_, run_dir), record in kept_pairs if isinstance(record, Run))
    inferences = tuple(record for record in records if isinstance(record, Inferred))
    if not runs and not inferences and unreadable:
        raise CorruptError(f"none of {len(unreadable)} records can be read; the first: {unreadable[0]}")
    remarks = (*left_out, *((_copied(list(copies.values())),) if copies else ()))
    return Gathered(runs=runs, unreadable=unreadable, remarks=remarks, run_dirs=run_dirs, inferences=inferences)


_copy_key = attrgetter("started_at", "strategy", "seconds_total", "images_per_second", "step_seconds")
"""Fields that are never all equal in two measured runs, to the last digit of their times."""


def _copies(runs: Iterable[Run]) -> dict[int, tuple[Run, Run]]:
    """Return, by id, runs whose folder is a copy of an earlier one's, with that run: a measurement counts once."""
    # Ids are the keys of the result, because a Run holds mappings and has no hash.
    first: dict[tuple[object, ...], Run] = {}
    copies = {}
    for run in runs:
        if run.started_at and run.images_per_second is not None and run.seconds_total is not None:
            earlier = first.setdefault(_copy_key(run), run)
            if earlier is not run:
                copies[id(run)] = (run, earlier)
    return copies


def without_copies(baseline: Gathered, runs: Sequence[Run], name: str) -> Gathered:
    """Return `baseline` without copies of `runs`. Raises UsageError if nothing remains: a study equals itself."""
    copies = _copies([*runs, *baseline.runs])
    kept = tuple(run for run in baseline.runs if id(run) not in copies)
    if not copies:
        return baseline
    if not kept:
        raise UsageError(f"--baseline {name}: its runs are copies of those to compare; name an earlier study")
    remark = f"baseline: {_copied(list(copies.values()))}"
    return replace(baseline, runs=kept, remarks=(*baseline.remarks, remark))


def _copied(pairs: Sequence[tuple[Run, Run]]) -> str:
    names = listed([f"{run.name} of {earlier.name}" for run, earlier in pairs])
    return f"{counted(len(pairs), 'run')} left out as a copy of another, with its start and its times: {names}"


def _named(paths: Sequence[tuple[Path, Path]]) -> list[tuple[Path, Path, str]]:
    """Add each run's name in the report: equal names in two studies are replaced by the run directories."""
    names = [run_name(path, run_dir) for path, run_dir in paths]
    times = Counter(names)
    return [
        (path, run_dir, name if times[name] == 1 else str(run_dir))
        for (path, run_dir), name in zip(paths, names, strict=True)
    ]


def _read_all(named: Sequence[tuple[Path, Path, str]], bar: Progress) -> list[Run | Inferred | str]:
    """Return each run, or the problem of its record. Raises CorruptError for one that was named itself."""
    records: list[Run | Inferred | str] = []
    with bar:
        for number, (path, run_dir, name) in enumerate(named):
            if number % _BETWEEN_LOOKS == 0:
                bar.update(number / len(named))
            records.append(_read(path, run_dir, name))
    return records


def _read(path: Path, run_dir: Path, name: str) -> Run | Inferred | str:
    try:
        record = read_record(run_dir)
        run = from_record(record, name) if record.inference is None else inferred_of(record, name)
    except CorruptError as error:
        if run_dir == path:
            raise
        return str(error)
    # The record of a run whose processes were killed says `running` for ever.
    state = state_of(run_dir, run.status)
    return run if state == run.status else replace(run, status=state)


def run_name(path: Path, run_dir: Path) -> str:
    """Return the run's folder relative to the folder that was named."""
    below, above = str(run_dir), str(path)
    if below == above:
        # `.` has no name of its own.
        return run_dir.resolve().name
    # Path drops `./`, so names below the current folder have no prefix to remove.
    return below.removeprefix(above).lstrip(os.sep) if path.name else below


def link_of(text: str) -> float:
    """Return bytes per second of `12.5GB`, or the median link in a file of `hpcdl bench allreduce --json`.

    Raises UsageError if `text` is neither.
    """
    path = Path(text)
    if path.is_file():
        return _measured_link(path)
    try:
        bytes_per_second = float(parse_size(text))
    except ValueError as error:
        raise UsageError(f"--link: {error}; or name a file made by hpcdl bench allreduce --json") from None
    if bytes_per_second <= 0:
        raise UsageError(f"--link {text}: a network carries more than nothing; give bytes per second, such as 12.5GB")
    return bytes_per_second


def _measured_link(path: Path) -> float:
    try:
        cost = float(read_json(path)["link"]["seconds_per_byte"])
    except (CorruptError, KeyError, TypeError, ValueError):
        raise UsageError(f"--link {path} is not what hpcdl bench allreduce --json prints; make one with it") from None
    if not cost > 0:
        raise UsageError(f"--link {path}: its link's time does not grow with size; measure larger --sizes")
    return 1 / cost
