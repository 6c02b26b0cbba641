"""A run directory: run.toml records the settings of the run and the origin of each value."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcdl.checkpoint.folders import FOLDER as CHECKPOINTS
from hpcdl.checkpoint.folders import HOLDS as CHECKPOINT_HOLDS
from hpcdl.checkpoint.folders import (
    SAVED,
    list_checkpoints,
    remove,
    set_aside,
    sweep_unfinished,
    what_is_missing,
)
from hpcdl.cluster.status import FOLDER
from hpcdl.config.load import Layer, ResolvedConfig, all_settings, as_toml_values, flatten, load, settings_by_key
from hpcdl.config.schema import InterruptionConfig, ScriptConfig, TrainConfig
from hpcdl.config.settings import Matters
from hpcdl.core.errors import (
    NOT_ALLOWED,
    ConfigError,
    CorruptError,
    HpcdlError,
    StoppedEarly,
    UnknownNameError,
    UsageError,
)
from hpcdl.core.paths import quoted, typed
from hpcdl.core.records.run_record import FILE_NAME as RECORD_FILE
from hpcdl.core.records.run_record import FINISHED, RunRecord, read_record
from hpcdl.core.storage.disk import (
    Made,
    TargetError,
    free_name,
    holds_shards,
    make_folder,
    move,
    open_folder,
    others_in,
    remove_content,
    remove_file,
    remove_folder,
    sweep,
    user_name,
)
from hpcdl.core.storage.files import read_bytes, read_toml, toml_text, write_bytes, write_text
from hpcdl.core.storage.lock import FILE_NAME as LOCK_NAME
from hpcdl.core.storage.lock import writing
from hpcdl.core.units import counted
from hpcdl.run.code import digests

Config = TypeVar("Config")
CONFIG_FILE = "run.toml"
MODEL_FILE = "model.keras"
DATA_FILE = ".hpcdl-data"
"""What the manifest of the data says beside their shards (trained_data.py): the data may be gone before the model."""
PARTING_S = 15.0
"""Time limit for ranks to end; they end within 10 s of the process that started them."""
OF_RANKS = r"ranks(/.*)?|trace(/\.?rank-\d+\.(trace|place)(\.\w+\.tmp)?)?"
"""The folders of the ranks and their traces. Users put pages of `hpcdl trace` beside the latter."""
HOLDS = (
    r"(run\.toml|record\.json|metrics\.jsonl|model\.keras|\.hpcdl-(lock|saved|data)|\.[\w.-]+\.tmp(/.*)?"
    rf"|{OF_RANKS}|{CHECKPOINTS}(/step-\d{{10}}(/({CHECKPOINT_HOLDS}))?|/\..+\.tmp(/.*)?)?)"
)
"""Pattern of all paths that hpcdl writes into a run directory."""
_UNTRAINED = rf"run\.toml|record\.json|metrics\.jsonl|\.hpcdl-(lock|data)|\.[\w.-]+\.tmp(/.*)?|{OF_RANKS}"
"""The same pattern before any training."""
_LEFT_BY_KILLED = r"run\.toml|record\.json|metrics\.jsonl|model\.keras|\.hpcdl-(saved|data)"
_OF_ONE_CALL = ("run-dir", "allow", "inject", "from-scratch", "from-step")
"""Settings that a resumed run does not inherit."""
_HOW_FAR = ("steps", "epochs", "target-accuracy")
"""Settings that define the end of a run."""
STRUCK = "injected-"
"""Prefix of marker files, in the folder of the ranks, for faults that struck since the user started the run."""
_UNDO = '; put back what was there (record.json has it under "config"), and give other settings as flags'
"""How to mend a run.toml that has been edited."""
CHECKSUM, SCRIPT, CODE = "data-checksum", "script", "code"
"""Facts of a run's start: the checksum of its data, or the script it runs; digests of the user's files by path."""


def default_run_dir(name: str, kind: str, now: float | None = None) -> Path:
    """Return `runs/<time>-<name>-<kind>`; for a name that is a path or names a function, the file's stem."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    base = Path("runs") / f"{stamp}-{Path(name.partition(':')[0]).stem}-{kind}"
    candidate, number = base, 2
    while candidate.exists():
        candidate, number = base.with_name(f"{base.name}-{number}"), number + 1
    return candidate


