"""Sharding with ranks: rank 0 lists, plans and ends with the manifest; every rank writes its part."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hpcdl.core.errors import HpcdlError, StoppedEarly
from hpcdl.core.progress import progress
from hpcdl.core.protocols import Communicator
from hpcdl.core.records import from_json
from hpcdl.data.format.manifest import read_manifest
from hpcdl.data.write.job import WORK_NAME, Job, read_job
from hpcdl.data.write.request import ShardRequest
from hpcdl.data.write.shards import ShardResult
from hpcdl.data.write.writing import (
    OtherRankFailed,
    Results,
    ShardReport,
    complete,
    counter,
    finish,
    left,
    preparing,
    write_part,
)


def shard_with_ranks(
    request: ShardRequest, communicator: Communicator, planned: Callable[[Job], None], *, bar: bool
) -> ShardReport:
    """Make the data folder of a request; collective. Rank 0 raises what went wrong, the others OtherRankFailed."""
    started = time.monotonic()
    with ExitStack() as stack:
        job, done = _begin(request, communicator, planned, stack)
        if job is None:
            manifest, _ = read_manifest(request.target)
            return ShardReport(manifest=manifest, written=0, kept=len(manifest.shards()), seconds=0.0)
        todo = [task for task in job.tasks() if task not in done][communicator.rank :: communicator.size]
        total = left(job, todo)
        first = communicator.rank == 0
        results: Results = {}
        with progress("sharding (this rank's part)", total, enabled=bar and first) as shown:
            problem = None
            try:
                told = counter(shown, 0, started)
                results = write_part(request, job, todo, rank=communicator.rank, alone=False, told=told)
            except (HpcdlError, OSError, KeyboardInterrupt) as error:
                problem = error
        answers = communicator.allgather_json(_answer(problem, results))
        _raise_first(answers, communicator.rank)
        for answer in answers:
            for document in answer["results"]:
                result = from_json(ShardResult, document)
                done[result.split, result.number] = result
        if first:
            finish(request, job, done)
        communicator.barrier()
    manifest, _ = read_manifest(request.target)
    written = sum(len(answer["results"]) for answer in answers)
    return ShardReport(manifest=manifest, written=written, kept=len(done) - written, seconds=time.monotonic() - started)


def _begin(
    request: ShardRequest, communicator: Communicator, planned: Callable[[Job], None], stack: ExitStack
) -> tuple[Job | None, Results]:
    """The job and the shards already whole, on every rank; no job where all is done."""
    answer: dict[str, Any] = {"exit_code": 0, "message": "", "complete": False, "done": []}
    job: Job | None = None
    done: Results = {}
    problem: HpcdlError | None = None
    if communicator.rank == 0:
        try:
            if complete(request):
                answer["complete"] = True
            else:
                job, done = stack.enter_context(preparing(request))
                planned(job)
                answer["done"] = [dataclasses.asdict(result) for result in done.values()]
        except HpcdlError as error:
            problem = error
            answer["exit_code"] = error.exit_code
    answer = communicator.allgather_json(answer)[0]
    if problem is not None:
        raise problem
    if answer["exit_code"]:
        raise OtherRankFailed(answer["exit_code"])
    if answer["complete"]:
        return None, {}
    if job is None:
        job = read_job(request.target / WORK_NAME)
        found = [from_json(ShardResult, document) for document in answer["done"]]
        done = {(result.split, result.number): result for result in found}
    return job, done


def _answer(problem: BaseException | None, results: Results) -> dict[str, Any]:
    if problem is None:
        return {"exit_code": 0, "message": "", "results": [dataclasses.asdict(result) for result in results.values()]}
    if isinstance(problem, KeyboardInterrupt):
        problem = StoppedEarly("stopped; go on with the same command and --resume")
    return {"exit_code": getattr(problem, "exit_code", 1), "message": str(problem), "results": []}


def _raise_first(answers: list[dict[str, Any]], rank: int) -> None:
    """Rank 0 raises the first problem that any rank had; the others leave silently."""
    for number, answer in enumerate(answers):
        if answer["exit_code"]:
            if rank:
                raise OtherRankFailed(answer["exit_code"])
            error = HpcdlError(f"rank {number}: {answer['message']}")
            error.exit_code = answer["exit_code"]
            raise error
