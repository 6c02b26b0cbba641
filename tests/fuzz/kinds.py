"""Every kind of input that hpcdl did not just write itself: how to make a valid example, and what reads it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.bench.certify import FAULTS, Plan, Trial, read_card, rows_of, summary, write_card
from hpcdl.checkpoint import folders as checkpoints
from hpcdl.cluster import status
from hpcdl.cluster.batch import jobs
from hpcdl.cluster.launchers.hostfile import read_hosts
from hpcdl.collectives import auto
from hpcdl.comm.clocks import ClockPoint
from hpcdl.comm.observed import PARTS
from hpcdl.comm.threads import alone
from hpcdl.config.load import Layer, file_layer, load, site_rules, standard_layers
from hpcdl.config.schema import TrainConfig
from hpcdl.config.search import load_search
from hpcdl.config.study import load_study
from hpcdl.core.records.from_json import read_as
from hpcdl.core.records.run_record import FILE_NAME as RECORD
from hpcdl.core.storage.files import write_json
from hpcdl.core.storage.lock import check_free
from hpcdl.data.format import manifest
from hpcdl.data.show.inspection import inspect, require_sound, verify
from hpcdl.data.sources.layouts.records import example_class, masked_crc
from hpcdl.data.write import journal
from hpcdl.data.write.plan import read_job
from hpcdl.data.write.shards import ShardResult
from hpcdl.doctor.installation import check_module
from hpcdl.doctor.table import Subject
from hpcdl.launch.traced import look_into
from hpcdl.models.table import check_model_spec
from hpcdl.node import hwloc
from hpcdl.node.engine import Engine
from hpcdl.node.machines import read_machine
from hpcdl.node.profile import Profile, Settings, TrialSummary, find_profile, read_profile, write_profile
from hpcdl.node.topology import draw
from hpcdl.predict.network import read_network
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.compose.build import compose, render
from hpcdl.report.runs.imported import read_csv
from hpcdl.report.runs.published import load_references
from hpcdl.report.runs.searches import SearchRecord, SearchTrial, find_searches, read_search
from hpcdl.report.runs.sources import Gathered, gather, link_of, walk
from hpcdl.run import rundir
from hpcdl.run.journal import JournalReader
from hpcdl.run.plan import prepare
from hpcdl.study import state
from hpcdl.study.jobs import SCHEMA as JOBS_SCHEMA
from hpcdl.study.jobs import JobsState
from hpcdl.study.plan import make_plan
from hpcdl.study.search import check_search, open_search
from hpcdl.trace.file import TraceFile
from hpcdl.trace.page import page, tables
from hpcdl.tuning.findings import find_tunings, read_tuning
from hpcdl.tuning.log import TrialLog
from hpcdl.tuning.replay import read_table, replay
from hpcdl.tuning.space import build_space, read_space
from hpcdl.tuning.trials import TrialOutcome
from tests.conftest import ROOT
from tests.data.sharding import cifar_folder, idx_folder, image_folder, make, numbers, pixels, report, request
from tests.fuzz.mutations import BINARY, JSON, TEXT, Mutation

SHARE = ROOT / "share" / "hpcdl"
EXAMPLE = ROOT / "tests" / "studies" / "five-hosts"
ENGINE = Engine(
    package="tensorflow", version="2.21.0", threading="own pool", isa_caps=("default",), allocators=("default",)
)


def _as_is(content: bytes) -> bytes:
    return content


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of input. `make` writes a valid example into a folder and returns the file that `read` reads.

    That file is the one to damage. `opened` extracts its content from checksums or compression, `sealed` puts it back.
    `codes` are the exit codes of a refusal: 2 for a user's file, 3 for hpcdl's own, both if it may be either.
    If `continues`, the reader also appends to the file.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    mutations: tuple[Mutation, ...]
    opened: Callable[[bytes], bytes] = _as_is
    sealed: Callable[[bytes], bytes] = _as_is
    codes: tuple[int, ...] = (2, 3)
    needs_keras: bool = False
    continues: bool = False


def copy_of(source: Path, name: str = "") -> Callable[[Path], Path]:
    def make_copy(folder: Path) -> Path:
        return Path(shutil.copyfile(source, folder / (name or source.name)))

    return make_copy


def text_of(name: str, text: str) -> Callable[[Path], Path]:
    def make_text(folder: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        return folder / name

    return make_text


# Settings

CONFIG = """model = "lenet"
data = "synthetic:mnist@6000"
strategy = "easgd"
ranks = 4
servers = 1
batch-size = 32
learning-rate = 0.05
bucket-size = "25MiB"
time-limit = "1h30m"
epochs = 2
checkpoint-every = 600.5
deterministic = true
warmup-epochs = 0.5
schedule = "step"
stage = "/tmp/a b"
"""
SITE = """[site]
forbid-strategies = ["grpc-ps", "grpc-ring"]