def resume_layer(run_dir: Path, kind: type[Any] = TrainConfig) -> list[Layer]:
    """Return the first settings of the run in `run_dir`, as a layer below the flags; empty if there is no run yet."""
    if not (run_dir / CONFIG_FILE).exists():
        return []
    resolved, _ = read_as(kind, run_dir)
    values = as_toml_values(resolved.config)
    chosen = {
        key: value for key, value in values.items() if resolved.origins[key] != "default" and key not in _OF_ONE_CALL
    }
    return [Layer(origin=f"run ({run_dir})", values=chosen)]


def check_trusted(run_dir: Path, trust: bool) -> None:
    """Raise UsageError if `run_dir` belongs to another user, even root, and the user did not say --trust.

    Its run.toml may name a file with a model, and its model.keras classes of any module: code that would run.
    """
    for path in (run_dir, run_dir / CONFIG_FILE, run_dir / MODEL_FILE):
        owner = path.stat().st_uid if path.exists() else os.geteuid()
        if owner != os.geteuid() and not trust:
            raise UsageError(
                f"{path} belongs to {user_name(owner)}, and the code that it names would run as you; add --trust if "
                "you trust them, or take a copy that you have looked into"
            )


def removal_of(run_dir: Path) -> str:
    """Return how the message of a refused run ends whose call had made `run_dir`."""
    return f" ({run_dir}, which this call had made, is removed)"


@dataclass(frozen=True)
class EarlierState:
    """The state of the run directory before a call: the folder that it `made`, or the content of files `there`.

    `moved`: what --from-scratch has set aside, by its place before.
    """

    run_dir: Path
    made: Made | None
    there: Mapping[str, bytes]
    moved: Mapping[Path, Path]

    @contextmanager
    def restored_if_refused(self) -> Iterator[None]:
        """Restore the earlier state if the ranks refuse the user's input before any training.

        Only ranks find problems that need TensorFlow (a model's outputs, a loss's name), so that it is loaded only
        once.
        """
        try:
            yield
        except HpcdlError as error:
            # By its code: the ranks' refusal comes as a RankError.
            if error.exit_code == UsageError.exit_code and self._restore():
                # In place: the error's class must stay.
                error.args = (f"{error}{removal_of(self.run_dir)}",)
            raise

    def _restore(self) -> bool:
        """Undo what this call changed, and return whether the run directory was removed."""
        if self.there:
            for name, content in self.there.items():
                write_bytes(self.run_dir / name, content)
            back = [path for path in self.moved if not os.path.lexists(path)]
            for path in back:
                move(self.moved[path], path)
            if back:
                _log(f"the run does not start again; back in their place: {', '.join(map(str, back))}")
        elif self.made is None:
            remove_content(self.run_dir, _UNTRAINED)
        elif not others_in(self.run_dir, _UNTRAINED):
            self.made.remove()
            return True
        return False


