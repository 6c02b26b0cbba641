"""User-written readers: what they may return, what is refused, and when their code runs."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcdl.core.errors import HpcdlError, SourceError, UsageError
from hpcdl.data.format.manifest import Manifest, read_manifest
from hpcdl.data.sources.reader import source as reader_source
from hpcdl.data.sources.reader.source import user_reader
from hpcdl.data.write import tasks, writing
from hpcdl.data.write.plan import WORK_NAME
from tests.conftest import ROOT, CommandLine
from tests.data.sharding import contents, request
from tests.data.test_fields import stored

ITEMS = """
import numpy as np

class Files:
    def __init__(self, source):
        self.source = source

    def items(self):
        return sorted(self.source.glob("*.txt"))

    def read(self, path):
        print("reading", path.name)
        values = np.loadtxt(path, ndmin=1).astype(np.float32)
        return {"x": np.outer(values, np.ones(20, np.float32)), "label": "odd" if len(values) % 2 else "even"}
"""
GENERATOR = """
import numpy as np

def samples(source):
    for path in sorted(source.glob("*.txt")):
        values = np.loadtxt(path, ndmin=1).astype(">f4")
        yield {"x": np.outer(values, np.ones(20, ">f4")), "label": "odd" if len(values) % 2 else "even"}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files of 1 to 9 numbers, one per line."""
    folder = tmp_path / "source"
    folder.mkdir()
    for count in range(1, 10):
        (folder / f"{count}.txt").write_text("\n".join(map(str, range(count))))
    return folder


def reader(folder: Path, text: str, name: str = "own.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def make(source: Path, target: Path, spec: str, /, *, resume: bool = False, **options: Any) -> Manifest:
    asked = request(source, target, resume=resume, **{"workers": 1, **options})
    writing.shard(dataclasses.replace(asked, reader=spec), bar=False)
    return read_manifest(target)[0]


def content_of(folder: Path, manifest: Manifest, split: str = "all") -> list[str]:
    """Return every sample of a split, read with plain h5py, sorted."""
    samples = stored(folder, manifest, split).values()
    return sorted(repr({name: np.asarray(value).tolist() for name, value in own.items()}) for own in samples)


@pytest.mark.parametrize("text", [ITEMS, GENERATOR], ids=["items", "generator"])
def test_readers_are_read_in_parallel_and_every_value_arrives(
    text: str, files: Path, tmp_path: Path, ask_hpcdl: CommandLine
) -> None:
    own = reader(tmp_path, text)
    spec = f"{own}:{'Files' if text is ITEMS else 'samples'}"
    manifest = make(files, tmp_path / "one", spec, shards=3)
    ran = ask_hpcdl(["shard", "--reader", spec, files, tmp_path / "two", "--shards", "3", "--workers", "2", "--json"])
    assert ran.code == 0 and json.loads(ran.out)["splits"] == {"all": 9}, ran.err
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    expected = [
        repr({"x": np.outer(np.arange(count), np.ones(20)).tolist(), "label": count % 2}) for count in range(1, 10)
    ]
    assert content_of(tmp_path / "one", manifest) == sorted(expected) and manifest.class_names == ("even", "odd")
    shown = ask_hpcdl(["inspect", tmp_path / "two", "--verify"])
    assert shown.code == 0 and hashlib.sha256(own.read_bytes()).hexdigest() in shown.out and "sound" in shown.err


SLOW = """
import os, time
from pathlib import Path
import numpy as np

class Files:
    def __init__(self, source):
        self.source = source

    def items(self):
        return [(path.name, {"at": number}) for number, path in enumerate(sorted(self.source.glob("*.txt")))]

    def read(self, item):
        print("reading", item)
        time.sleep(0.02)
        with (Path(__file__).parent / "read-by").open("a") as log:
            log.write(f"{os.getpid()} {item[0]}\\n")
        count = int((self.source / item[0]).read_text())
        return {"x": np.full((count % 5 + 1, 3), count, np.float32), "name": item[0], "label": f"class {count % 3}"}
"""


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """60 files, each holding its own number, 0 to 59."""
    folder = tmp_path / "many"
    folder.mkdir()
    for count in range(60):
        (folder / f"{count:02d}.txt").write_text(str(count))
    return folder


@pytest.fixture
def processes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start other processes as soon as the speed is known, however little work remains."""
    monkeypatch.setattr(reader_source, "OTHERS_FROM_S", 0.0)
    monkeypatch.setattr(tasks, "OTHERS_FROM_S", 0.0)


