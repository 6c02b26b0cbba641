"""An inference before its ranks start: the model, the data in the form the model knows, and the output folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.folders import FOLDER as CHECKPOINTS
from hpcdl.checkpoint.folders import list_checkpoints
from hpcdl.cluster.status import FOLDER
from hpcdl.config.commands import EVERY_SPLIT, InferConfig
from hpcdl.config.load import Layer, ResolvedConfig, as_toml_values, load
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import ConfigError, CorruptError, HpcdlError, UsageError
from hpcdl.core.records.run_record import InferenceRecord, RunRecord
from hpcdl.core.storage.disk import Made, TargetError, make_folder, others_in, remove_content
from hpcdl.core.storage.files import read_bytes, read_toml, write_bytes, write_toml
from hpcdl.core.storage.lock import FILE_NAME as LOCK_NAME
from hpcdl.core.storage.lock import check_free, writing
from hpcdl.data.format.dataset import Dataset, Split, open_dataset
from hpcdl.run.rundir import CONFIG_FILE as RUN_FILE
from hpcdl.run.rundir import MODEL_FILE, OF_RANKS, PARTING_S, forget_struck, read, without_model
from hpcdl.run.trained_data import read_as_trained

STRATEGY = "infer"
"""Stands for the strategy in the record of an inference."""
ASKED_FILE = "infer.toml"
"""The request, a file in the output folder."""
_DEFAULT_BATCH = 32
_UNCOMPUTED = rf"infer\.toml|record\.json|metrics\.jsonl|\.hpcdl-lock|\.[\w.-]+\.tmp(/.*)?|{OF_RANKS}"
"""Pattern of the paths in the output folder that exist before anything is computed."""


@dataclass(frozen=True, kw_only=True)
class InferencePlan:
    """One inference. `trained` holds the settings of the run that trained the model, None for a .keras file.

    `notes` are messages to show; `warnings` also go to the record.
    """

    config: InferConfig
    model: Path
    trained: TrainConfig | None
    dataset: Dataset
    splits: tuple[Split, ...]
    batch_size: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def model_name(self) -> str:
        """The name of the model in reports."""
        return self.trained.model.model if self.trained else self.model.stem

    def settings(self) -> dict[str, Any]:
        """Return the request with the values derived from it."""
        chosen = {"split": ",".join(split.name for split in self.splits), "batch-size": self.batch_size}
        return {**as_toml_values(self.config), **chosen, "model": str(self.model)}


def prepare(config: InferConfig, model: Path) -> InferencePlan:
    """Check model and data, without TensorFlow. Raises UsageError if one is unavailable or ambiguous."""
    warnings: list[str] = []
    if is_run(model):
        trained = read(model)[0].config
        if not (model / MODEL_FILE).is_file() and not list_checkpoints(model / CHECKPOINTS):
            raise without_model(model)
        if config.data.scale != AUTO:
            raise UsageError(f"--scale is for a .keras file; {model} was trained with --scale {trained.data.scale}")
        dataset, _, remarks = read_as_trained(
            model, trained, config.data.data, verified=config.data.verify_data, targets=False
        )
        warnings = [text.removeprefix("warning: ") for text in remarks if text.startswith("warning: ")]
        notes = [text for text in remarks if not text.startswith("warning: ")]
    else:
        trained = None
        dataset, warnings = _as_the_file_says(config, model)
        notes = []
    splits = _chosen(dataset, config.data.split)
    summary = f"{', '.join(f'{split.name} ({split.num_samples} samples)' for split in splits)} of {dataset.name}"
    return InferencePlan(
        config=config,
        model=model,
        trained=trained,
        dataset=dataset,
        splits=splits,
        batch_size=config.data.batch_size or (trained.data.batch_size if trained else _DEFAULT_BATCH),
        notes=(f"outputs of {summary}", *notes),
        warnings=tuple(warnings),
    )


def is_run(model: Path) -> bool:
    """Return whether `model` is a run directory. Raises UsageError if it is neither that nor a .keras file."""
    if model.is_dir():
        if (model / RUN_FILE).exists():
            return True
        raise UsageError(f"{model} holds no run of `hpcdl train`; `hpcdl runs` lists what there is")
    if not model.exists():
        raise UsageError(f"no such model: {model}; name the folder of a run, or a .keras file")
    if model.suffix != ".keras":
        raise UsageError(f"{model} is not a .keras file; save the model with model.save('{model.stem}.keras')")
    return False


def _as_the_file_says(config: InferConfig, model: Path) -> tuple[Dataset, list[str]]:
    """Return the data for a .keras file, which says neither how it expects bytes nor how numbers were scaled."""
    dataset = open_dataset(config.data.data, verified=config.data.verify_data)
    inputs = [field for field in dataset.inputs if field.kind != "text"]
    bytes_in = [field.name for field in inputs if field.dtype == "uint8" and field.normalise == "none"]
    if bytes_in and config.data.scale == AUTO:
        of_run = f", or name its run, {model.parent}" if (model.parent / RUN_FILE).exists() else ""
        raise UsageError(
            f"{dataset.name} holds bytes ({', '.join(bytes_in)}), and {model} does not say how it takes them: give "
            f"--scale 0..1 (divided by 255, as hpcdl trains) or --scale none (0 to 255, for a model that scales itself)"
            f"{of_run}"
        )
    scaled = [field.name for field in inputs if field.normalise != "none"]
    warnings = [
        f"{name!r} is scaled by the statistics of {dataset.name} itself: right only where the model was trained on it"
        for name in scaled
    ]
    return replace(dataset, scale="none" if config.data.scale == AUTO else config.data.scale), warnings


def _chosen(dataset: Dataset, name: str | None) -> tuple[Split, ...]:
    """Return the split `name`; by default `val`, else all splits. Raises UsageError for an unknown name."""
    if name is None:
        name = "val" if "val" in dataset.splits else EVERY_SPLIT
    if name in dataset.splits:
        return (dataset.splits[name],)
    if name == EVERY_SPLIT:
        return tuple(dataset.splits.values())
    raise UsageError(f"--split {name}: {dataset.name} has {', '.join(dataset.splits)}, and {EVERY_SPLIT}")


def blank_record(plan: InferencePlan) -> RunRecord:
    """Return the record of an inference that ended before its ranks wrote one."""
    ranks = plan.config.run.ranks
    return RunRecord(
        strategy=STRATEGY,
        model=plan.model_name,
        data=plan.dataset.name,
        data_checksum=plan.dataset.checksum,
        counted=plan.dataset.counted,
        num_samples=sum(split.num_samples for split in plan.splits),
        ranks=ranks,
        workers=ranks,
        batch_per_rank=plan.batch_size,
        global_batch=plan.batch_size * ranks,
        warnings=plan.warnings,
        config=plan.settings(),
        inference=InferenceRecord(splits=[split.name for split in plan.splits]),
    )


def check_out(out: Path, *, resume: bool) -> None:
    """Raise UsageError unless `out` is new, empty or holds outputs to resume, and no other process writes to it."""
    if out.is_dir():
        check_free(out)
        _check_content(out, resume=resume)
    elif out.exists():
        raise UsageError(f"--out {out} is a file; name a new folder")


def _check_content(out: Path, *, resume: bool) -> None:
    foreign, ours = others_in(out, rf"\{LOCK_NAME}|\.[\w.-]+\.tmp(/.*)?"), (out / ASKED_FILE).exists()
    if foreign and ours and not resume:
        raise UsageError(f"--out {out} holds outputs already; continue with --resume, or name a new folder")
    if foreign and not ours:
        raise UsageError(f"--out {out} is not empty ({foreign[0]}); name a new or an empty folder")


@dataclass(frozen=True)
class OutputFolderState:
    """The state of the output folder before a call: the folder that it `made`, or the content of infer.toml `there`."""

    out: Path
    made: Made | None
    there: bytes | None

    @contextmanager
    def restored_if_refused(self) -> Iterator[None]:
        """Restore the earlier state if the ranks refuse the user's input before they compute."""
        try:
            yield
        except HpcdlError as error:
            # By its code: the ranks' refusal comes as a RankError.
            if error.exit_code == UsageError.exit_code:
                self._restore()
            raise

    def _restore(self) -> None:
        if self.there is not None:
            write_bytes(self.out / ASKED_FILE, self.there)
        elif others_in(self.out, _UNCOMPUTED):
            return  # keep computed outputs
        elif self.made is not None:
            self.made.remove()
        else:
            remove_content(self.out, _UNCOMPUTED)


