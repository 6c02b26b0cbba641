"""Which arrays of a source are inputs and targets, and which splits their names mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import NO_TARGET, RESERVED, is_name
from hpcdl.data.sources.base.labels import CLASS_LISTS
from hpcdl.data.sources.base.names import is_id
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray
from hpcdl.data.sources.base.source import SourceSpec, knows
from hpcdl.data.sources.base.splits import AUTO, IGNORE, beside_split, left_out, names_division, some, split_in, typed

INPUT_NAMES = ("x", "images", "image", "data", "inputs", "input", "features", "samples", "text")
TARGET_NAMES = ("y", "labels", "label", "targets", "target", "classes", "class", "masks", "mask")
"""Usual names of arrays, the most usual first."""
_SURE_WEIGHTS = re.compile(r"(?:sample|instance|event|case|row)_?weights?")
_WEIGHTS = re.compile(rf"{_SURE_WEIGHTS.pattern}|weights")
_ERRORS = re.compile(r"err|errs|errors?|sigmas?|unc|uncertainty|uncertainties")
_PREDICTIONS = re.compile(r"(?:y_?)?(?:preds?|predicted|predictions?|hat)")
_TELLING = re.compile(
    rf"(?:\w+_)?(?:masks?|valid|padding|lengths?|lens?|missing)|\w+_(?:{_ERRORS.pattern})|sigmas?|errors?|uncertainty"
)
"""Names of arrays that say which values of the samples count, or how sure they are."""
_FEW_NUMBERED = 3
"""This many arrays whose paths differ only in numbers may be one array per sample."""


@dataclass(kw_only=True)
class ChosenArrays:
    """The chosen arrays: path by field name, inputs first."""

    inputs: dict[str, str] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)


def choose(arrays: Mapping[str, FoundArray], inputs: Sequence[str], targets: Sequence[str], where: str) -> ChosenArrays:
    """Choose the arrays of inputs and targets: as requested, else those with the usual names."""
    choices = ", ".join(f"{shown(path)} ({array.shown})" for path, array in list(arrays.items())[:20])
    untargeted = has_no_target(targets, arrays)
    chosen = ChosenArrays(
        inputs=_asked(inputs, arrays, where, choices),
        targets=_asked([] if untargeted else targets, arrays, where, choices),
    )
    if not (chosen.targets or untargeted):
        chosen_path = _usual(TARGET_NAMES, [path for path in arrays if path not in chosen.inputs.values()])
        if chosen_path is None:
            raise SourceError(
                _of_one_sample_each(arrays, where)
                or _of_pandas(arrays, where)
                or f"{where}: which array is the target? Give --target PATH=NAME, one of {choices}; or, for "
                f"hpcdl infer alone, --target {NO_TARGET}"
            )
        chosen.targets = {field_name(chosen_path): chosen_path}
    if not chosen.inputs:
        candidates = [path for path in arrays if path not in chosen.targets.values()]
        chosen_path = _usual(INPUT_NAMES, candidates) or (
            candidates[0] if len(candidates) == 1 and not is_id(candidates[0]) else None
        )
        if chosen_path is None:
            raise SourceError(f"{where}: which array is the input? Give --input PATH=NAME, of {choices}")
        chosen.inputs = {field_name(chosen_path): chosen_path}
    twice = set(chosen.inputs) & set(chosen.targets)
    if twice:
        raise SourceError(f"{where}: {sorted(twice)[0]!r} names an input and a target; give another name after the =")
    return chosen


def has_no_target(targets: Sequence[str], names: Iterable[str]) -> bool:
    """Return whether --target says that there is none, which no array or column of these `names` is called."""
    return [*targets] == [NO_TARGET] and NO_TARGET not in names


def remarks_on_unused(paths: Iterable[str], spec: SourceSpec, kind: str = "array") -> list[str]:
    """Return remarks on arrays that no field uses; SourceError if one seems to divide or weigh the samples.

    Whoever names the inputs has chosen, and gets remarks alone. `kind` is `array`, or `column`.
    """
    divided = {
        "array": "Divided arrays are called like x_train and x_test, or are in groups train, test",
        "column": "To divide them call it split, with the words train, val and test",
    }
    all_unused = list(paths)
    unused = [path for path in all_unused if not left_out(path, spec.leave_out)]
    for path in unused if spec.asks and not spec.inputs else ():
        name = path.rsplit("/", 1)[-1]
        if names_division(name):
            what = f"divide the samples? {divided[kind]}"
        elif _WEIGHTS.fullmatch(name.lower()):
            what = "hold weights of the samples? Training takes none: each sample counts the same"
        else:
            continue
        flags = (
            f"--leave-out {typed(path)}" if knows("leave_out", spec.format) else "--input and --target for the others"
        )
        raise SourceError(f"{spec.location}: does the {kind} {shown(path)} {what}. Give {flags} to leave it out")
    telling = [path for path in unused if _TELLING.fullmatch(path.rsplit("/", 1)[-1].lower())]
    remarks = [f"{kind}s not used: {some(all_unused)}"] if all_unused else []
    if telling:
        remarks.append(
            f"{some(telling)}: padding, missing values or errors? Training does not know of them, and takes all values "
            f"as they are; a model may take such {kind}s as inputs (--input for each)"
        )
    return remarks


def weighs(name: str, targets: Iterable[str]) -> str:
    """Return what a column seems to hold in place of a feature: weights of samples, predictions, or errors; or ""."""
    name, targets = name.lower(), list(targets)
    if _SURE_WEIGHTS.fullmatch(name):
        return "weights of the samples, which training does not take"
    if _PREDICTIONS.fullmatch(name) or any(_is_called(_PREDICTIONS, name, own.lower()) for own in targets):
        return "predictions of a model"
    target = next((own for own in targets if _is_error_of(name, own.lower())), None)
    return f"errors of the target {shown(target)}, which new samples do not have" if target else ""


def _is_called(words: re.Pattern[str], name: str, target: str) -> bool:
    """Return whether a column is named by a target and one of `words` (`y_pred`, `predicted_y`), in lower case."""
    rest = (name.removeprefix(f"{target}_"), name.removesuffix(f"_{target}"))
    return any(word != name and words.fullmatch(word) for word in rest)


def _is_error_of(name: str, target: str) -> bool:
    return name.removesuffix(f"_{target}") == "e" != name or _is_called(_ERRORS, name, target)


def _asked(flag_values: Sequence[str], arrays: Mapping[str, FoundArray], where: str, known: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for flag_value in flag_values:
        path, equals, name = flag_value.rpartition("=")
        path, name = (path, name) if equals else (flag_value, field_name(flag_value))
        path = path.strip("/").removesuffix(".npy")
        matches = [candidate for candidate in arrays if candidate == path] or [
            candidate for candidate in arrays if candidate.rsplit("/", 1)[-1] == path
        ]
        if len(matches) != 1:
            commas = r" (a comma within a name is typed as \,)" if any("," in candidate for candidate in arrays) else ""
            raise SourceError(f"{where} has no array {shown(path)}; it has {known}{commas}")
        if not is_name(name) or name in fields:
            raise SourceError(
                f"no field can be called {shown(name)}{' twice' if name in fields else ''}; write PATH=NAME with "
                f"letters, digits and _, and none of {', '.join(RESERVED)}"
            )
        fields[name] = matches[0]
    return fields


def _usual(names: Sequence[str], paths: Sequence[str]) -> str | None:
    """Return the path whose last part is the most usual name, if exactly one has it."""
    for name in names:
        fitting = [path for path in paths if path.rsplit("/", 1)[-1].lower() == name]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            return None
    return None


def field_name(path: str) -> str:
    """Return the name of the field whose array is at `path`."""
    name = re.sub(r"\W", "_", path.rsplit("/", 1)[-1].removesuffix(".npy"), flags=re.ASCII)[:64]
    name = name if name[:1].isalpha() or name[:1] == "_" else f"_{name}"[:64]
    # 64 characters are the most that a field's name may have.
    return f"{name[:58]}_field" if name in RESERVED else name


def _of_pandas(arrays: Mapping[str, FoundArray], where: str) -> str:
    """Say how to convert a file that pandas wrote, whose arrays are blocks of columns; empty for others."""
    names = {path.rsplit("/", 1)[-1] for path in arrays}
    if not ({"axis0", "block0_values"} <= names or {"index", "values_block_0"} <= names):
        return ""
    return f"{where} is a table of pandas, in blocks of columns; convert it: pandas.read_hdf(OLD).to_parquet(NEW)"


def _of_one_sample_each(arrays: Mapping[str, FoundArray], where: str) -> str:
    """Describe arrays, or groups of them, that exist once per sample (s0/x, s1/x, ...); empty for others."""
    alike: dict[str, list[str]] = {}
    for path in arrays:
        alike.setdefault(re.sub(r"[0-9]+", "#", path), []).append(path)
    kind, paths = max(alike.items(), key=lambda item: len(item[1]), default=("", []))
    if len(paths) < _FEW_NUMBERED or "#" not in kind:
        return ""
    return (
        f"{where} holds {len(paths)} arrays that only a number distinguishes ({some(paths)}): one for each sample? "
        "Arrays are read that have their samples along one axis: give a reader of your own (--reader FILE.py:NAME), or "
        "name them with --input PATH=NAME and --target PATH=NAME"
    )


def divided(
    parts: Sequence[ArrayGroup], spec: SourceSpec, flag_values: Sequence[str], remarks: list[str]
) -> list[ArrayGroup]:
    """Divide `parts` by the splits in the paths of their arrays: x_train beside x_test, groups train and test.

    Parts stay whole if the user names arrays by full paths. Raises SourceError if a split has two arrays of one name,
    or lacks an input or a target.
    """
    if len(parts) > 1 and spec.split_names != IGNORE:
        joined = _joined(parts)
        if len(joined) < len(parts):
            whose = "" if parts[0].split == UNSPLIT else " of a split"
            remarks.append(f"the files{whose} hold different arrays: they are taken together, row by row")
        return _named_alike(joined)
    if len(parts) != 1 or parts[0].split != UNSPLIT or spec.split_names == IGNORE:
        return list(parts)
    arrays = {path: own for path, own in parts[0].arrays.items() if not left_out(path, spec.leave_out)}
    whole = [ArrayGroup(split=UNSPLIT, arrays=arrays)]
    splits = {path: split for path in arrays if (split := path_split(path))}
    asked = [(flag_value.rpartition("=")[0] or flag_value).strip("/") for flag_value in flag_values]
    of_train = unnamed_train(arrays)
    if len({*splits.values()}) + bool(of_train) < 2 or (asked and all(path in arrays for path in asked)):
        return whole
    if of_train:
        remarks.append(remark_on_train(of_train))
        splits |= dict.fromkeys(of_train, "train")
    made: dict[str, dict[str, FoundArray]] = {}
    for path, split in splits.items():
        own, name = made.setdefault(split, {}), without_split(path)
        if name in own:
            twins = [other for other in splits if splits[other] == split and without_split(other) == name]
            raise SourceError(
                f"{spec.location}: {some(twins)} are both the {name} of {split}; give --leave-out {typed(path)}, or "
                "another"
            )
        own[name] = arrays[path]
    unsplit = [path for path in arrays if path not in splits]
    if any(len(own) < 2 for own in made.values()) and unsplit and spec.split_names == AUTO:
        raise SourceError(
            f"{spec.location}: {some(splits)} are called by splits, {some(unsplit)} are not: give --input PATH=NAME "
            "and --target PATH=NAME by whole paths to take these undivided, or --split-names keep for the others alone"
        )
    # A list of classes holds for all splits.
    unused = [path for path in unsplit if path.lower() not in CLASS_LISTS]
    remarks += [f"arrays of no split, not used: {some(unused)}"] if unused else []
    return [ArrayGroup(split=split, arrays=made[split]) for split in ("train", "val", "test") if split in made]


def unnamed_train(paths: Iterable[str]) -> list[str]:
    """Return the arrays called by no split that are train's: X and y beside X_test and y_test, without X_train."""
    split_of = {path: path_split(path) for path in paths}
    if "train" in split_of.values():
        return []
    unsplit = {path for path, split in split_of.items() if split is None}
    shared: dict[str, set[str]] = {}
    for path, split in split_of.items():
        if split and (name := without_split(path)) in unsplit:
            shared.setdefault(split, set()).add(name)
    return sorted(set().union(*shared.values())) if any(len(own) > 1 for own in shared.values()) else []