@contextmanager
def written(run_dir: Path, checkpoint: InterruptionConfig, *, model: bool = False) -> Iterator[EarlierState]:
    """Make `run_dir` if it is missing, and lock it as its only writer. Raises UsageError naming any other writer.

    `model`: the run writes a model of hpcdl's, and not a script's own.

    Ranks whose starting process was killed have PARTING_S to end; their unfinished files are removed afterwards.
    """
    try:
        made = next((folder for folder in make_folder(run_dir) if folder.path == run_dir), None)
    # A TargetError is an OSError with a message of its own.
    except TargetError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{run_dir} cannot be made, a file is in its way; choose another --run-dir") from error
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    with writing(run_dir):
        check_place(run_dir, checkpoint)  # under the lock: another call may have begun a run here
        _check_links(run_dir)
        kept = (CONFIG_FILE, DATA_FILE, *((SAVED,) if checkpoint.from_scratch else ()))
        names = kept if (run_dir / CONFIG_FILE).exists() else ()
        there = {name: read_bytes(run_dir / name) for name in names if (run_dir / name).exists()}
        if (run_dir / FOLDER).is_dir():
            # Rank 0 (after a loss the first survivor) holds this lock while it lives: wait until it has ended.
            with writing(run_dir / FOLDER, PARTING_S):
                pass
        forget_struck(run_dir)
        if there:
            swept = [*sweep(run_dir, _LEFT_BY_KILLED), *sweep_unfinished(run_dir)]
            if swept:
                _log(f"removed what killed ranks had not finished: {', '.join(swept)}")
        moved = _set_aside(run_dir, model=model) if there and checkpoint.from_scratch else {}
        yield EarlierState(run_dir, made, there, moved)


_MOST_NAMES = 100
"""Default names that a run tries, each of which another call may take in the meantime."""


@contextmanager
def begun(
    run_dir: Path, another: Callable[[], Path] | None, checkpoint: InterruptionConfig, *, model: bool = False
) -> Iterator[EarlierState]:
    """Call `written`; if a call of the same second has taken a default name, take `another` (None: the user's name).

    A stop names the folder that the user has not named.
    """
    with ExitStack() as held:
        for left in reversed(range(_MOST_NAMES)):
            try:
                state = held.enter_context(written(run_dir, checkpoint, model=model))
                break
            except UsageError:
                if another is None or not left or not run_dir.exists():
                    raise
                run_dir = another()
        try:
            yield state
        except StoppedEarly as stop:
            if another is not None:
                stop.args = (str(stop).replace("with --resume", f"with --resume --run-dir {quoted(run_dir)}"),)
            raise


def _set_aside(run_dir: Path, *, model: bool) -> dict[Path, Path]:
    """Rename the checkpoints, and the `model`, of a run that is to start again; return their new paths by the old."""
    moved = {}
    if aside := set_aside(run_dir):
        moved[run_dir / CHECKPOINTS] = aside
        _log(f"the run starts again at step 0; its earlier checkpoints are in {aside}")
    trained = run_dir / MODEL_FILE
    if model and os.path.lexists(trained):  # else it would pass for the model of the new training until that ends
        moved[trained] = free_name(trained.with_suffix(""), trained.suffix)
        move(trained, moved[trained])
        _log(f"the run starts again at step 0; its earlier model is {moved[trained]}")
    return moved


def forget_struck(run_dir: Path) -> None:
    """Remove the markers of injected faults: a new call injects its own faults again."""
    for struck in (run_dir / FOLDER).glob(f"{STRUCK}*"):
        remove_file(struck)


def _check_links(run_dir: Path) -> None:
    """Raise TargetError if a link would keep the run from writing, before ranks start."""
    for name in ("metrics.jsonl", f"{FOLDER}/launcher.log"):
        if (run_dir / name).is_symlink():
            raise TargetError(errno.ELOOP, "it is a link, which is not followed; move it away", run_dir / name)
    for name in (FOLDER, "trace", CHECKPOINTS):
        with suppress(FileNotFoundError):
            os.close(open_folder(run_dir / name))  # opening raises the error


def _log(text: str) -> None:
    sys.stderr.write(f"hpcdl: {text}\n")