def read_by(folder: Path) -> list[list[str]]:
    """Return the process and item of each reading, in order."""
    return [line.split() for line in (folder / "read-by").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.usefixtures("processes_at_once")
def test_items_are_read_by_several_processes_to_the_same_bytes(many: Path, tmp_path: Path) -> None:
    spec = f"{reader(tmp_path, SLOW)}:Files"
    for workers, listing in ((1, 1), (2, 3), (4, 5)):  # the listing process reads the first items
        make(many, tmp_path / f"of-{workers}", spec, workers=workers, shards=6, input=["x"], target=["label"])
        read = read_by(tmp_path)
        listed, again = read[:60], read[60:]
        assert len({process for process, _ in listed}) == listing
        assert len({item for _, item in listed}) == 60 == len({item for _, item in again}) == len(again)
        (tmp_path / "read-by").unlink()
    one = contents(tmp_path / "of-1")
    assert len(one) == 7 and one == contents(tmp_path / "of-2") == contents(tmp_path / "of-4")
    kept = stored(tmp_path / "of-4", read_manifest(tmp_path / "of-4")[0]).values()
    assert sorted((own["x"].shape, float(own["x"][0, 0]), int(own["label"])) for own in kept) == sorted(
        ((count % 5 + 1, 3), float(count), count % 3) for count in range(60)
    )


BETWEEN = {
    "raises": ("raise KeyError('gone')", r"item \('40\.txt', \{'at': 40\}\) failed at .*own\.py:\d+: KeyError"),
    "is no sample": ("return 3", r"item \('40\.txt', .*: it is an object of type int; a sample is a dict"),
    "has another type": ("return {'x': np.zeros((1, 3)), 'name': '', 'label': ''}", r"'40.*x is 1x3 float64, and"),
    "kills its process": ("os.kill(os.getpid(), 9)", r"a process that reads with the reader died \(signal 9\)"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.usefixtures("processes_at_once")
def test_what_goes_wrong_in_another_process_names_the_item(name: str, many: Path, tmp_path: Path) -> None:
    line, reason = BETWEEN[name]
    own = reader(
        tmp_path, SLOW.replace("time.sleep(0.02)", f"time.sleep(0.02)\n        if item[0] == '40.txt': {line}")
    )
    with pytest.raises(HpcdlError, match=reason) as caught:
        make(many, tmp_path / "out", f"{own}:Files", workers=2, input=["x"], target=["label"])
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    assert len({process for process, _ in read_by(tmp_path)}) == 3
    if name == "raises":
        manifest = make(
            many, tmp_path / "out", f"{own}:Files", workers=2, on_error="skip", input=["x"], target=["label"]
        )
        assert manifest.splits["all"].num_samples == 59 and "40.txt" in manifest.skipped[0]


def killed_after_shards(line: list[Any], target: Path, count: int, home: Path) -> None:
    """Start `hpcdl` and kill it with its processes once `count` shards, but not all, are written."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcdl", *map(str, line)], env={**os.environ, "HOME": str(home)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while len(list(target.glob("shard-*.h5"))) < count:
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (target / "manifest.json").exists()


@pytest.mark.long
def test_a_killed_reader_of_items_resumes_to_the_same_bytes(many: Path, tmp_path: Path, ask_hpcdl: CommandLine) -> None:
    spec = f"{reader(tmp_path, SLOW)}:Files"
    flags = ["--reader", spec, "--shards", "12", "--input", "x", "--target", "label", "--workers"]
    killed_after_shards(["shard", many, tmp_path / "out", *flags, "2"], tmp_path / "out", 3, tmp_path)
    # The list has another order, but every file of the source is unchanged:
    reordered = reader(tmp_path, SLOW.replace("sorted(self", "reversed(list(self").replace(")))]", "))))]"), "other.py")
    for changed, reason in ((reordered, "another reader"), (None, "items() now gives another list")):
        if changed is None:
            (many / "99.txt").write_text("99")
        refused = ask_hpcdl(["shard", many, tmp_path / "out", *flags[2:], "4", "--resume", "--reader",
                             f"{changed}:Files" if changed else spec])  # fmt: skip
        assert refused.code == 2 and reason in refused.err
    (many / "99.txt").unlink()
    done = ask_hpcdl(["shard", many, tmp_path / "out", *flags, "4", "--resume", "--json"])
    assert done.code == 0 and json.loads(done.out)["kept"] >= 2, done.err
    make(many, tmp_path / "whole", spec, shards=12, workers=1, input=["x"], target=["label"])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


RETURNED = {
    "splits": (
        "def f(source): return {'train': [{'x': [1.0, 2.0], 'y': 'a'}], 'validation': [{'x': [3.0, 4.0], 'y': 'b'}]}",
        {"train": [([1, 2], 0)], "val": [([3, 4], 1)]},
    ),
    "split in samples": (
        "def f(source):\n for n in range(3): yield {'x': [n, 1.5], 'y': n % 2, 'split': ['train', 'dev'][n % 2]}",
        {"train": [([0, 1.5], 0), ([2, 1.5], 0)], "val": [([1, 1.5], 1)]},
    ),
    "pairs": (
        "def f(source): return [(N.float32([5, 6]), 0), (N.float32([7, 8]), 1)]",
        {"all": [([5, 6], 0), ([7, 8], 1)]},
    ),
    "arrays": ("def f(source): return {'x': N.eye(2), 'y': N.arange(2)}", {"all": [([0, 1], 1), ([1, 0], 0)]}),
    "tf.data": (
        "import tensorflow as tf\n"
        "def f(source): return tf.data.Dataset.from_tensor_slices(({'x': [[1., 2.], [3., 4.]]}, {'y': ['a', 'b']}))",
        {"all": [([1, 2], 0), ([3, 4], 1)]},
    ),
    "PyDataset": (
        "import keras\n"
        "class f(keras.utils.PyDataset):\n"
        " def __init__(self, source): super().__init__()\n"
        " def __len__(self): return 2\n"
        " def __getitem__(self, n): return N.float32([[n, 0], [n, 1]])[:2 - n], N.array([0, 1])[:2 - n]",
        {"all": [([0, 0], 0), ([0, 1], 1), ([1, 0], 0)]},
    ),
    "big-endian and empty lists": (
        "def f(source):\n for n in range(3): yield {'x': N.arange(n, dtype='>i2') if n else [], 'y': n % 2}",
        {"all": [([], 0), ([0], 1), ([0, 1], 0)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_reader_may_return(name: str, files: Path, tmp_path: Path) -> None:
    text, expected = RETURNED[name]
    own = reader(tmp_path, f"import numpy as N\n{text}\n")
    manifest = make(files, tmp_path / "out", f"{own}:f")
    found = {split: content_of(tmp_path / "out", manifest, split) for split in manifest.splits}
    wanted = {
        split: sorted(repr({"x": [*map(kind, x)], "y": y}) for x, y in samples)
        for kind in (int if "lists" in name else float,)
        for split, samples in expected.items()
    }
    assert found == wanted


def test_class_names_that_a_data_set_keeps(files: Path, tmp_path: Path) -> None:
    """Class names of a data set are kept, recognised by the attributes that Hugging Face data sets have."""
    own = reader(
        tmp_path,
        "class Label:\n names = ['cat', 'dog', 'eel']\n def str2int(self, name): pass\n"
        "class f:\n features = {'label': Label()}\n def __init__(self, source): pass\n"
        " def __len__(self): return 4\n"
        " def __getitem__(self, n): return {'x': [float(n)] * 3, 'label': n % 2}\n",
    )
    manifest = make(files, tmp_path / "out", f"{own}:f")
    assert manifest.class_names == ("cat", "dog", "eel") and manifest.fields[1].class_names == ("cat", "dog", "eel")


WRONG = {
    "raises": (
        "def f(s):\n yield {'x': 1., 'y': 0}\n raise KeyError('gone')",
        r"sample 1 failed at .*own\.py:4: KeyError: 'gone'",
    ),
    "raises in read": (
        "class f:\n def __init__(self, s): pass\n def items(self): return ['p1']\n def read(self, item): return 1 / 0",
        r"item 'p1' failed at .*own\.py:5: ZeroDivisionError",
    ),
    "syntax": ("def f(s:\n", r"failed at .*own\.py:2: SyntaxError"),
    "exits": ("import sys\nsys.exit(0)", r"failed at .*own\.py:3: SystemExit"),
    "missing module": ("import no_such_module_here", r"own\.py:2: ModuleNotFoundError.*install it"),
    "no such name": ("def g(s): pass", r"known: g"),
    "no function": ("f = 3", r"is not a function but int"),
    "nothing": ("def f(s): pass", r"it returned None \(is there a `return`\?\); a reader returns a generator"),
    "no samples": ("def f(s): return []", r"gives no samples"),
    "an array": ("def f(s): yield N.zeros(3)", r"sample 0: it is an object of type ndarray; a sample is a dict"),
    "weights": ("def f(s): yield N.zeros(3), 1, 0.5", r"weights of samples are not supported"),
    "None": ("def f(s): yield {'x': None, 'y': 1}", r"x is None"),
    "objects": (
        "def f(s): yield {'x': [object()], 'y': 1}",
        r"x is an object of type list; a value is text or numbers",
    ),
    "ragged": ("def f(s): yield {'x': [[1], [1, 2]], 'y': 1}", r"x is an object of type list, which does not become"),
    "dates": ("def f(s): yield {'x': N.datetime64('2020-01-01'), 'y': 1}", r"x is an array of datetime64"),
    "bytes": ("def f(s): yield {'x': b'\\xff\\xd8\\xff', 'y': 1}", r"x is bytes that are not text.*PIL\.Image"),
    "masked": ("def f(s): yield {'x': N.ma.masked_array([1, 2], [0, 1]), 'y': 1}", r"x has masked values"),
    "palette": (
        "from PIL import Image\ndef f(s): yield {'x': Image.new('P', (4, 4)), 'y': 1}",
        r"x is a picture with a palette",
    ),
    "other type": (
        "def f(s):\n for x in (1, 1.5): yield {'x': x, 'y': 1}",
        r"sample 1: x is one float64, and was one int64",
    ),
    "other shape": (
        "def f(s):\n for n in (2, 3): yield {'x': N.zeros((4, n)), 'y': 1}", r"x is 4x3 float64, and was Nx2 float64",
    ),
    "other names": ("def f(s):\n yield {'x': 1., 'y': 1}\n yield {'x': 1.}", r"sample 1: only those before has y"),
    "some split": (
        "def f(s):\n yield {'x': 1., 'y': 1, 'split': 'train'}\n yield {'x': 1., 'y': 1}", r"some samples have a split",
    ),
    "odd split": ("def f(s): yield {'x': 1., 'y': 1, 'split': '../up'}", r"'\.\./up' is not the name of a split"),
    "which is the target": ("def f(s): yield {'x': 1., 'z': 1.5}", r"which array is the target\? Give --target"),
    "not finite": (
        "def f(s): return {'x': N.float32([[1, 2], [N.nan, 1]]), 'y': N.arange(2)}",
        r"x of sample 1 is not finite",
    ),
    "unequal arrays": (
        "def f(s): return {'x': N.zeros(3), 'y': N.zeros(2)}",
        r"unequal numbers of samples.*\(x 3, y 2\)",
    ),
    "items that are objects": (
        "class f:\n def __init__(self, s): pass\n def items(self): return [object()]\n"
        " def read(self, item): return {'x': 1., 'y': 1}",
        r"items\(\) gives an object of type object",
    ),
    "never ends": (
        "import tensorflow as tf\ndef f(s): return tf.data.Dataset.range(3).repeat()",
        r"never ends; leave out repeat",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_readers_are_refused_in_one_line_and_leave_nothing(name: str, files: Path, tmp_path: Path) -> None:
    text, reason = WRONG[name]
    own = reader(tmp_path, f"import numpy as N\n{text}\n")
    with pytest.raises(UsageError, match=reason) as caught:
        make(files, tmp_path / "out", f"{own}:f")
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spec", ["own.py", "own:f", "own.py:", "own.py:f()", "missing.py:f", "a\0.py:f"])
def test_what_names_no_reader(spec: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give --reader FILE\.py:NAME"):
        make(files, tmp_path / "out", spec)


def test_flags_of_other_sources_are_refused(files: Path, tmp_path: Path) -> None:
    spec = f"{reader(tmp_path, ITEMS)}:Files"
    for options, flag in (
        ({"format": "csv"}, "--format csv"), ({"axes": "nchw"}, "--axes"), ({"image_field": "x"}, "--image-field"),
        ({"samples": 3}, "--samples"), ({"image_size": "8x8"}, "--image-size"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=flag):
            make(files, tmp_path / "out", spec, **options)
    with pytest.raises(UsageError, match="--format reader needs --reader"):
        make(files, tmp_path / "out", "", format="reader")


def marking(folder: Path) -> Path:
    """A reader whose code leaves a file behind when it runs."""
    return reader(folder, f"open({str(folder / 'ran')!r}, 'w').close()\n{ITEMS}")


def test_code_runs_where_the_command_line_names_it_alone(files: Path, tmp_path: Path, ask_hpcdl: CommandLine) -> None:
    own = marking(tmp_path)
    for name in ("sitecustomize.py", "numpy.py", "reader.py", "hpcdl_reader.py"):
        shutil.copy(own, files / name)
    settings = tmp_path / "hpcdl.toml"
    settings.write_text(f'reader = "{own}:Files"\n')
    ask_hpcdl(["shard", files, tmp_path / "a"], cwd=files)
    ran = ask_hpcdl(["shard", files, tmp_path / "b", "--config", settings, "--format", "reader"], cwd=files)
    assert ran.code == 2 and not (tmp_path / "ran").exists()
    make(files, tmp_path / "out", f"{own}:Files", shards=2)
    (tmp_path / "ran").unlink()
    path = next((tmp_path / "out").glob("*.h5"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = contents(tmp_path / "out")
    mend = ["inspect", tmp_path / "out", "--repair", "--from", files]
    ran = ask_hpcdl(mend)
    assert ran.code == 2 and "if you trust its code, give --reader" in ran.err
    other = reader(tmp_path, ITEMS, "other.py")
    ran = ask_hpcdl([*mend, "--reader", f"{other}:Files"])
    assert ran.code == 2 and "other.py:Files is not the same" in ran.err
    assert not (tmp_path / "ran").exists() and contents(tmp_path / "out") == before
    ran = ask_hpcdl([*mend, "--reader", f"{own}:Files"])
    assert ran.code == 0 and "written again" in ran.err, ran.err


def test_a_job_that_somebody_else_has_written_is_not_run(files: Path, tmp_path: Path) -> None:
    """A job file changed by another user runs no foreign code: only the command line names the code to run."""
    own, theirs = reader(tmp_path, ITEMS), marking(tmp_path / "source")
    asked = request(files, tmp_path / "out", workers=1)
    asked = dataclasses.replace(asked, reader=f"{own}:Files")
    with writing.preparing(asked) as (job, _):
        spec = dataclasses.replace(
            job.spec, reader=f"{theirs}:Files", reader_digest=user_reader(f"{theirs}:Files").digest
        )
        dataclasses.replace(job, spec=spec).write(tmp_path / "out" / WORK_NAME)
        for workers in ("1", "2"):
            again = dataclasses.replace(asked, config=request(files, tmp_path / "out", workers=workers).config)
            with pytest.raises(HpcdlError, match=r"names another reader|writing process died"):
                writing.write_part(again, job, job.tasks(), rank=0, alone=True, on_samples=lambda _: None)
    assert not (tmp_path / "source" / "ran").exists()


def test_resuming_with_another_reader_is_refused(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = reader(tmp_path, ITEMS)
    spec, real = f"{own}:Files", writing.write_part

    def stopped(asked: Any, job: Any, tasks: Any, **rest: Any) -> Any:
        real(asked, job, tasks[:1], **rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "write_part", stopped)
    with pytest.raises(HpcdlError, match="--resume"):
        make(files, tmp_path / "out", spec, shards=3)
    monkeypatch.setattr(writing, "write_part", real)
    reader(tmp_path, ITEMS.replace("np.ones(20", "np.zeros(20"))
    kept = contents(tmp_path / "out")
    with pytest.raises(UsageError, match="was begun with another reader, or before its file changed"):
        make(files, tmp_path / "out", spec, shards=3, resume=True)
    assert {name: own for name, own in contents(tmp_path / "out").items() if name.endswith(".h5")} == {
        name: own for name, own in kept.items() if name.endswith(".h5")
    }
    reader(tmp_path, ITEMS)
    resumed = make(files, tmp_path / "out", spec, shards=3, resume=True)
    make(files, tmp_path / "whole", spec, shards=3)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole") and resumed.source["reader"] == "own.py:Files"
    reader(tmp_path, ITEMS + "# changed\n")
    with pytest.raises(UsageError, match="is not the same; give that one, or another folder"):
        make(files, tmp_path / "out", spec, shards=3, resume=True)


def test_resuming_after_the_source_changed_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resuming is refused if values changed under the same names, sizes and times: sample checksums differ."""
    spec, real = f"{reader(tmp_path, ITEMS)}:Files", writing.write_part
    monkeypatch.setattr(writing, "write_part", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(HpcdlError):
        make(files, tmp_path / "out", spec)
    monkeypatch.setattr(
        writing, "write_part", lambda a, j, t, **r: (real(a, j, t[:1], **r), (_ for _ in ()).throw(KeyboardInterrupt))
    )
    with pytest.raises(HpcdlError):
        make(files, tmp_path / "again", spec, shards=3)
    monkeypatch.setattr(writing, "write_part", real)
    path = files / "3.txt"
    before = path.stat()
    path.write_text(path.read_text().replace("2", "7"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UsageError, match="another source"):
        make(files, tmp_path / "again", spec, shards=3, resume=True)


def test_values_that_differ_from_reading_to_reading_are_never_mixed(files: Path, tmp_path: Path) -> None:
    own = reader(tmp_path, ITEMS.replace("np.ones(20, np.float32)", "np.random.default_rng().random(20)"))
    with pytest.raises(HpcdlError, match=r"3\.txt'|\.txt': its values are not those of a moment ago.*no random"):
        make(files, tmp_path / "out", f"{own}:Files")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_items_that_cannot_be_read_are_left_out_by_name(files: Path, tmp_path: Path) -> None:
    (files / "5.txt").write_text("one")
    spec = f"{reader(tmp_path, ITEMS)}:Files"
    with pytest.raises(SourceError, match=r"5\.txt' failed at .*own\.py:13: ValueError.*--on-error skip"):
        make(files, tmp_path / "out", spec)
    manifest = make(files, tmp_path / "out", spec, on_error="skip")
    assert manifest.splits["all"].num_samples == 8
    assert len(manifest.skipped) == 1 and "5.txt" in manifest.skipped[0]


@pytest.mark.parametrize("kind", ["items", "generator"])
def test_samples_that_are_not_finite_are_left_out(kind: str, files: Path, tmp_path: Path) -> None:
    (files / "5.txt").write_text("nan\n" * 5)
    text = ITEMS if kind == "items" else GENERATOR
    spec = f"{reader(tmp_path, text)}:{'Files' if kind == 'items' else 'samples'}"
    with pytest.raises(SourceError, match="x of sample 4 is not finite"):
        make(files, tmp_path / "out", spec)
    manifest = make(files, tmp_path / "out", spec, nan="skip")
    lengths = sorted(len(own["x"]) for own in stored(tmp_path / "out", manifest).values())
    assert lengths == [1, 2, 3, 4, 6, 7, 8, 9]


PAGE = (ROOT / "docs" / "how-to" / "own-format.md").read_text()
READERS = ROOT / "share" / "hpcdl" / "examples" / "readers"


def lines_of_code(path: Path) -> int:
    """Count the lines that are neither blank nor a docstring."""
    text = path.read_text()
    documented = [
        own for own in ast.walk(ast.parse(text)) if isinstance(own, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]
    quoted = sum(ast.get_docstring(own) is not None for own in documented)
    return len([line for line in text.splitlines() if line.strip()]) - quoted


@pytest.mark.parametrize("path", sorted(READERS.glob("*.py")), ids=lambda path: path.stem)
def test_readers_to_start_from_are_short_and_named_on_the_page(path: Path) -> None:
    assert lines_of_code(path) <= 16
    (name,) = [own.name for own in ast.parse(path.read_text()).body if isinstance(own, (ast.ClassDef, ast.FunctionDef))]
    assert f"| `{path.name}:{name}` |" in PAGE


def test_the_page_names_no_reader_that_is_gone() -> None:
    named = re.findall(r"^\| `(\w+\.py):", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in READERS.glob("*.py"))


def test_the_reader_of_json_lines(tmp_path: Path) -> None:
    rows = [{"text": f"é {number}", "label": ["good", "bad"][number % 2], "id": number} for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    manifest = make(tmp_path / "rows.jsonl", tmp_path / "out", f"{reader(tmp_path, text)}:samples")
    found = {(bytes(own["text"]).decode(), int(own["label"])) for own in stored(tmp_path / "out", manifest).values()}
    assert found == {(row["text"], 1 - row["id"] % 2) for row in rows} and manifest.class_names == ("bad", "good")


def test_the_reader_of_wav(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    expected = set()
    for number in range(4):
        values = rng.integers(-32768, 32768, (30 + number, 2)).astype("<i2")
        path = tmp_path / "sounds" / ("cough" if number % 2 else "speech") / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setparams((2, 2, 16000, 0, "NONE", ""))
            file.writeframes(values.tobytes())
        expected.add(((values / 32768).astype(np.float32).tobytes(), 1 - number % 2))
    manifest = make(tmp_path / "sounds", tmp_path / "out", f"{READERS / 'wav.py'}:Sounds", workers=2)
    found = {(own["x"].tobytes(), int(own["label"])) for own in stored(tmp_path / "out", manifest).values()}
    assert found == expected and manifest.class_names == ("cough", "speech")


def test_the_reader_of_coco(tmp_path: Path) -> None:
    source = tmp_path / "coco"
    (source / "images").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40 + number, 30), (number * 50, 0, 0)).save(source / "images" / f"{number}.png")
    document = {
        "images": [{"id": 100 + number, "file_name": f"{number}.png"} for number in range(3)],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
        "annotations": [
            {"image_id": 100, "category_id": 7, "bbox": [0, 0, 1, 1]},
            {"image_id": 102, "category_id": 3, "bbox": [0, 0, 1, 1]},
            {"image_id": 102, "category_id": 7, "bbox": [0, 0, 1, 1]},
        ],
    }
    (source / "annotations.json").write_text(json.dumps(document))
    manifest = make(source, tmp_path / "out", f"{READERS / 'coco.py'}:Pictures")
    found = {
        int(own["image"][0, 0, 0]): (own["image"].shape, own["labels"].tolist())
        for own in stored(tmp_path / "out", manifest).values()
    }
    size = (224, 224, 3)
    assert found == {0: (size, [0, 1]), 50: (size, [0, 0]), 100: (size, [1, 1])}


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_wide_numbers_that_are_read_again_are_reported_by_their_type(dtype: str, files: Path, tmp_path: Path) -> None:
    own = reader(tmp_path, ITEMS.replace("np.ones(20, np.float32))", f"np.ones(20)).astype(np.{dtype})"))
    manifest = make(files, tmp_path / "out", f"{own}:Files")
    assert any(f"{dtype}, which training rounds to float32" in line for line in manifest.understood)


def test_fields_that_no_role_names_are_listed_once(tmp_path: Path, ask_hpcdl: CommandLine) -> None:
    (tmp_path / "any").write_text("")
    lines = [
        "def samples(source):",
        "    for n in range(9):",
        "        yield {'x': [n], 'y': n % 2, 'observer': 'eve'}",
    ]
    own = reader(tmp_path, "\n".join(lines))
    done = ask_hpcdl(["shard", "--reader", f"{own}:samples", tmp_path / "any", tmp_path / "out"])
    assert done.code == 0 and done.err.count("observer") == 1 and "arrays not used: 'observer'" in done.err, done.err


@pytest.mark.parametrize(("made", "said"), [("{'x': x, 'y': y}", True), ("{'x': x, 'y': y[0]}", False)])
def test_all_samples_given_as_one_are_said(tmp_path: Path, made: str, said: bool) -> None:
    lines = [
        "import numpy as np",
        "def read(path):",
        "    x, y = np.ones((9, 4)), np.arange(9) % 3",
        f"    yield {made}",
    ]
    spec = f"{reader(tmp_path, chr(10).join(lines))}:read"
    (tmp_path / "s").mkdir()
    understood = make(tmp_path / "s", tmp_path / "out", spec).understood
    assert any("are these 9 samples?" in line for line in understood) == said, understood