[train]
model = "lenet"
data = "synthetic:mnist"
batch-size = 64
profile = "none"
"""


def read_config(path: Path) -> object:
    return prepare(load(TrainConfig, [file_layer(path)]))


def read_site(path: Path) -> object:
    os.environ["HPCDL_SITE_CONFIG"] = str(path)
    return site_rules(), load(TrainConfig, standard_layers("train"))


def read_study(path: Path) -> object:
    return make_plan(load_study(path, {}, []))


def make_run(folder: Path) -> Path:
    resolved = load(
        TrainConfig, [Layer(origin="test", values={"model": "lenet", "data": "synthetic:mnist", "ranks": 2})]
    )
    rundir.create(folder / "run", resolved, {"nodes": 1, "hosts": ["a", "b"], "place": {"0": [0, 1]}})
    return folder / "run" / rundir.CONFIG_FILE


def read_run(path: Path) -> object:
    return rundir.read(path.parent), rundir.resume_layer(path.parent)


# Runs and reports


def make_records(folder: Path) -> Path:
    for place in ("1-node/runs/001-ring-1w-64b-r1", "2-nodes/runs/002-ring-2w-64b-r1", "2-nodes/runs/004-ps-1w-64b-r1"):
        (folder / "runs" / Path(place).name).mkdir(parents=True)
        shutil.copyfile(EXAMPLE / place / RECORD, folder / "runs" / Path(place).name / RECORD)
    return folder / "runs" / "002-ring-2w-64b-r1" / RECORD


def told(gathered: Gathered, folder: Path) -> object:
    study = analyse(gathered, references=load_references())
    return render(compose(study), folder / "report", ["json", "csv", "terminal"])


def read_records(path: Path) -> object:
    return told(gather([path.parents[1]]), path.parents[1])


def read_imported(path: Path) -> object:
    return told(read_csv(path), path.parent)


IMPORTED = """\
strategy,model,nodes,ranks,workers,servers,batch_per_rank,images_per_second,step_seconds,mode,repeat,compute_seconds
ring,lenet,1,1,1,0,32,100.5,0.3184,weak,1,0.3
ring,lenet,2,2,2,0,32,190.25,0.3364,weak,1,0.3
ring,lenet,4,4,4,0,32,360,0.3556,weak,1,0.3
ps,lenet,2,3,2,1,32,150,,weak,1,
ps,lenet,4,6,4,2,32,290,,weak,2,
"""


def read_journal(path: Path) -> object:
    away = path.with_name("away")
    if not path.is_symlink() and not path.exists():
        return JournalReader(path.parent).read()
    path.rename(away)
    reader = JournalReader(path.parent)
    away.rename(path)
    job = jobs.Job(number="1", system="slurm", name="", folder="", command=(), nodes=1, ranks=1)
    return reader.read(), jobs._last_events(path.parent, job)


def make_checkpoint(folder: Path) -> Path:
    writer = checkpoints.CheckpointWriter(folder, alone(), 3)
    for step in (5, 7):
        arrays = {"weights/0": np.full((3, 4), step, np.float32)}
        writer.start(checkpoints.Snapshot(step=step, shared=arrays, own=arrays, facts={"ranks": 2, "list": [1.5]}))
    writer.wait()
    return folder / "checkpoints" / "step-0000000007"


def read_checkpoint(path: Path) -> object:
    run_dir = path.parents[2]
    step = checkpoints.newest_valid(run_dir, [])
    return None if step is None else (checkpoints.read_shared(run_dir, step), checkpoints.read_own(run_dir, step, 0))


# Data folders


def make_data(folder: Path) -> Path:
    make("synthetic:8x8x1:3", folder / "data", samples=40, shards=2)
    return folder / "data"


def make_packed(folder: Path) -> Path:
    make("synthetic:8x8x1:3", folder / "data", samples=40, shards=1, compression="gzip")
    return folder / "data" / "shard-00000.h5"


def read_data(folder: Path) -> object:
    found = inspect(folder)
    require_sound(folder, verify(folder))
    return found


def resealed(content: bytes) -> bytes:
    """Return a manifest whose checksum is right again."""
    try:
        document = json.loads(content)
        document["checksum"] = manifest.checksum_of(document)
        return json.dumps(document).encode()
    except (ValueError, TypeError, RecursionError):
        return content


def make_partial(folder: Path) -> Path:
    entries = journal.PartialManifest(folder, 0, "identity", "source")
    for number in range(3):
        entry = manifest.ShardEntry(file="shard-00000.h5", num_samples=4, num_bytes=10, frame_checksum="abc")
        entries.enter(ShardResult(split="all", number=number, entry=entry, skipped=["a", "b"]))
    entries.close()
    return folder / "manifest.partial.00000"


def make_job_file(folder: Path) -> Path:
    from hpcdl.data.write.listing import make_job

    (folder / "work").mkdir()
    make_job(request("synthetic:8x8x1:3", folder / "target", samples=40), folder / "work")
    return folder / "work" / "job.json"


# Sources of data


def sharded(path: Path, **options: Any) -> object:
    return report(path, path.parent / "out of it", **options)


def as_source(path: Path) -> object:
    return sharded(path)


def folder_as_source(path: Path) -> object:
    return report(path.parent, path.parent.with_name("out of it"))


def class_folder_as_source(path: Path) -> object:
    return report(path.parents[1], path.parents[1].with_name("out of it"), image_size="8")


def make_image(ending: str) -> Callable[[Path], Path]:
    def make_images(folder: Path) -> Path:
        image_folder(folder / "s", {"a": 2, "b": 1}, size=12, kind=ending)
        return folder / "s" / "a" / f"0001.{ending}"

    return make_images


def make_list(folder: Path) -> Path:
    image_folder(folder / "s", {"a": 3, "b": 3}, size=8)
    with (folder / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "label", "split"])
        for number, split in enumerate(("train", "train", "val")):
            rows.writerows([[f"s/a/{number:04d}.png", 0, split], [f"s/b/{number:04d}.png", 1, split]])
    return folder / "list.csv"


def make_arrays(name: str) -> Callable[[Path], Path]:
    def make_file(folder: Path) -> Path:
        save = np.savez_compressed if "packed" in name else np.savez
        save(folder / name, images=pixels(15, (8, 8, 3)), labels=numbers(15, 4))
        return folder / name

    return make_file


def make_npy(damaged: str) -> Callable[[Path], Path]:
    def make_files(folder: Path) -> Path:
        (folder / "s").mkdir()
        np.save(folder / "s" / "images.npy", pixels(15, (8, 8)))
        np.save(folder / "s" / "labels.npy", numbers(15, 4).astype(np.int32))
        return folder / "s" / damaged

    return make_files


def make_hdf5(**options: Any) -> Callable[[Path], Path]:
    def make_file(folder: Path) -> Path:
        with h5py.File(folder / "events.h5", "w") as file:
            file.create_dataset("all/images", data=pixels(15, (3, 8, 8)), **options)
            file["all/y"] = numbers(15, 2).astype(np.float32)
        return folder / "events.h5"

    return make_file


def make_idx(name: str, *, packed: bool = False) -> Callable[[Path], Path]:
    return lambda folder: idx_folder(folder / "s", packed=packed)[0] / name


def make_cifar(name: str, *, pickled: bool, hundred: bool) -> Callable[[Path], Path]:
    return lambda folder: cifar_folder(folder / "s", pickled=pickled, hundred=hundred)[0] / name


def example_bytes(label: int) -> bytes:
    example = example_class()()
    fields = example.features.feature
    fields["image_raw"].bytes_list.value.append(bytes(range(48)))
    for field, value in (("label", label), ("height", 4), ("width", 4), ("depth", 3)):
        fields[field].int64_list.value.append(value)
    return bytes(example.SerializeToString(deterministic=True))


def framed(content: bytes) -> bytes:
    """Return `content` as one TFRecord with right checksums, between two valid ones."""

    def record(inner: bytes) -> bytes:
        head = struct.pack("<Q", len(inner))
        return head + struct.pack("<I", masked_crc(head)) + inner + struct.pack("<I", masked_crc(inner))

    return record(example_bytes(0)) + record(content) + record(example_bytes(1))


def make_records_file(folder: Path) -> Path:
    (folder / "s.tfrecord").write_bytes(framed(example_bytes(2)))
    return folder / "s.tfrecord"


def zipped(content: bytes) -> bytes:
    """Return `content` as the compressed images of an .npz."""
    made, labels = io.BytesIO(), io.BytesIO()
    np.save(labels, numbers(15, 4))
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", content)
        archive.writestr("labels.npy", labels.getvalue())
    return made.getvalue()


def unzipped(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("images.npy")


# Nodes and tuning


def make_profile(folder: Path) -> Path:
    trials = [
        TrialSummary(settings={"ranks_per_node": ranks, "intra_op_threads": 8 // ranks}, status="ok", n=3,
                     images_per_second=100.0 / ranks, ci95=2.5, memory_bytes_per_rank=10**9)
        for ranks in (1, 2, 4)
    ]  # fmt: skip
    profile = Profile(
        settings=Settings(ranks_per_node=2, intra_op_threads=4), machine="m", processor="p", fingerprint="f",
        model="lenet", batch_size=32, num_cores=8, images_per_second=50.0, ci95=1.0, n=3,
        software={"tensorflow": "2.16"}, trials=trials,
        picture=["+--+"], created_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    write_profile(profile, folder / "profile.toml")
    return folder / "profile.toml"


def node_profile(path: Path) -> object:
    topology = read_machine("generic").topology
    find_profile("auto", "lenet", topology, [path.parent])
    find_profile(str(path), "lenet", topology)
    return read_profile(path), tuned(path)


def tuned(path: Path) -> object:
    tunings = [read_tuning(place) for place in find_tunings(path, walk(path))]
    if not tunings:
        return None
    study = analyse(Gathered(runs=()), tunings=tunings)
    return render(compose(study), path.parent / "report", ["json", "csv", "terminal"])


def make_trials(folder: Path) -> Path:
    header = {"fingerprint": "f", "engine": "e", "workload": {"model": "lenet", "batch_size": 32}}
    log = TrialLog(folder / "x.trials.jsonl", header, resume=False)
    for number in range(6):
        outcome = TrialOutcome(status="ok", seconds=1.5, images_per_second=100.0 + number)
        log.add({"ranks_per_node": 1 + number % 2, "intra_op_threads": 4}, outcome)
    return log.path


REPLAY = "ranks,threads,images_per_second\n" + "".join(
    f"{ranks},{threads},{100 + ranks * threads + sample}\n"
    for ranks in (1, 2, 4)
    for threads in (1, 2, 4, 8)
    for sample in (0, 1)
)
MEASURED = json.dumps(
    {
        "ranks": 2,
        "nodes": 2,
        "link": {"latency_s": 5e-5, "seconds_per_byte": 1e-9},
        "rows": [{"algorithm": "ring", "bytes": size, "seconds": 1e-3} for size in (1024, 2**20)],
    }
)
SPACE = """ranks-per-node = [1, 2]
intra-op-threads = [2, 4, 8]
binding = ["compact", "none"]
batch-size = 32
only = false
"""


def read_a_space(path: Path) -> object:
    return build_space(read_machine("generic").topology, ENGINE, narrowing=read_space(path))


def make_machine(folder: Path) -> Path:
    shutil.copyfile(SHARE / "machines" / "generic-2x16.xml", folder / "generic-2x16.xml")
    return Path(shutil.copyfile(SHARE / "machines" / "generic.toml", folder / "generic.toml"))


def read_topology(path: Path) -> object:
    topology = hwloc.read_file(path)
    return topology.summary, draw(topology), build_space(topology, ENGINE)


# What hpcdl keeps for itself


def make_timetable(folder: Path) -> Path:
    rows = [auto.Row(bytes=size, seconds={"ring": 0.5, "tree": 0.25}) for size in (1024, 2**20)]
    auto.save_table(folder / "t.json", auto.Timetable(library="m", ranks=2, nodes=1, rows=rows))
    return folder / "t.json"


def read_timetable(path: Path) -> object:
    table = auto.load_table(path)
    return None if table is None else [table.best(size) for size in (1, 10**6, 10**12)]


def make_study_state(folder: Path) -> Path:
    return Path(shutil.copyfile(EXAMPLE / "2-nodes" / "study.json", folder / "study.json"))


def read_study_state(path: Path) -> object:
    return state.read_state(path.parent) if path.exists() else None


def damaged_label(content: bytes, dice: random.Random) -> bytes:
    return str(dice.choice((0, 1, -1, 10**8, 10**9, 2**62, 2**63 - 1))).encode()


def make_status(folder: Path) -> Path:
    status.StatusReport(folder=folder, rank=3).publish("failed", exit_code=1, message="it broke")
    return folder / "3.json"


def make_table(folder: Path) -> Path:
    status.report_all(folder, "running", [("node1", 12), ("node1", 13), ("node2", 12)])
    return folder / status.TABLE


def make_submitted(folder: Path) -> Path:
    job = {"number": "12", "system": "slurm", "name": "n", "folder": "/f", "command": ["train"], "nodes": 1, "ranks": 2}
    (folder / "hpcdl" / "jobs").mkdir(parents=True)
    write_json(folder / "hpcdl" / "jobs" / "slurm-12.json", {**job, "run_dir": "", "submitted_at": 1.5})
    return folder / "hpcdl" / "jobs" / "slurm-12.json"


def make_search_record(folder: Path) -> Path:
    trials = [
        SearchTrial(number=number, state="finished", settings={"learning-rate": 0.1 * number, "optimizer": "sgd"},
                    values=(0.5 + number / 10,), ended_after_s=2.0 * number, seconds=1.5, node_hours=0.1)
        for number in range(1, 4)
    ]  # fmt: skip
    record = SearchRecord(
        name="s", origin="s.toml", sampler="tpe", objectives=["accuracy"], directions=["maximize"], planned=9, mark="m",
        trials=[*trials, SearchTrial(number=4, state="failed", message="it broke")], front=[3],
        commands=["hpcdl train"], importance={"learning-rate": 0.75, "optimizer": 0.25},
    )  # fmt: skip
    write_json(folder / "search.json", asdict(record))
    return folder / "search.json"


def read_search_record(path: Path) -> object:
    found = [read_search(place) for place in find_searches(path.parent, walk(path.parent))]
    study = analyse(Gathered(runs=()), searches=found)
    return render(compose(study), path.parent / "report", ["json", "csv", "terminal"])


def read_search_file(path: Path) -> object:
    search = load_search(path, {})
    return check_search(search), open_search(path.parent / "out", search, resume=False)


def make_proposals(folder: Path) -> Path:
    from hpcdl.study.proposals import FINISHED, JOURNAL, Proposals

    proposals = Proposals(folder, load_search(SHARE / "examples" / "search-digits.toml", {}))
    for number in range(3):
        proposals.ask()
        proposals.progress(number, 1, 0.25 * number)
        proposals.tell(number, FINISHED, (0.25 * number,))
    proposals.ask()
    return folder / JOURNAL


def read_proposals(path: Path) -> object:
    from hpcdl.study.proposals import Proposals

    proposals = Proposals(path.parent, load_search(SHARE / "examples" / "search-digits.toml", {}))
    return proposals.all(), proposals.front(), proposals.importance()


def make_trace(folder: Path) -> Path:
    (folder / "run" / "trace").mkdir(parents=True)
    facts = {"size": 2, "host": "node1", "role": "worker", "level": "full", "begin_s": 0.0, "wall_s": 0.0}
    for rank in range(2):
        file = TraceFile(folder / "run" / "trace" / f"rank-{rank}.trace", 1 << 20, {**facts, "rank": rank})
        for when in (0.0, 9.0):
            file.add_point(ClockPoint(parent=0, own_s=when + rank, parent_s=when, error_s=1e-6 * rank))
        for step in range(8):
            for number, part in enumerate(PARTS):
                begin = rank + step + number / len(PARTS)
                file.write(part, begin, begin + 1 / len(PARTS), 1 << 20, step, -1, -1)
            file.write("bucket", rank + step + 0.2, rank + step + 0.5, 1 << 20, step, 1 - rank, 0)
        content = b"".join(file.content())
        file.close()
        file.path.write_bytes(content)
    return folder / "run" / "trace" / "rank-1.trace"


def read_traces(path: Path) -> object:
    merged, steps, found = look_into(path.parents[1], lambda text: None)
    return found.as_json(), tables(found), page("run", merged, steps, found)


def make_model(folder: Path) -> Path:
    import keras

    make_run(folder)
    network = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    network.save(folder / "run" / "model.keras")
    return folder / "run" / "model.keras"


def read_model(path: Path) -> object:
    from hpcdl.rank.outputs import load_run

    return load_run(path.parent)


def config_of_model(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("config.json")


def with_config(content: bytes) -> bytes:
    """Return a saved model with this config and no weights."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("metadata.json", '{"keras_version": "3.15.1", "date_saved": "2026-01-01@00:00:00"}')
        archive.writestr("config.json", content)
        archive.writestr("model.weights.h5", b"")
    return made.getvalue()