def check_place(run_dir: Path, checkpoint: InterruptionConfig) -> None:
    """Raise UsageError unless `run_dir` is new or empty, or is to be resumed and holds a complete run."""
    if checkpoint.from_scratch and not checkpoint.resume:
        raise UsageError("--from-scratch starts a run again that --resume names; add --resume")
    if not (checkpoint.resume and (run_dir / CONFIG_FILE).exists()):
        _check_outside_runs(run_dir)
    if not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise UsageError(f"run directory {run_dir} is a file; choose another --run-dir")
    if checkpoint.resume and (run_dir / CONFIG_FILE).exists():
        missing = "" if checkpoint.from_scratch else what_is_missing(run_dir)
        if missing:
            raise UsageError(f"{missing}; put it back, or start again at step 0 with --resume --from-scratch")
        return
    # The lock is this call's own; a kill in the first moments leaves no more than the beginning of run.toml.
    if holds_shards(run_dir):
        raise UsageError(f"run directory {run_dir} holds a data set; choose another --run-dir")
    foreign = others_in(run_dir, rf"\{LOCK_NAME}|\.run\.toml\.\w+\.tmp(/.*)?")
    if foreign and checkpoint.resume:
        raise UsageError(
            f"{run_dir} holds no run to resume (no {CONFIG_FILE}), and is not empty ({foreign[0]}); "
            "choose a new or an empty --run-dir"
        )
    if foreign:
        raise UsageError(f"run directory {run_dir} exists; choose another --run-dir, or continue with --resume")


def _check_outside_runs(run_dir: Path) -> None:
    """Raise UsageError if a new `run_dir` would lie in another run's folder: reports look for no run inside a run."""
    for folder in run_dir.resolve().parents:
        # A user's own file may be called run.toml; with a record beside it, it is a run's.
        if (folder / CONFIG_FILE).is_file() and (folder / RECORD_FILE).is_file():
            raise UsageError(
                f"run directory {run_dir} is inside the run {folder}, where `hpcdl runs` and reports do not look; "
                "choose a --run-dir outside"
            )


def finished(run_dir: Path, config: TrainConfig, num_steps: int | None) -> RunRecord | None:
    """Return the record of a run that already reached the end that `config` asks for; else None.

    Raises UsageError if it finished at another end and continuing would replace its results by earlier ones. That is so
    if it is beyond `num_steps` (for strategies that count steps in common), or left no checkpoint and would start over.
    """
    asked = config.checkpoint
    if not asked.resume or asked.from_scratch or asked.from_step is not None or not (run_dir / CONFIG_FILE).exists():
        return None
    try:
        record = read_record(run_dir)
    except CorruptError:  # killed before its first record, or damaged: only the checkpoints count
        return None
    if record.status != FINISHED:
        return None
    if num_steps is not None and record.steps > num_steps:
        raise UsageError(
            f"{run_dir} is finished after step {record.steps}, beyond the {counted(num_steps, 'step')} that are asked "
            "for; give more --epochs or --steps, go back with --from-step, or choose another --run-dir"
        )
    before, after = flatten(read(run_dir)[0].config), flatten(config)
    further = next((key for key in _HOW_FAR if before[key] != after[key]), "")
    if not further:
        return record
    if not list_checkpoints(run_dir / CHECKPOINTS):
        model = run_dir / MODEL_FILE
        begin = (
            f"train another --run-dir with --init-weights {quoted(model)}, or this one"
            if model.exists()
            else "train it"
        )
        raise UsageError(
            f"--{further}: {run_dir} has finished at step {record.steps} and kept no checkpoint to continue from; "
            f"{begin} again with --from-scratch"
        )
    return None


def without_model(run_dir: Path) -> HpcdlError:
    """Return the error for a run without a usable model, with the remedy: it has not got that far, or kept none."""
    what = f"{run_dir} holds neither {MODEL_FILE} nor a checkpoint"
    try:
        record = read_record(run_dir)
    except CorruptError:
        record = None
    if record is None or record.status != FINISHED:
        return CorruptError(f"{what}; let the run continue with --resume")
    again = typed("train", "--resume", "--run-dir", run_dir, "--from-scratch")
    if record.study:
        return UsageError(f"{what}: its study kept none; give hpcdl sweep --keep-models, or train it again: {again}")
    return CorruptError(f"{what}, though it has finished: they were removed; train it again: {again}")


