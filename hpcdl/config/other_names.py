"""Settings and options under the names that they have in other programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hpcdl.core.errors import suggestion

SAME = {
    "ranks": "np n nproc nprocs num-procs num-processes num-proc processes procs world-size num-ranks gpus num-gpus"
    " ngpus ntasks tasks nproc-per-node gpus-per-node workers num-workers",
    "ranks-per-node": "nproc-per-node procs-per-node processes-per-node tasks-per-node ntasks-per-node ppn"
    " gpus-per-node",
    "nodes": "nnodes num-nodes",
    "model": "network net arch architecture model-name backbone",
    "data": "dataset dataset-dir dataset-path data-dir data-path data-root input input-dir train-dir train-data",
    "run-dir": "output output-dir out outdir out-dir save-dir log-dir logdir checkpoint-dir ckpt-dir model-dir"
    " work-dir workdir run-name",
    "out": "output output-dir outdir out-dir save-dir",
    "batch-size": "batch batchsize bs minibatch minibatch-size train-batch-size per-device-batch-size local-batch-size",
    "epochs": "epoch num-epochs n-epochs max-epochs nb-epochs train-epochs",
    "steps": "iterations iters iter num-iterations max-iter max-iters max-steps num-steps train-steps",
    "learning-rate": "lr rate eta base-lr learningrate lrate",
    "optimizer": "opt optim solver",
    "weight-decay": "wd l2 decay",
    "schedule": "scheduler lr-schedule lr-scheduler lr-policy",
    "warmup-epochs": "warmup warm-up lr-warmup lr-warmup-epochs",
    "accumulate": "gradient-accumulation gradient-accumulation-steps grad-accum accumulation-steps accum-steps",
    "precision": "amp fp16 bf16 half mixed-precision dtype use-amp",
    "strategy": "algorithm algo backend distribution-strategy allreduce",
    "compress": "compression fp16-allreduce grad-compression",
    "init-weights": "weights pretrained pretrained-weights init",
    "resume": "resume-from restore load load-checkpoint continue",
    "checkpoint-every": "save-every save-freq save-interval checkpoint-interval checkpoint-freq",
    "seed": "random-seed rng-seed random-state",
    "time": "time-limit walltime max-time",
    "time-limit": "time walltime max-time",
    "workers": "jobs num-workers processes nproc threads",
    "format": "type source-format",
    "image-size": "size resize img-size input-size target-size",
    "split": "validation-split val-split test-split",
    "trials": "n-trials num-trials max-trials",
    "servers": "num-servers ps num-ps",
}
"""A setting or an option, and its names in PyTorch, Horovod, TensorFlow, mpiexec and Slurm."""
_MEANT: Mapping[str, Sequence[str]] = {
    word: [key for key, words in SAME.items() if word in words.split()]
    for words in SAME.values()
    for word in words.split()
}


def called_here(word: str, known: Collection[str]) -> list[str]:
    """Return those of `known` that other programs call `word`."""
    return [key for key in _MEANT.get(word.replace("_", "-").lower(), ()) if key in known]


def unknown_key(key: str, known: Collection[str]) -> str:
    """Return the message about a key of a file or of --set that no setting has."""
    here = called_here(key, known)
    return f"unknown key {key!r}{f'; here it is {here[0]}' if here else suggestion(key, known)}"
