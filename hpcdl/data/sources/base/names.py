"""What the name of a column or an array says: an id, a class, a quantity, a group of samples, a time."""

from __future__ import annotations

import re

_GROUP = re.compile(
    r"(?:patient|subject|participant|person|user|speaker|animal|group|cluster|donor|writer|site|hospital|clinic|plate"
    r"|slide|scanner|household|litter|cage|herd)s?(?:id)?"
)
"""Names of what several samples belong to."""
_TIME = re.compile(r"(?:date|time|datetime|timestamp|year)s?")
_MEASURED = re.compile(
    r"ages?|prices?|costs?|scores?|ratings?|quality|counts?|energy|energies|mass|masses|weights?|heights?|lengths?"
    r"|temperatures?|pressures?|speeds?|velocity|velocities|distances?|durations?|salary|income|amounts?|quantity"
    r"|intensity|redshift|dose|doses|bmi|mpg|points"
)
"""Last words in names of quantities, which whole numbers may be too."""
_CODES = re.compile(
    r"codes?|zip|zipcode|post(?:al)?code|plz|fips|naics|type|kind|category|race|ethnicity|nationality|occupation|region"
    r"|country|county|district|species|genre|brand|colou?r"
)
"""Last words in names of codes, which may be whole numbers and are no quantities."""
_OF_IDS = ("id", "ids", "uid", "uuid", "idx", "index", "number", "nr", "key", "serial", "timestamp")
"""Last words in names of ids."""
_OF_ROWS = re.compile(r"row_?names?|(?:s|sr|sl|serial|row|record|obs|sample)_?(?:no|num)|row|rows|record")
"""Names of the numbers of rows; R calls them rownames."""


def is_id(name: str) -> bool:
    """Return whether a column or array is named like an id of samples, patients or events, and not like a class."""
    if names_class(name):
        return False
    parts = [part for part in re.split(r"[\W_]+", in_words(name)) if part]
    if _OF_ROWS.fullmatch("_".join(parts)):
        return True
    if re.fullmatch(r"unnamed: ?[0-9]+(?:\.[0-9]+)?", name.lower()):  # so pandas calls the index of a table read again
        return True
    parts = parts[:-1] if parts[-1:] in (["x"], ["y"]) else parts  # which pandas.merge adds
    return bool(parts) and parts[-1] in _OF_IDS


def names_class(name: str) -> bool:
    """Return whether a column or array is named like class numbers (`class_id`, `labelId`)."""
    return re.fullmatch(r"(?:class|label|category|target|species|type)_?ids?", in_words(name)) is not None


def names_quantity(name: str) -> bool:
    """Return whether a column or array is named like a quantity (`age`, `num_cells`, `wine quality`)."""
    words = re.split(r"[\W_]+", in_words(name))
    return _MEASURED.fullmatch(words[-1]) is not None or (words[0] in ("num", "n", "number") and len(words) > 1)


def names_code(name: str) -> bool:
    """Return whether a column is named like codes of categories (`zip_code`, `soil_type`)."""
    return _CODES.fullmatch(re.split(r"[\W_]+", in_words(name))[-1]) is not None


def names_group(name: str) -> bool:
    """Return whether a column or array is named like what several samples belong to (`patient`, `subject_id`)."""
    words = re.split(r"[\W_]+", in_words(name))
    kept = [word for word in words if word not in ("id", "ids", "number", "nr", "no")]
    return len(kept) == 1 and _GROUP.fullmatch(kept[0]) is not None


def names_time(name: str) -> bool:
    """Return whether a column or array is named like the time of a sample."""
    return _TIME.fullmatch(name.rsplit("/", 1)[-1].lower()) is not None


def in_words(name: str) -> str:
    """Return the last part of a path in lower case, with an underscore between words (`labelId`: `label_id`)."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rsplit("/", 1)[-1]).lower()