def discard(run_dir: Path, aside: Path) -> None:
    """Remove a run that will be repeated if it holds only files of hpcdl; otherwise move it to `aside`."""
    if remove_folder(run_dir, HOLDS):
        make_folder(aside.parent)
        move(run_dir, aside)


def drop_heavy_results(run_dir: Path) -> None:
    """Remove the model and the checkpoints of a run after its measurement."""
    remove_file(run_dir / MODEL_FILE)
    remove_file(run_dir / SAVED)  # else a --resume would take its checkpoints for lost
    for step in list_checkpoints(run_dir / CHECKPOINTS):
        remove(run_dir / CHECKPOINTS, step)
    remove_folder(run_dir / CHECKPOINTS, r"\..+\.tmp(/.*)?")


def check_resumed(run_dir: Path, config: TrainConfig, data_checksum: str, *, keeps_bytes: bool = False) -> None:
    """Raise ConfigError, with a line per setting that changes results and differs from the run in `run_dir`.

    Data are compared by content, not by path. Settings named by --allow may differ. `keeps_bytes`: --scale auto leaves
    bytes of the data unchanged; runs from before --scale existed divided them by 255.
    """
    settings = settings_by_key(TrainConfig)
    for key in config.checkpoint.allow:
        if key not in settings:
            raise UnknownNameError("setting of --allow", key, settings)
    if not (run_dir / CONFIG_FILE).exists():
        return
    begun, facts = read(run_dir)
    before, after = flatten(begun.config), flatten(config)
    if keeps_bytes and "scale" not in read_toml(run_dir / CONFIG_FILE, CorruptError):
        before["scale"] = "0..1"
    differing = {
        key: (setting.show(before[key]), setting.show(after[key]))
        for key, setting in settings.items()
        if setting.matters and Matters.RESULT in setting.matters and before[key] != after[key] and key != "data"
    }
    # Without a noted checksum, the same path counts as the same data.
    checksum = facts.get(CHECKSUM, data_checksum if before["data"] == after["data"] else "unknown")
    if checksum != data_checksum:
        differing["data"] = (f"{before['data']} (checksum {checksum})", f"{after['data']} (checksum {data_checksum})")
    problems = [
        f"--{key}: {run_dir} began with {old}, now it is {new}; give what it began with, or --allow {key}"
        for key, (old, new) in differing.items()
        if key not in config.checkpoint.allow
    ]
    if problems:
        raise ConfigError(problems)


def facts_of(config: TrainConfig, data_checksum: str, run_dir: Path) -> dict[str, Any]:
    """Return the facts of a run that begins or resumes; the user's code stays noted as it was at the beginning."""
    begun = config.checkpoint.resume and not config.checkpoint.from_scratch and (run_dir / CONFIG_FILE).exists()
    code = read(run_dir)[1].get(CODE) if begun else None
    return {CHECKSUM: data_checksum, CODE: _code(config) if code is None else code}


def changed_code(run_dir: Path, config: TrainConfig, *, model: bool = True) -> list[str]:
    """Return a warning for each changed file of the preprocessing or the `model`, or one that these import."""
    begun = read(run_dir)[1].get(CODE)
    return [
        f"{path} has changed since this run began: its model or preprocessing may be another one now"
        for path, digest in _code(config, model=model).items()
        if isinstance(begun, dict) and begun.get(path, digest) != digest
    ]


def changed_script(run_dir: Path, script: str) -> list[str]:
    """Return a warning for `script`, or a file that it imports, that has changed since the run's checkpoints began.

    A script may have moved: files are known by their names.
    """
    begun = read_as(ScriptConfig, run_dir)[1].get(CODE)
    if not isinstance(begun, dict):
        return []
    names = {Path(path).name for path in begun}
    return [
        f"{path} has changed since this run began: part of it ran with other code"
        for path, digest in digests([script]).items()
        if Path(path).name in names and digest not in begun.values()
    ]


