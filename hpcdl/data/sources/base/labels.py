"""Labels and the names of their classes: checked, numbered, and asked about if they may be no classes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.sources.base.names import is_id, names_quantity
from hpcdl.data.sources.base.source import Array
from hpcdl.data.sources.base.splits import some

_MAPPED_SHOWN = 5
_PADDED = re.compile(r"-?0[0-9]+")
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
FEW_CLASSES = 50
_LEAST_SAMPLES = 4
"""The user is asked about more classes than FEW_CLASSES if they have fewer samples each than this."""
_QUANTITY = re.compile(
    r"[<>~]?[+-]?(?:[0-9.,]+ +[^\W\d_]{1,4}[\u00b2\u00b3]?"
    r"|[0-9]+[.,][0-9]+ ?(?:[^\W\d_]{1,4}|%)|[0-9]+(?:[:/-][0-9]+)+(?:[ T].*)?)"
)
"""5 kg, 0.5kg, 12:03, 2024-01-05, 20-29."""
_WIDE, _FEWEST_FILLED = 100, 10
"""The user is asked about class numbers in a range of _WIDE and more that is not filled to a tenth, and about as many
as _FEWEST_FILLED with gaps."""
_MISSING = frozenset(
    {"", "nan", "n/a", "#n/a", "<na>", "null", "?", "unlabeled", "unlabelled", "unsup", "unsupervised"}
)
_MISSING_AS_WRITTEN = frozenset({"NA", "None"})
"""Python's and R's words, case-sensitive; "none" is a usual name for a class."""
MOST_CLASSES = 1_000_000
CLASS_LISTS = (
    "class_names", "classes", "label_names", "target_names", "class_labels", "category_names", "categories",
    "list_classes",
)  # fmt: skip
"""Names of arrays that list the classes of integer labels."""


_LATIN, _AROUND, _LOST = 256, 20, "\ufffd"
_HIGH = "[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_MISREAD = re.compile(f"[ÂÃ]{_HIGH}|â{_HIGH}{{2}}|(?:[ÐÑ]{_HIGH}){{2,}}")
"""Bytes of UTF-8 as Windows' encoding or Latin-1 shows them: of Western letters, of quotes, and of Cyrillic letters."""


def numbered(labels: Array) -> tuple[list[str], list[str]]:
    """Return the class names of labels `labels` (sorted), and a remark if labels are renumbered.

    Labels that begin with 0 keep their numbers, even if a few are missing.
    """
    if not len(labels) or labels[0] == 0:
        return class_numbers(int(labels[-1]) + 1 if len(labels) else 0), []
    pairs = ", ".join(f"{value} -> {number}" for number, value in enumerate(labels[:_MAPPED_SHOWN].tolist()))
    more = ", ..." if len(labels) > _MAPPED_SHOWN else ""
    remarks = f"labels are renumbered: {pairs}{more}; the old ones are the classes' names"
    return [str(value) for value in labels.tolist()], [remarks]


def named_labels(labels: Array, called: Mapping[int, str]) -> tuple[list[str], list[str]]:
    """Return the class names of labels (sorted) by the source's names of them, and a remark if they are renumbered."""
    wanted = labels.tolist()
    if set(wanted) <= set(called) and not set(range(max(wanted) + 1)) <= set(called):
        return [called[number] for number in wanted], [""]  # has gaps: numbers between are no classes
    names, remarks = numbered(labels)
    return [called.get(int(number), number) for number in names], remarks


def names_remark(name: str, names: Sequence[str]) -> str:
    """Return the remark for the user that classes have names from the source."""
    return f"{name}: classes are called as in the source: {some(names)}"


def spellings(labels: Iterable[str], target_kind: str, where: str) -> dict[int, str] | None:
    """Return the spelling of integers with leading zeros (codes such as 0412), by number.

    Returns None if two labels are one number and the user declared each a class; without that, raises SourceError.
    """
    spelled: dict[int, str] = {}
    for label in sorted(labels):
        earlier = spelled.setdefault(int(label), label)
        # +1 beside 1 is no code, but one number with its sign.
        if earlier != label and "+" not in earlier + label:
            if target_kind == "class":
                return None
            raise SourceError(
                f"{where}: the labels {shown(earlier)} and {shown(label)} are one number, written in two ways: one "
                "class or two? Write them alike, or give --target-kind class to keep both"
            )
    return {number: label for number, label in spelled.items() if _PADDED.fullmatch(label)}


def words_among_numbers(values: Iterable[str]) -> list[str]:
    """Return the words among different values most of which are numbers; none if words are over a third."""
    different = sorted(set(values))
    words = [value for value in different if not NUMBER.fullmatch(value.strip())]
    return words if 3 * len(words) <= len(different) else []


def missing_among(names: Iterable[str]) -> list[str]:
    """Return the names that usually stand for a missing value."""
    return [name for name in names if name.strip().lower() in _MISSING or name.strip() in _MISSING_AS_WRITTEN]


def misread(texts: Iterable[str]) -> str:
    """Return the remark that texts were read in another encoding than UTF-8, or lost letters; empty if none was."""
    for text in texts:
        if _LOST in text:
            odd = _excerpt(text, text.index(_LOST))
            return f"{odd} has lost a letter: was it read in another encoding than its own? Write it again as UTF-8"
        for run in _MISREAD.finditer(text):
            with suppress(UnicodeError):
                letters = b"".join(_byte_of(letter) for letter in run[0]).decode()
                return (
                    f"{_excerpt(text, run.start())} seems to be text read in another encoding than UTF-8 "
                    f"({shown(run[0])} for {shown(letters)}): write it again as UTF-8"
                )
    return ""


