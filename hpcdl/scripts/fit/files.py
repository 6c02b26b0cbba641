"""Files of a script on many ranks: callbacks write them on rank 0, and one rank saves a model for all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hpcdl.core.storage.disk import create, make_folder, remove_file, replacing, touch
from hpcdl.scripts.fit.model import center_in_place, optimizers_of
from hpcdl.scripts.process.session import is_rank, session
from hpcdl.scripts.process.written import OPENS, inside, saving_for_all
from hpcdl.step.keras_internals import saving_functions
from hpcdl.supervision.control import digest_of

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup

_WRITERS: dict[str, tuple[str, ...]] = {
    "ModelCheckpoint": (),
    "OrbaxCheckpoint": (),
    "BackupAndRestore": ("set_model", "on_train_begin"),
    "CSVLogger": (),
    "TensorBoard": (),
}
"""Keras's callbacks that write files, with the methods that other ranks call too (in order to restore)."""
_SAVES = ("save", "save_weights", "export")
"""Methods of a model that write a file, with its path as first argument."""
_LOOK_S = 0.05
_num_writes: dict[Path, int] = {}
"""How often this rank was about to write each file."""
_begun: dict[Path, _Saving] = {}
"""TensorFlow's files: which write is next."""


class Kept(keras.callbacks.Callback):
    """The part of a file-writing callback that ranks other than 0 run too."""

    def __init__(self, callback: Any, methods: Sequence[str]) -> None:
        super().__init__()
        self.callback, self._methods = callback, methods

    def set_model(self, model: Any) -> None:
        """Pass on the model."""
        super().set_model(model)
        if "set_model" in self._methods:
            self.callback.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore, if the callback does that here."""
        if "on_train_begin" in self._methods:
            self.callback.on_train_begin(logs)


def on_rank_0(callbacks: Iterable[Any]) -> list[Any]:
    """Return `callbacks` on rank 0, and none on other ranks, except that BackupAndRestore restores on all of them."""
    writers = list(callbacks)
    return (
        writers if session().communicator.rank == 0 else [Kept(callback, _kept(callback) or ()) for callback in writers]
    )


def written_on_rank_0(callbacks: Sequence[Any], group: ScriptGroup) -> list[Any]:
    """Apply the same to those callbacks of a fit that write files, and print a line about it once."""
    if group.rank > 0:
        return [callback if (kept := _kept(callback)) is None else Kept(callback, kept) for callback in callbacks]
    if any(_kept(callback) is not None for callback in callbacks):
        group.keep("said that files are rank 0's", _report_writer)
    return list(callbacks)


def _kept(callback: Any) -> tuple[str, ...] | None:
    """Return the methods of a file-writing callback that other ranks call too; None if it writes no files."""
    kinds = [getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name)]
    return next((_WRITERS[kind.__name__] for kind in kinds if isinstance(callback, kind)), None)


def keeps_best(callback: Any) -> bool:
    """Return whether a callback may write a file only if the model is the best so far."""
    names = ("ModelCheckpoint", "OrbaxCheckpoint")
    return isinstance(callback, tuple(kind for name in names if (kind := getattr(keras.callbacks, name, None))))


def _report_writer() -> bool:
    sys.stderr.write("hpcdl: callbacks that write files do so on rank 0 alone (hpcdl.on_rank_0)\n")
    return True


def save_once() -> None:
    """Patch saving: what several ranks save to one path is written by one of them, and is complete at every moment."""
    for name in _SAVES:
        plain = getattr(keras.Model, name)
        if not hasattr(plain, "once_for_all"):
            setattr(keras.Model, name, _saved_once(name, plain))
    plain = getattr(keras.Model, "get_state_tree", None)  # an older Keras has neither it nor OrbaxCheckpoint
    if plain is not None and not hasattr(plain, "shared"):
        keras.Model.get_state_tree = _of_shared_weights(plain)
    for module, name in saving_functions():
        plain = getattr(module, name)
        if not hasattr(plain, "once_for_all"):
            vars(module)[name] = _saved_once(name, plain)
    if not hasattr(tf.train.Checkpoint._write, "once_for_all"):
        tf.train.Checkpoint._write = _checkpoint_once(tf.train.Checkpoint._write)
        tf.saved_model.save = _saved_model_once(tf.saved_model.save)
        _note_other_writers()


def _note_other_writers() -> None:
    """Patch what writes files without Python's `open` to announce their names, as that does (process.written)."""

    def announced(plain: Callable[..., Any], place: int, mode_of: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def begin(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place and isinstance(args[place], str | os.PathLike):
                sys.audit(OPENS, os.fspath(args[place]), mode_of(*args[place + 1 :], **kwargs), 0)
            return plain(*args, **kwargs)

        vars(begin)["autograph_info__"] = {}  # TensorFlow's mark of functions that AutoGraph does not convert
        return begin

    def mode_of_hdf5(mode: str = "r", driver: Any = None, *_: Any, **__: Any) -> str:
        return mode if driver is None else ""  # with MPI's driver all ranks write one file together

    # Keras imports it. Its modes are those of `open`.
    if (hdf5 := sys.modules.get("h5py")) is not None:
        hdf5.File.__init__ = announced(hdf5.File.__init__, 1, mode_of_hdf5)
    records, files = tf.io.TFRecordWriter, tf.io.gfile.GFile
    records.__init__ = announced(records.__init__, 1, lambda *_, **__: "w")
    files.__init__ = announced(files.__init__, 1, lambda mode="r", *_, **__: mode)
    tf.io.write_file = announced(tf.io.write_file, 0, lambda *_, **__: "w")
    # Each writer has a file of its own in the folder, and TensorBoard shows their curves as one.
    tf.summary.create_file_writer = announced(tf.summary.create_file_writer, 0, lambda *_, **__: "a")


def _saved_once(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        folder = session().folder if is_rank() else None
        if getattr(inside, "saving", False):  # a model's method has called the function below it
            return plain(model, filepath, *args, **kwargs)
        with center_in_place(*optimizers_of(model)):
            # Objects and remote stores (gs://) have no path that ranks could compare or rename.
            # Before contents are compared: only with the shared weights in place do ranks have the same to write.
            if folder is None or not isinstance(filepath, str | os.PathLike) or "://" in str(filepath):
                return plain(model, filepath, *args, **kwargs)
            # One file may be named in several ways, and ranks may have other working directories.
            path = Path(filepath).resolve()
            saving = _Saving(folder, path, _content(model, name), number=_next_number(path))
            if not saving.begins():
                return None
            with saving.noted(), saving_for_all():
                if name == "export" or any(args) or kwargs.keys() - {"overwrite", "include_optimizer"} or path.is_dir():
                    return plain(model, filepath, *args, **kwargs)  # a directory, or several files
                return _replacing(path, lambda other: plain(model, other, **kwargs))

    vars(save)["once_for_all"] = True
    return save


def _of_shared_weights(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Patch the state that OrbaxCheckpoint saves: a center's weights, not this rank's own."""

    @functools.wraps(plain)
    def state_tree(model: Any, *args: Any, **kwargs: Any) -> Any:
        with center_in_place(*optimizers_of(model)):
            return plain(model, *args, **kwargs)

    vars(state_tree)["shared"] = True
    return state_tree


def _checkpoint_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Patch writes of tf.train.Checkpoint and its manager: equal writes of the ranks to one path become one write."""

    @functools.wraps(plain)
    def write(checkpoint: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        index = Path(f"{os.fspath(file_prefix)}.index")
        if not _writes_now(index):
            # A manager keeps its list of checkpoints, also of what another rank has written, after the write.
            options = kwargs.get("options", args[0] if args else None)
            for after in getattr(options, "experimental_write_callbacks", None) or ():
                if getattr(after, "__module__", "") == tf.train.CheckpointManager.__module__:
                    after(str(file_prefix))
            return str(file_prefix)
        with _noted_saving(index):
            return plain(checkpoint, file_prefix, *args, **kwargs)

    vars(write)["once_for_all"] = True
    return write


def _saved_model_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def save(thing: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
        marker = Path(os.fspath(export_dir)) / "saved_model.pb"
        if getattr(inside, "saving", False):
            return plain(thing, export_dir, *args, **kwargs)
        if not _writes_now(marker):
            return None
        with _noted_saving(marker):
            return plain(thing, export_dir, *args, **kwargs)

    vars(save)["once_for_all"] = True
    return save


def _writes_now(path: Path) -> bool:
    """Return whether this rank is to write TensorFlow's `path` now; False once another rank has.

    The content is not checked: the first writes of all ranks to a path count as the same one, and so on.
    """
    folder = session().folder if is_rank() else None
    if folder is None or "://" in str(path):
        return True
    number = _next_number(path)
    saving = _Saving(folder, path.resolve(), f"write-{number}", number=number)
    if not saving.begins():
        return False
    _begun[path] = saving
    return True


def _next_number(path: Path) -> int:
    here = session()
    if not here.communicator.monitor.script_steps.counted:  # in a fit one rank's callbacks may write
        here.saves[str(path)] = here.saves.get(str(path), 0) + 1
    _num_writes[path] = _num_writes.get(path, 0) + 1
    return _num_writes[path]


@contextlib.contextmanager
def _noted_saving(path: Path) -> Iterator[None]:
    saving = _begun.pop(path, None)
    with contextlib.nullcontext() if saving is None else saving.noted(), saving_for_all():
        yield


class _NotWritten(Exception):
    """Keras asked whether to overwrite a file, and the answer was no."""


def _replacing(path: Path, write: Callable[[Path], Any]) -> Any:
    """Call `write` with a temporary name beside `path`, with the same suffix, then rename the file to `path`."""
    with contextlib.suppress(_NotWritten), replacing(path) as beside:
        result = write(beside)
        if not beside.exists():  # the user was asked whether to overwrite, and declined
            raise _NotWritten
    return result


def _content(model: Any, name: str) -> str:
    """Return a digest of a file's future content: of ranks with equal models only one needs to write it.

    Its first part is that of the trainable weights.
    """
    of_optimizers = [one for optimizer in optimizers_of(model) for one in optimizer.variables]
    parts = []
    for variables in (model.trainable_weights, [*model.non_trainable_weights, *of_optimizers]):
        digest = hashlib.blake2b(name.encode(), digest_size=8)
        for variable in variables:
            digest.update(digest_of(variable).encode())
        parts.append(digest.hexdigest())
    return "-".join(parts)


_STATISTICS_ALIKE = "in a loop of your own BatchNormalization(synchronized=True) keeps moving statistics alike"
_WEIGHTS_ALIKE = (
    "where the script sets weights itself (L-BFGS of scipy, set_weights, assign) take hpcdl.allreduce of loss and "
    "gradients, or call hpcdl.broadcast_variables(model.variables)"
)


class _Saving:
    """One content to be saved to one path, this rank's `number`-th there, recorded in a folder that all ranks see."""

    def __init__(self, folder: Path, path: Path, content: str, *, number: int) -> None:
        self._number = f" #{number}"
        self._path, self._name = path, f"save-{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
        self._trained = content.partition("-")[0]
        self._note = folder / f"{self._name}-{content}"

    def begins(self) -> bool:
        """Return whether this rank is to write; False if another rank has written the same and it still exists."""
        make_folder(self._note.parent)
        while True:
            with contextlib.suppress(FileExistsError):
                create(self._note, f"{session().communicator.rank}{self._number}".encode())
                self._check_alike()
                return True
            writer, written = self._read()
            if writer is not None:
                with session().communicator.monitor.waiting_for(f"a file, {self._path.name}", (writer,)):
                    # Asked again and again: a shared file system does not report what other nodes change.
                    while self._read()[0] == writer:
                        time.sleep(_LOOK_S)
            elif written and written == self._facts():
                return False
            elif written:
                remove_file(self._note)  # the file has been changed or removed since

    def _check_alike(self) -> None:
        """Warn if another rank saves another content as often as this one: the last writer's stays, unnoticed."""
        for note in self._note.parent.glob(f"{self._name}-*"):
            with contextlib.suppress(FileNotFoundError):
                if note != self._note and note.read_text().endswith(self._number):
                    trained_alike = note.name.startswith(f"{self._name}-{self._trained}-")
                    sys.stderr.write(
                        f"hpcdl: warning: {self._path.name}: the ranks save models that differ"
                        f"{'' if trained_alike else ' in their trainable weights'}, and the last one stays; "
                        f"{_STATISTICS_ALIKE if trained_alike else _WEIGHTS_ALIKE}, or save behind "
                        "`if hpcdl.rank() == 0`\n"
                    )

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Write the file inside this context; then the other ranks continue. After an error the next rank writes it."""
        try:
            yield
        except BaseException:
            remove_file(self._note)
            raise
        touch(self._note, f"written {self._facts()}{self._number}".encode())
        for note in self._note.parent.glob(f"{self._name}-*"):
            if note != self._note:
                remove_file(note)

    def _read(self) -> tuple[int | None, str]:
        """Return the rank that writes, and the facts of the written file; None and "" if there is no note yet."""
        try:
            word, _, facts = self._note.read_text().partition(" ")
        except FileNotFoundError:
            return None, ""
        return (int(word), "") if word.isdigit() else (None, facts.rpartition(" #")[0])

    def _facts(self) -> str:
        try:
            info = self._path.stat()
        except OSError:
            return "nothing"
        return f"{info.st_ino} {info.st_size} {info.st_mtime_ns}"
