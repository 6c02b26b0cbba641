"""The GPUs of this node: the driver's view of them, and whether TensorFlow can use them."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence

from hpcdl.core.errors import HpcdlError
from hpcdl.core.units import counted
from hpcdl.doctor.table import Finding, Subject, ok, warning
from hpcdl.node.accelerators import ask_tensorflow, devices_of_node, vendor_of_node

TIMEOUT_S = 60
FACTS = ("name", "driver_version", "memory.total", "ecc.errors.uncorrected.volatile.total")
SLOWED = ("hw_slowdown", "sw_thermal_slowdown")
"""Reasons for a reduced GPU clock that are worth a warning, by nvidia-smi's names."""
LEAVE_OUT = "leave this node out (--exclude), and tell the site's staff"
_CUDA, _ROCM, _NVIDIA, _AMD = "CUDA", "ROCm", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
INSTALL = {
    _CUDA: "pip install 'tensorflow[and-cuda]' into hpcdl's environment, or load the site's TensorFlow for GPUs",
    _ROCM: "load the site's TensorFlow for AMD's GPUs",
}
"""Remedies if TensorFlow computes on the CPUs, by the build that the GPUs need."""
_AMD_NAMES = ("Card Series", "Card series", "Card Model", "Card model")
"""Keys for a card's name in rocm-smi's output, which differ by version."""


def check_gpus(subject: Subject) -> list[Finding]:
    """Report the driver's and TensorFlow's view: a run on GPUs that TensorFlow does not see uses the CPUs."""
    number = devices_of_node(subject.devices)
    answers = _ask_driver(subject.environment)
    if not number and not answers:
        return [ok("this node has no GPU that its kernel knows of")]
    if not answers and (kinds := _amd_kinds(subject.environment)):
        text = f"{counted(len(kinds), 'GPU')}: {'; '.join(dict.fromkeys(kinds))}"
        return [ok(text), *_seen(subject, len(kinds))]
    if not answers:
        text = f"this node has {counted(number, 'GPU')}, but {_program(subject)} does not answer"
        return [warning(text, "ask the site's staff whether the driver is loaded"), *_seen(subject, number)]
    return [*_healthy(answers), *_links(len(answers), subject.environment), *_seen(subject, len(answers))]


def _ask_driver(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return facts of each GPU, by nvidia-smi's names; empty if it is missing or reports an error."""
    names = [*FACTS, *(f"clocks_event_reasons.{name}" for name in SLOWED)]
    return _query(names, environment) or _query(FACTS, environment)  # drivers before 535 do not know event reasons


def _query(names: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, str]]:
    lines = _answer(["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"], environment)
    rows = [[value.strip() for value in row.split(",")] for row in lines if row.strip()]
    return [dict(zip(names, row, strict=False)) for row in rows]


def _answer(line: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the lines that the driver's program prints; empty if it is missing or reports an error."""
    try:
        finished = subprocess.run(
            line, env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return finished.stdout.splitlines()


def _links(number: int, environment: Mapping[str, str]) -> list[Finding]:
    """Report the links between GPUs, by pair, in nvidia-smi's terms: NV4 is four NVLinks, PIX to SYS are PCIe paths."""
    rows = [line.split() for line in _answer(["nvidia-smi", "topo", "-m"], environment)] if number > 1 else []
    # The header begins with GPU0 as well, but has no X for the GPU itself.
    matrix = [row[1 : 1 + number] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    link_counts = Counter(link for index, row in enumerate(matrix) for link in row[index + 1 :])
    if len(matrix) != number or link_counts.total() != number * (number - 1) // 2:
        return []  # a driver with another output format
    return [
        ok(f"links between the GPUs: {', '.join(f'{pairs} x {link}' for link, pairs in link_counts.most_common())}")
    ]


def _program(subject: Subject) -> str:
    """Return the program that reports this node's GPUs, by the kernel module that provides them."""
    return "rocm-smi" if vendor_of_node(subject.devices) == _AMD else "nvidia-smi"


def _amd_cards(words: Sequence[str], environment: Mapping[str, str]) -> tuple[list[dict[str, str]], str]:
    """Return rocm-smi's facts of each card, in order, and the driver's version; empty if it does not answer."""
    try:
        answer = json.loads("".join(_answer(["rocm-smi", *words, "--json"], environment)))
        cards = sorted((int(name[4:]), facts) for name, facts in answer.items() if re.fullmatch(r"card\d+", name))
        return [facts for _, facts in cards], str(answer.get("system", {}).get("Driver version", "unknown"))
    except (ValueError, AttributeError):
        return [], ""


def _amd_kinds(environment: Mapping[str, str]) -> list[str]:
    """Return name, memory and driver of each AMD card."""
    cards, driver = _amd_cards(["--showproductname", "--showmeminfo", "vram", "--showdriverversion"], environment)
    kinds = []
    for facts in cards:
        name = next((facts[key] for key in _AMD_NAMES if facts.get(key)), "AMD GPU")
        memory = facts.get("VRAM Total Memory (B)", "")
        size = f"{int(memory) >> 20} MiB, " if memory.isdigit() else ""
        kinds.append(f"{name}, {size}driver {driver}")
    return kinds


def _healthy(answers: Sequence[Mapping[str, str]]) -> list[Finding]:
    kinds = dict.fromkeys(f"{gpu['name']}, {gpu['memory.total']}, driver {gpu['driver_version']}" for gpu in answers)
    findings = [ok(f"{counted(len(answers), 'GPU')}: {'; '.join(kinds)}")]
    for index, gpu in enumerate(answers):
        errors = gpu["ecc.errors.uncorrected.volatile.total"]
        if errors.isdigit() and int(errors):
            text = f"GPU {index} has had {counted(int(errors), 'memory error')} that ECC could not correct"
            findings.append(warning(text, LEAVE_OUT))
        slow = [name for name in SLOWED if gpu.get(f"clocks_event_reasons.{name}") == "Active"]
        if slow:
            text = f"GPU {index} runs at a lower clock: {', '.join(slow)}"
            findings.append(warning(text, "look at `nvidia-smi -q -d PERFORMANCE`; tell the site's staff"))
    return findings


def _seen(subject: Subject, number: int) -> list[Finding]:
    """Report how many GPUs TensorFlow sees, determined in a new process."""
    try:
        answer = ask_tensorflow(subject.environment)
    except HpcdlError as error:
        return [warning(str(error), "see `hpcdl doctor --only python`")]
    amd = _program(subject) == "rocm-smi"
    who, wanted, variable = f"TensorFlow {answer.version}", *((_ROCM, _AMD) if amd else (_CUDA, _NVIDIA))
    hidden = subject.environment.get(variable)
    if answer.seen:
        limits = f" ({variable}={hidden})" if hidden is not None else ""
        text = f"{who}, built for {answer.built_for}, sees {answer.seen} of {number}{limits}"
        if answer.seen < number and hidden is None:
            return [warning(text, LEAVE_OUT)]
        return [ok(text)]
    if not answer.built_for.startswith(wanted):
        return [warning(f"{who} is built without {wanted}: runs here compute on the CPUs", INSTALL[wanted])]
    if hidden is not None and hidden.strip() in ("", "-1"):
        return [ok(f"{variable}={hidden!r} hides all {number}: runs compute on the CPUs")]
    text = f"{who} needs {answer.built_for}, whose libraries it does not find: runs here compute on the CPUs"
    return [warning(text, INSTALL[wanted])]
