"""Turn a valid file into a hostile one: by bytes, by words of a text, or by what its path refers to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

NUMBERS = (
    "0", "-0", "-1", "1", "0.5", "-0.0", "1e308", "-1e308", "1e-308", "1e999", "inf", "-inf", "nan", "NaN", "Infinity",
    "100000000", "1000000000", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "1" + "0" * 40, "9" * 5000, "0x" + "f" * 300, "00", "1_0", "٣", "",
)  # fmt: skip
DEEP = (
    "[" * 2000 + "]" * 2000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    "{a=" * 300 + "1" + "}" * 300,
    "[" * 100_000,
    ".".join("a" * 5000),
)
VALUES = (
    *NUMBERS, "null", "true", "false", "[]", "{}", "[[]]", "[1, 2]", '[""]', '[null, "x", 3]', '{"a": 1}', '{"": {}}',
    '""',
    '"\\u0000"', '"\\ud800"', '"\\u001b[2J"', '"../../etc/passwd"', '"/dev/zero"', '"' + "x" * 200_000 + '"',
    "1979-05-27T07:32:00Z", "07:32:00", '"""', "'''", "{{", *DEEP,
)  # fmt: skip
BYTES = (
    b"\0",
    b"\xff\xfe",
    b"\x80",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"\r",
    b"\n",
    b"\x85",
    b"\xef\xbb\xbf",
    b"\0" * 5000,
    b"\xff" * 5000,
)
_NUMBER = re.compile(rb"(?<![\w.])-?\d[\d.]*(?:[eE][+-]?\d+)?")
_STRING = re.compile(rb'"[^"\n]*"|\'[^\'\n]*\'')
_VALUE = re.compile(rb'(?<=[=:,])[ \t]*("[^"\n]*"|\'[^\'\n]*\'|\[[^\]\n]*\]|[^\s,\]}]+)')
_WORD = re.compile(rb"[A-Za-z_][\w-]+")


def flip(content: bytes, dice: random.Random) -> bytes:
    """Change some bytes."""
    changed = bytearray(content or b"\0")
    for _ in range(dice.choice((1, 1, 2, 8, 64))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def cut(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content) + 1)]


def leave_out(content: bytes, dice: random.Random) -> bytes:
    first, last = _span(content, dice)
    return content[:first] + content[last:]


def double(content: bytes, dice: random.Random) -> bytes:
    first, last = _span(content, dice)
    return content[:last] + content[first:last] * dice.choice((1, 2, 50)) + content[last:]


def insert(content: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(len(content) + 1)
    return content[:place] + dice.choice(BYTES) + content[place:]


def overwrite_count(content: bytes, dice: random.Random) -> bytes:
    """Replace 2, 4 or 8 bytes, as headers use for counts and lengths, by an extreme number; mostly near the start."""
    form = dice.choice(("<H", "<I", "<Q", ">H", ">I", ">Q"))
    size, most = struct.calcsize(form), 2 ** (8 * struct.calcsize(form))
    value = dice.choice((0, 1, most - 1, most // 2, most // 2 - 1, 10**8, 10**9, 10**5, 255, 256)) % most
    end = dice.choice((64, 512, len(content)))
    place = dice.randrange(max(1, min(end, len(content) - size + 1)))
    return content[:place] + struct.pack(form, value) + content[place + size :]


def _replacing(pattern: re.Pattern[bytes], choices: tuple[str, ...]) -> Mutation:
    def replace(content: bytes, dice: random.Random) -> bytes:
        places = [match.span(match.lastindex or 0) for match in pattern.finditer(content)]
        if not places:
            return insert(content, dice)
        first, last = dice.choice(places)
        return content[:first] + dice.choice(choices).encode("utf-8", "surrogatepass") + content[last:]

    return replace


def exchange_words(content: bytes, dice: random.Random) -> bytes:
    """Replace a word by another one of the file."""
    places = [match.span() for match in _WORD.finditer(content)]
    if len(places) < 2:
        return flip(content, dice)
    (first, last), (begin, end) = dice.choice(places), dice.choice(places)
    return content[:first] + content[begin:end] + content[last:]


def change_lines(content: bytes, dice: random.Random) -> bytes:
    """Remove, repeat or move a line."""
    lines = content.splitlines(keepends=True) or [b"\n"]
    line = lines.pop(dice.randrange(len(lines)))
    for _ in range(dice.choice((0, 1, 2, 300))):
        lines.insert(dice.randrange(len(lines) + 1), line)
    return b"".join(lines)


def change_document(content: bytes, dice: random.Random) -> bytes:
    """Change the type of a value in a JSON document, remove it, or rename it."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return flip(content, dice)
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        outer = waiting.pop()
        keys = list(outer) if isinstance(outer, dict) else range(len(outer)) if isinstance(outer, list) else []
        places += [(outer, key) for key in keys]
        waiting += [outer[key] for key in keys]
    if not places:
        return b"[]"
    outer, key = dice.choice(places)
    others = [None, True, -1, 0, 0.5, 2**63, 10**400, 1e308, [], {}, "", "x", "\0", "\ud800", [[]], [None], {"a": []}]
    if dice.random() < 0.2:
        del outer[key]
    elif dice.random() < 0.2:
        source, name = dice.choice(places)
        outer[key] = json.loads(json.dumps(source.get(name) if isinstance(source, dict) else source[:3]))
    else:
        outer[key] = dice.choice([*others, float("nan"), float("inf")])
    return json.dumps(document).encode()


TEXT: tuple[Mutation, ...] = (
    _replacing(_NUMBER, NUMBERS), _replacing(_NUMBER, NUMBERS), _replacing(_STRING, VALUES), _replacing(_VALUE, VALUES),
    _replacing(_WORD, (*VALUES, "nan", "x")), exchange_words, change_lines, flip, cut, leave_out, double, insert,
)  # fmt: skip
JSON: tuple[Mutation, ...] = (change_document, change_document, change_document, *TEXT)
BINARY: tuple[Mutation, ...] = (
    flip,
    flip,
    overwrite_count,
    overwrite_count,
    overwrite_count,
    cut,
    leave_out,
    double,
    insert,
)


def mutated(content: bytes, mutations: tuple[Mutation, ...], dice: random.Random) -> bytes:
    """Return `content` after one to three of `mutations`."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        content = dice.choice(mutations)(content, dice)
    return content


def _span(content: bytes, dice: random.Random) -> tuple[int, int]:
    first = dice.randrange(len(content) + 1)
    return first, min(len(content), first + dice.choice((1, 4, 32, 1024, len(content))))


def _socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "pipe": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
    "dangling link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "circle of links": lambda path: path.symlink_to(path),
    "folder": lambda path: path.mkdir(),
    "socket": _socket,
    "a tebibyte of zeros": _large,
}
"""What may exist in place of an expected file."""
