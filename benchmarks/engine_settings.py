"""Steps with one setting of TensorFlow's engine, beside steps with the settings of hpcdl's ranks.

    python -m benchmarks.engine_settings SETTING [SETTING...] [--networks lenet,resnet50] [--pairs 4] [--cores 1]

A SETTING is an environment variable (TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE=1 is TensorFlow's own default), or one of
Grappler's passes, which is turned off (remapping, layout_optimizer, arithmetic_optimization, constant_folding,
dependency_optimization; disable_meta_optimizer=1 for all). Each step is complete, of batch 8, without an exchange.
Processes with and without the setting take turns; medians of the ratios within a pair, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.fast_kernels import engine_on
from benchmarks.step_profile import step_of

SECONDS = 8.0
"""Seconds of measured steps in a process."""


def main() -> None:
    """Print a row for each network and setting, or run as one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=["TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE=1"])
    parser.add_argument("--networks", default="lenet,cifar10-quick,unet,alexnet,googlenet,hepcnn,resnet50")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options)))
        return
    for network in options.networks.split(","):
        for setting in options.settings:
            pairs = [pair(options, network, setting, turned=bool(number % 2)) for number in range(options.pairs)]
            ratios = sorted(changed / plain for plain, changed in pairs)
            plain, changed = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
            print(
                f"{network:14s} {setting:40s} {plain:9.2f} ms, with it {changed:9.2f} ms of processor time, ratio"
                f" {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                flush=True,
            )


def pair(options: argparse.Namespace, network: str, setting: str, *, turned: bool) -> tuple[float, float]:
    """Return a step's processor seconds without and with the setting; if `turned`, the second is measured first."""
    found = {}
    for changed in (True, False) if turned else (False, True):
        name, _, value = setting.partition("=")
        is_variable = name.isupper()
        words = [setting] if changed and not is_variable else []
        line = [sys.executable, "-m", "benchmarks.engine_settings", *words, "--one", "--networks", network]
        line += ["--seconds", str(options.seconds), "--cores", str(options.cores)]
        environment = {**os.environ, name: value} if changed and is_variable else None
        told = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[changed] = float(json.loads(told.splitlines()[-1]))
    return found[False], found[True]


def measured(options: argparse.Namespace) -> float:
    """Return the processor seconds of one step, the median of many."""
    engine_on(options.cores)
    import tensorflow as tf

    for setting in options.settings:
        name, _, value = setting.partition("=")
        if not name.isupper():
            tf.config.optimizer.set_experimental_options({name: value == "1"})
    step = step_of(options.networks, 8, fast=True)
    for _ in range(3):
        step()
    times, end = [], time.monotonic() + options.seconds
    while time.monotonic() < end or len(times) < 3:
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