@contextmanager
def written(out: Path, *, resume: bool) -> Iterator[OutputFolderState]:
    """Make `out` if it is missing, and lock it as its only writer."""
    try:
        made = next((folder for folder in make_folder(out) if folder.path == out), None)
    # A TargetError is an OSError with a message of its own.
    except TargetError:
        raise
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made: {error.strerror}; name another folder") from error
    with writing(out):
        # Again under the lock: another call may have written here since the first look.
        _check_content(out, resume=resume)
        there = read_bytes(out / ASKED_FILE) if (out / ASKED_FILE).exists() else None
        if (out / FOLDER).is_dir():
            with writing(out / FOLDER, PARTING_S):  # time for ranks whose starting process was killed to end
                pass
        forget_struck(out)
        yield OutputFolderState(out, made, there)


def ask(out: Path, resolved: ResolvedConfig[InferConfig], model: Path) -> None:
    """Write the request, for the ranks and for people."""
    facts = {"model": str(model.absolute())}
    write_toml(out / ASKED_FILE, {**as_toml_values(resolved.config), "facts": facts, "origins": resolved.origins})


def asked(out: Path) -> tuple[InferConfig, Path]:
    """Return what `ask` wrote. Raises CorruptError if it is damaged."""
    path = out / ASKED_FILE
    document = read_toml(path, CorruptError)
    facts, _ = document.pop("facts", {}), document.pop("origins", {})
    try:
        return load(InferConfig, [Layer(origin=str(path), values=document)]).config, Path(facts["model"])
    except ConfigError as error:
        raise CorruptError(f"{path} is damaged: {'; '.join(error.problems)}") from None
    except (KeyError, TypeError):
        raise CorruptError(f"{path} is damaged: it names no model; name another --out") from None


def check_same(out: Path, before: InferenceRecord | None, identity: dict[str, str]) -> None:
    """Raise ConfigError, with a line per difference, if `out` was begun with another model or other data."""
    if before is None or not before.identity:
        return
    problems = [
        f"--resume: {out} began with {name} {before.identity.get(name, 'unknown')}, now it is {value}; give what it "
        "began with, or another --out"
        for name, value in identity.items()
        if before.identity.get(name) != value
    ]
    if problems:
        raise ConfigError(problems)