def _byte_of(letter: str) -> bytes:
    """Return the byte of a letter in Windows' encoding, which has a few fewer than Latin-1."""
    return letter.encode("latin-1" if ord(letter) < _LATIN else "cp1252")


def _excerpt(text: str, at: int) -> str:
    first = text.rfind(" ", 0, at) + 1
    return shown(text[max(first, at - _AROUND) :].split(maxsplit=1)[0][: 2 * _AROUND])


def question_of_words(names: Sequence[str]) -> str:
    """Return the question about few words among classes that are numbers otherwise; empty if there are none."""
    words = words_among_numbers(names)
    if not words:
        return ""
    numbers = some(name for name in names if name not in words)
    return (
        f"{some(words)} among numbers ({numbers}): a class like them, or a number that is missing or mistyped? Correct "
        "it, take such samples out, or give --target-kind class: then each is a class"
    )


def question_of_quantities(names: Sequence[str]) -> str:
    """Return the question about classes that are all quantities with a unit, times, dates or ranges; else empty."""
    if not names or not all(map(_QUANTITY.fullmatch, names)):
        return ""
    return (
        f"{some(names)}: classes, or quantities, times or ranges? Write those as numbers, without units, or give "
        "--target-kind class: then each is a class"
    )


def name_classes(labels: Array, num_samples: int) -> bool:
    """Return whether labels are by default taken as class numbers rather than quantities or masks."""
    if labels.shape not in ((num_samples,), (num_samples, 1)) or labels.dtype.kind not in "iufb":
        return labels.shape[:1] != (num_samples,)  # an error later, not a field
    values = labels.reshape(-1)
    return values.dtype.kind != "f" or bool((np.isfinite(values) & (np.trunc(values) == values)).all())


def plausible(num_classes: int, num_samples: int) -> bool:
    """Return whether `num_classes` different labels can be classes without asking the user."""
    return num_classes <= FEW_CLASSES or num_classes * _LEAST_SAMPLES <= num_samples


def sparse(values: Iterable[int]) -> bool:
    """Return whether whole numbers are hardly those of classes: quantities, codes or marks.

    Such are few in a wide range (0, 1000, 4000), and many with gaps that do not begin with 0 or 1 (28, 30, 31...), or
    that lack over a third of the numbers between.
    """
    different = set(values)
    if not different:
        return False
    low, span = min(different), max(different) - min(different)
    missing = span + 1 - len(different)
    gaps = missing > 0 if low not in (0, 1) else 3 * missing > span + 1
    return (gaps and len(different) >= _FEWEST_FILLED) or span >= max(_WIDE, _FEWEST_FILLED * len(different))


def names_by_number(words: Sequence[str], labels: Array) -> dict[int, str]:
    """Return the class of each label by a list of all classes, from 0 on, or from 1 on; empty if that is unclear."""
    if not len(labels) or len(set(words)) != len(words):
        return {}
    low, high = int(labels.min()), int(labels.max())
    first = 0 if low == 0 and high < len(words) else 1 if low == 1 and high == len(words) else None
    return {} if first is None else dict(enumerate(words, first))


def ask_of_labels(name: str, labels: Array, target_kind: str, where: str) -> None:
    """Raise SourceError if image labels (N,) may be quantities or sample ids, and no --target-kind was given."""
    if target_kind == "class":
        return
    different = np.unique(labels)
    if is_id(name):
        why = "is named like a number of samples"
    elif not plausible(len(different), len(labels)):
        why = f"holds {len(different)} different whole numbers in {len(labels)} samples"
    elif len(different) > 2 and names_quantity(name):
        why = f"is named like a quantity, and holds whole numbers ({different[0]:g} to {different[-1]:g})"
    elif labels.dtype.kind in "iu" and sparse(different.tolist()):
        why = f"holds {len(different)} different whole numbers from {different[0]} to {different[-1]}"
    elif labels.dtype.kind == "f" and not np.array_equal(different, np.arange(len(different))):
        why = f"is {labels.dtype.name}, and holds whole numbers only ({different[0]:g} to {different[-1]:g})"
    else:
        return
    raise SourceError(
        f"{where} {why}: classes or quantities? Give --target-kind class or --target-kind regression, or name another "
        "array with --label-field"
    )


def class_numbers(count: int) -> list[str]:
    """Return the names of classes that have only numbers; SourceError if they are too many."""
    if count > MOST_CLASSES:
        raise SourceError(f"there is a label {count - 1}, and no data set has over {MOST_CLASSES} classes; correct it")
    return [str(number) for number in range(count)]


def checked_labels(labels: Array, num_samples: int, where: str) -> Array:
    """Return `labels` as (N,) integers; SourceError if they are not labels of `num_samples` samples."""
    flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1 or len(flat) != num_samples:
        remedy = ""
        if labels.ndim == 2 and labels.shape[0] == 1:
            remedy = (
                ": save them as labels.reshape(-1)"
                if labels.shape[1] == num_samples
                else ": give --sample-axis last if the last axis counts samples, as in MATLAB"
            )
        raise SourceError(
            f"{where}: labels have the shape {labels.shape}; one number for each of {num_samples} samples is "
            f"needed{remedy}"
        )
    if flat.dtype.kind not in "iufb":
        raise SourceError(f"{where}: labels are {flat.dtype}; whole numbers are needed")
    # Beyond 2^53 float64 has no odd numbers: labels may have been rounded already. NaN fails too.
    if flat.dtype.kind == "f" and not (np.abs(flat) < 2**53).all():
        raise SourceError(f"{where}: labels are {flat.dtype} and not all whole numbers")
    whole = flat.astype(np.int64)
    if not np.array_equal(whole, flat):
        raise SourceError(f"{where}: labels are {flat.dtype} and not all whole numbers")
    return whole