def remark_on_train(names: Iterable[str]) -> str:
    """Return the remark that arrays called by no split are train's."""
    return f"{some(names)} are called by no split, and taken as train beside val or test"


def _joined(parts: Sequence[ArrayGroup]) -> list[ArrayGroup]:
    """Return one part for each split whose files hold different arrays, such as train_x.h5 beside train_y.h5.

    Without splits each file must hold one array alone: else a file may have another case of names (x, X).
    """
    arrays: dict[str, dict[str, FoundArray]] = {}
    for part in parts:
        arrays.setdefault(part.split, {}).update(part.arrays)
    alone = all(len(part.arrays) == 1 for part in parts) and len({*map(str.lower, arrays.get(UNSPLIT, ()))}) == len(
        parts
    )
    if (UNSPLIT in arrays and not alone) or sum(map(len, arrays.values())) < sum(len(part.arrays) for part in parts):
        return list(parts)
    return [ArrayGroup(split=split, arrays=own) for split, own in arrays.items()]


def _named_alike(parts: Sequence[ArrayGroup]) -> list[ArrayGroup]:
    """Return the parts with names for their arrays that lack the part's split: train_set_x in train.h5 is x."""
    if len({frozenset(part.arrays) for part in parts}) < 2:
        return list(parts)
    made = [
        ArrayGroup(
            split=part.split,
            arrays={
                without_split(path) if path_split(path) == part.split else path: own
                for path, own in part.arrays.items()
            },
        )
        for part in parts
    ]
    same = all(len(new.arrays) == len(old.arrays) for new, old in zip(made, parts, strict=True))
    return made if same else list(parts)


def path_split(path: str) -> str | None:
    """Return the split in the parts of an array's path; the last parts take precedence."""
    return next((split for part in reversed(path.split("/")) if (split := split_in(part))), None)


def without_split(path: str) -> str:
    """Return a path without the word that names the split."""
    parts = [_part_without_split(part) for part in path.split("/")]
    return "/".join(part for part in parts if part) or path


def _part_without_split(part: str) -> str:
    if split_in(part) is None:
        return part
    kept = [beside_split(piece) for piece in re.split(r"([_.-]+)", part)]
    if any(re.match(r"[^_.-]", piece) and piece.lower() != "set" for piece in kept):
        kept = [piece for piece in kept if piece.lower() != "set"]  # train_set_x
    return re.sub(r"[_.-]+", lambda match: match[0][0], "".join(kept)).strip("_.-")