def _code(config: TrainConfig, *, model: bool = True) -> dict[str, str]:
    """Return the SHA-256 of the user's code, by the path or module that the settings name, or the path imported."""
    specs = [config.data.preprocess or "", *([config.model.model] if model else [])]
    named = {spec.rpartition(":")[0] for spec in specs}
    return digests(sorted(named))


def _unwritable(run_dir: Path, error: OSError) -> HpcdlError:
    """Return the error of a folder that cannot be written: the user's mistake, unless the disk is full or fails."""
    kind = UsageError if error.errno in NOT_ALLOWED else HpcdlError
    return kind(f"cannot write run directory {run_dir}: {error.strerror}; choose another --run-dir")


def create(run_dir: Path, resolved: ResolvedConfig[Any], facts: Mapping[str, Any], data: str = "") -> None:
    """Make the folder and write run.toml; `facts` are known at the start beside the settings. `data`: see DATA_FILE."""
    text = toml_text({**as_toml_values(resolved.config), "facts": dict(facts), "origins": resolved.origins})
    try:
        make_folder(run_dir)
        write_text(run_dir / CONFIG_FILE, text)  # first: without it a folder is nobody's run, and must be empty
        if data:
            with suppress(OSError):  # without it `evaluate` warns that it knows less: no reason to end a run
                write_text(run_dir / DATA_FILE, data)
    # A TargetError is an OSError with a message of its own.
    except TargetError:
        raise
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def read(run_dir: Path) -> tuple[ResolvedConfig[TrainConfig], dict[str, Any]]:
    """Return the config of a training and the facts of its start. Raises CorruptError if run.toml is unreadable."""
    return read_as(TrainConfig, run_dir)


def read_as(kind: type[Config], run_dir: Path) -> tuple[ResolvedConfig[Config], dict[str, Any]]:
    """Return the same for settings of type `kind`. Raises UsageError if they have another type, or there is no run."""
    path = run_dir / CONFIG_FILE
    if not path.exists():
        if not (run_dir / RECORD_FILE).exists():
            raise UsageError(f"{run_dir} holds no run of `hpcdl train`; `hpcdl runs` lists what there is")
        raise CorruptError(f"{run_dir} holds no {CONFIG_FILE}; name a folder that `hpcdl train` made")
    document = read_toml(path, CorruptError, _UNDO)
    facts, origins = document.pop("facts", {}), document.pop("origins", {})
    if not isinstance(facts, dict) or not isinstance(origins, dict):
        raise CorruptError(f"{path} is damaged: facts and origins must be tables{_UNDO}")
    if (SCRIPT in facts) != (kind is ScriptConfig):
        command = f"the script {facts[SCRIPT]}; continue with `hpcdl run`" if SCRIPT in facts else "`hpcdl train`"
        raise UsageError(f"{run_dir} is a run of {command}")
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        # A layer for each key, so that an error names the key's line.
        loaded = load(kind, [Layer(origin=_line_of(key, lines), values={key: document[key]}) for key in document])
    except ConfigError as error:
        problems = [re.sub(r"^--(\S+) is needed: .*", r"\1 is missing", problem) for problem in error.problems]
        raise CorruptError(f"{path} is damaged: {'; '.join(problems)}{_UNDO}") from None
    defaults = {item.key: item.default for item in all_settings(kind)}
    # A file without origins does not tell which of its defaults were given.
    named = {key: "default" if value == defaults[key] else str(path) for key, value in flatten(loaded.config).items()}
    return ResolvedConfig(config=loaded.config, origins={**loaded.origins, **named, **origins}), facts


def _line_of(key: str, lines: Sequence[str]) -> str:
    """Return `line N`, which gives the key its value or begins its table."""
    begin = re.compile(rf"""\s*\[?["']?{re.escape(key)}["']?\s*[=\]]""")
    return next((f"line {number}" for number, line in enumerate(lines, start=1) if begin.match(line)), "run.toml")