def make_card(folder: Path) -> Path:
    plan = Plan(strategies=["ring"], faults=[*FAULTS], tries=1, num_ranks=3, out=folder, num_nodes=1)
    trial = Trial(
        fault="worker killed", strategy="ring", survived=True, struck=True, recover_s=2.0, steps_lost=1, said=""
    )
    write_card(plan, [trial])
    return folder / "card.json"


def read_a_card(path: Path) -> object:
    _, trials = read_card(path)
    return rows_of(summary(trials))


def make_jobs(folder: Path) -> Path:
    return Path(shutil.copyfile(EXAMPLE / "jobs.json", folder / "jobs.json"))


def make_receipt(folder: Path) -> Path:
    document = {"version": "1.0", "mpi": "mpich", "mpi_module": "openmpi/4", "packages": ["numpy==2.0"]}
    write_json(folder / "install.json", document)
    return folder / "install.json"


def read_receipt(path: Path) -> object:
    variables = {"HPCDL_ROOT": str(path.parent), "LOADEDMODULES": "openmpi/4"}
    return check_module(Subject(environment=variables))


def read_submitted(path: Path) -> object:
    os.environ["XDG_CACHE_HOME"] = str(path.parents[2])
    return jobs.known_jobs(), jobs.find_job("12") if path.is_file() and jobs.known_jobs() else None


KINDS: dict[str, Kind] = {
    "config": Kind(make=text_of("c.toml", CONFIG), read=read_config, mutations=TEXT, codes=(2,)),
    "site": Kind(make=text_of("site.toml", SITE), read=read_site, mutations=TEXT),
    "run.toml": Kind(make=make_run, read=read_run, mutations=TEXT),
    "study": Kind(make=copy_of(SHARE / "studies" / "sc17-methods.toml"), read=read_study, mutations=TEXT, codes=(2,)),
    "study state": Kind(make=make_study_state, read=read_study_state, mutations=JSON),
    "records": Kind(make=make_records, read=read_records, mutations=JSON),
    "journal of a run": Kind(
        make=lambda folder: copy_of(EXAMPLE / "1-node/runs/001-ring-1w-64b-r1/metrics.jsonl")(folder),
        read=read_journal, mutations=TEXT,
    ),
    "CSV import": Kind(make=text_of("i.csv", IMPORTED), read=read_imported, mutations=TEXT, codes=(2,)),
    "references": Kind(
        make=copy_of(SHARE / "references" / "cori.toml"), read=lambda path: load_references(path.parent), mutations=TEXT
    ),
    "link": Kind(
        make=text_of("l.json", '{"link": {"seconds_per_byte": 1e-9, "latency": 0.1}, "rows": [1, 2]}'),
        read=lambda path: link_of(str(path)), mutations=JSON,
    ),
    "checkpoint": Kind(
        make=lambda folder: make_checkpoint(folder) / "checkpoint.json", read=read_checkpoint, mutations=JSON
    ),
    "checkpoint's arrays": Kind(
        make=lambda folder: make_checkpoint(folder) / "shared.npz", read=read_checkpoint, mutations=BINARY
    ),
    "manifest": Kind(
        make=lambda folder: make_data(folder) / "manifest.json", read=lambda path: read_data(path.parent),
        mutations=JSON,
    ),
    "manifest with a fitting checksum": Kind(
        make=lambda folder: make_data(folder) / "manifest.json", read=lambda path: read_data(path.parent),
        mutations=JSON[:3], sealed=resealed,
    ),
    "shard": Kind(
        make=lambda folder: make_data(folder) / "shard-00001.h5", read=lambda path: read_data(path.parent),
        mutations=BINARY,
    ),
    "compressed shard": Kind(make=make_packed, read=lambda path: read_data(path.parent), mutations=BINARY),
    "partial manifest": Kind(
        make=make_partial, read=lambda path: journal.entered(path.parent, "identity", "source"), mutations=TEXT
    ),
    "job of writing": Kind(make=make_job_file, read=lambda path: read_job(path.parent), mutations=JSON),
    "list of files": Kind(make=make_list, read=as_source, mutations=TEXT, codes=(2,)),
    "PNG": Kind(make=make_image("png"), read=class_folder_as_source, mutations=BINARY),
    "JPEG": Kind(make=make_image("jpg"), read=class_folder_as_source, mutations=BINARY),
    "BMP": Kind(make=make_image("bmp"), read=class_folder_as_source, mutations=BINARY),
    "TIFF": Kind(make=make_image("tiff"), read=class_folder_as_source, mutations=BINARY),
    "npz": Kind(make=make_arrays("a.npz"), read=as_source, mutations=BINARY),
    "compressed npz": Kind(make=make_arrays("packed.npz"), read=as_source, mutations=BINARY),
    "array in a compressed npz": Kind(
        make=make_arrays("packed.npz"), read=as_source, mutations=(*BINARY, *TEXT), opened=unzipped, sealed=zipped
    ),
    "npy images": Kind(make=make_npy("images.npy"), read=folder_as_source, mutations=(*BINARY, *TEXT)),
    "npy labels": Kind(make=make_npy("labels.npy"), read=folder_as_source, mutations=(*BINARY, *TEXT)),
    "HDF5": Kind(make=make_hdf5(), read=as_source, mutations=BINARY),
    "HDF5 in chunks": Kind(
        make=make_hdf5(chunks=(4, 3, 8, 8), compression="gzip"), read=as_source, mutations=BINARY
    ),
    "IDX images": Kind(make=make_idx("train-images-idx3-ubyte"), read=folder_as_source, mutations=BINARY),
    "IDX labels": Kind(make=make_idx("train-labels-idx1-ubyte"), read=folder_as_source, mutations=BINARY),
    "IDX images, gzip": Kind(
        make=make_idx("train-images-idx3-ubyte.gz", packed=True), read=folder_as_source, mutations=BINARY
    ),
    "IDX images inside gzip": Kind(
        make=make_idx("train-images-idx3-ubyte.gz", packed=True), read=folder_as_source, mutations=BINARY,
        opened=gzip.decompress, sealed=gzip.compress,
    ),
    "CIFAR-10 binary": Kind(
        make=make_cifar("data_batch_1.bin", pickled=False, hundred=False), read=folder_as_source, mutations=BINARY
    ),
    "CIFAR-10 names": Kind(
        make=make_cifar("batches.meta.txt", pickled=False, hundred=False), read=folder_as_source, mutations=TEXT
    ),
    "CIFAR-10 pickle": Kind(
        make=make_cifar("data_batch_1", pickled=True, hundred=False), read=folder_as_source, mutations=BINARY
    ),
    "CIFAR-100 pickled names": Kind(
        make=make_cifar("meta", pickled=True, hundred=True), read=folder_as_source, mutations=(*BINARY, *TEXT)
    ),
    "TFRecord": Kind(make=make_records_file, read=as_source, mutations=BINARY),
    "Example in a TFRecord": Kind(
        make=make_records_file, read=as_source, mutations=BINARY, opened=lambda content: example_bytes(2), sealed=framed
    ),
    "label in a TFRecord": Kind(
        make=make_records_file, read=as_source, mutations=(damaged_label,),
        sealed=lambda content: framed(example_bytes(int(content))),
    ),
    "profile": Kind(make=make_profile, read=node_profile, mutations=TEXT),
    "log of trials": Kind(make=make_trials, read=tuned, mutations=TEXT),
    "replay": Kind(
        make=text_of("r.csv", REPLAY), read=lambda path: replay(read_table(path)), mutations=TEXT, codes=(2,)
    ),
    "space": Kind(make=text_of("s.toml", SPACE), read=read_a_space, mutations=TEXT, codes=(2,)),
    "machine": Kind(make=make_machine, read=lambda path: read_machine(str(path)), mutations=TEXT, codes=(2,)),
    "hwloc": Kind(
        make=copy_of(SHARE / "machines" / "generic-2x16.xml"), read=read_topology, mutations=TEXT, codes=(2,)
    ),
    "host file": Kind(
        make=text_of("hosts", "c401-[001-004,010] slots=2\nlogin1:4 # two\nn[1-3]-[0-1]\n"), read=read_hosts,
        mutations=TEXT, codes=(2,),
    ),
    "model file": Kind(
        make=copy_of(SHARE / "examples" / "my_model.py"), read=lambda path: check_model_spec(f"{path}:build"),
        mutations=TEXT, codes=(2,),
    ),
    "search": Kind(
        make=copy_of(SHARE / "examples" / "search-digits.toml"), read=read_search_file, mutations=TEXT, codes=(2,)
    ),
    "record of a search": Kind(make=make_search_record, read=read_search_record, mutations=JSON),
    "journal of a search": Kind(make=make_proposals, read=read_proposals, mutations=TEXT, continues=True),
    "trace": Kind(make=make_trace, read=read_traces, mutations=BINARY),
    "saved model": Kind(make=make_model, read=read_model, mutations=BINARY, needs_keras=True),
    "config of a saved model": Kind(
        make=make_model, read=read_model, mutations=JSON, opened=config_of_model, sealed=with_config, needs_keras=True
    ),
    "network": Kind(
        make=copy_of(SHARE / "networks" / "1gbe.toml"), read=lambda path: read_network(str(path)), mutations=TEXT,
        codes=(2,),
    ),
    "network that was measured": Kind(
        make=text_of("n.json", MEASURED), read=lambda path: read_network(str(path)), mutations=JSON, codes=(2,)
    ),
    "jobs of a study": Kind(
        make=make_jobs, read=lambda path: path.exists() and read_as(JobsState, path, JOBS_SCHEMA), mutations=JSON
    ),
    "card of certify": Kind(make=make_card, read=read_a_card, mutations=JSON),
    "receipt of an installation": Kind(make=make_receipt, read=read_receipt, mutations=JSON),
    "timetable": Kind(make=make_timetable, read=read_timetable, mutations=JSON),
    "status of a rank": Kind(make=make_status, read=lambda path: status.read_statuses(path.parent), mutations=JSON),
    "table of ranks": Kind(make=make_table, read=lambda path: status.read_statuses(path.parent), mutations=JSON),
    "submitted job": Kind(make=make_submitted, read=read_submitted, mutations=JSON),
    "lock": Kind(
        make=text_of(".hpcdl-lock", '{"host": "h", "pid": 12, "job": ""}'), read=lambda path: check_free(path.parent),
        mutations=JSON,
    ),
}  # fmt: skip
