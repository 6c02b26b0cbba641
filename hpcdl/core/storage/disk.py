"""The one module that creates, replaces, removes and cuts files; no other may (tests/core/test_disk_changes.py).

Two rules hold for all of it:
- Nothing is written through a link, or under a name that can be guessed, in a folder that others may write to. The
  folder is opened once, and files in it are reached by that descriptor (openat, O_NOFOLLOW, O_EXCL).
- Only what hpcdl has made is removed, renamed or cut. The first sentence of each function says how it knows;
  docs/security.md lists them all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import pwd
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpcdl.core.errors import NO_PLACE, UsageError, printable

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BY_DESCRIPTOR = "/proc/self/fd/"
_MOST_LINKS = 40
_SYSTEM_DEPTH = 3
"""Parts of a path such as /lustre/scratch."""
_TOKEN = r"(?:[0-9a-f]{16}|\d+)"
"""The end of a temporary name; earlier versions used the number of a process."""
_DIGEST = "user.hpcdl"
"""Attribute of a file that hpcdl wrote to a place chosen by the user: BLAKE2b of its content at that time."""
OUTPUTS = ".hpcdl-outputs.json"
"""A file with the same digests by name, in the folder, if the file system has no attributes."""


# Folders


class TargetError(UsageError, OSError):
    """A link, or something other than a plain file, is where hpcdl must write."""

    def __init__(self, number: int, what: str, path: Path) -> None:
        OSError.__init__(self, number, what, str(path))

    def __str__(self) -> str:
        return printable(f"cannot write to {self.filename}: {self.strerror}")


def open_folder(folder: Path) -> int:
    """Return a descriptor of `folder` for access to its files; the caller closes it.

    Links on the way are followed if they belong to this user or root. Raises TargetError for another user's.
    """
    descriptor, reached, remaining, num_links = _root_of(folder), Path(folder.root), [*reversed(folder.parts)], 0
    try:
        while remaining:
            name = remaining.pop()
            if name == folder.root:
                continue
            # O_PATH opens a link itself, and a folder that may be entered and written to but not listed.
            inner = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
            status = os.fstat(inner)
            if not stat.S_ISLNK(status.st_mode):
                os.close(descriptor)
                descriptor, reached = inner, reached / name
                continue
            target = _target_of(inner, reached / name, status.st_uid)
            num_links += 1
            if num_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            if target.is_absolute():
                os.close(descriptor)
                descriptor, reached = _root_of(target), Path(target.root)
            remaining += [part for part in reversed(target.parts) if part != target.root]
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and not isinstance(error, TargetError):
            raise type(error)(error.errno, error.strerror, str(folder)) from None
        raise
    return descriptor


def _root_of(path: Path) -> int:
    return os.open(path.root or ".", os.O_PATH | os.O_CLOEXEC)


def _target_of(link: int, path: Path, owner: int) -> Path:
    """Return the target of the open `link`, and close it."""
    try:
        if owner not in (os.geteuid(), 0) and not _is_the_systems(path, owner):
            what = f"it is a link that belongs to {user_name(owner)}; name the folder that it points to"
            raise TargetError(errno.ELOOP, what, path)
        return Path(os.readlink("", dir_fd=link))
    finally:
        os.close(link)


def _is_the_systems(link: Path, owner: int) -> bool:
    """Return whether a link near the root may be root's although it shows another owner.

    In a container without root (Apptainer) root's files have the number of the user nobody, and /scratch is often a
    link.
    """
    if len(link.parts) > _SYSTEM_DEPTH:
        return False
    with contextlib.suppress(OSError, ValueError):
        mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        has_root = any(int(inside) == 0 and int(outside) == 0 for inside, outside, _ in mapped)
        return not has_root and owner == int(Path("/proc/sys/kernel/overflowuid").read_text())
    return False


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make errors of a full or read-only file system in this context name `path`.

    The kernel's errors name no path, or one relative to a descriptor.
    """
    try:
        yield
    except OSError as error:
        name = os.fsdecode(error.filename or "")
        if error.errno in NO_PLACE and ("/" not in name or name.startswith(_BY_DESCRIPTOR)):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def _folder_of(path: Path) -> Iterator[int]:
    """Yield a descriptor of the folder of `path`; errors of a full or read-only file system name `path`."""
    descriptor = open_folder(path.parent)
    try:
        with naming(path):
            yield descriptor
    finally:
        os.close(descriptor)


def user_name(number: int) -> str:
    """Return the login name of a user's number."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"user {number}"


def is_own(path: Path) -> bool:
    """Return whether `path`, not the target of a link, belongs to this user; False if it does not exist."""
    with contextlib.suppress(OSError):
        return path.lstat().st_uid == os.geteuid()
    return False


def is_own_file(path: Path) -> bool:
    """Return whether `path` is a plain file of this user; requests of other users do not count."""
    return is_own(path) and stat.S_ISREG(path.lstat().st_mode)


@dataclass(frozen=True)
class Made:
    """A folder that this process made, identified by device and inode."""

    path: Path
    device: int
    inode: int

    def remove(self, *, if_empty: bool = False) -> None:
        """Remove it with all its content, or only `if_empty`; another folder that has its name stays."""
        with contextlib.suppress(OSError), _folder_of(self.path) as parent:
            status = os.stat(self.path.name, dir_fd=parent, follow_symlinks=False)
            if (status.st_dev, status.st_ino) != (self.device, self.inode):
                return
            if if_empty:
                os.rmdir(self.path.name, dir_fd=parent)
            else:
                shutil.rmtree(self.path.name, ignore_errors=True, dir_fd=parent)


def _made(path: Path) -> Made:
    status = path.lstat()
    return Made(path, status.st_dev, status.st_ino)


def make_folder(path: Path) -> list[Made]:
    """Make `path` and the folders above it, and return the new ones, deepest first.

    Raises OSError if one cannot be made, FileExistsError if something else has the name, TargetError if another user's
    link is on the way.
    """
    new_folders: list[Made] = []
    for folder in (*reversed(path.parents), path):
        if folder.is_dir():
            continue
        with _folder_of(folder) as parent:
            try:
                os.mkdir(folder.name, dir_fd=parent)
            except FileExistsError:
                if not folder.is_dir():
                    raise
            else:
                new_folders.insert(0, _made(folder))
    os.close(open_folder(path))  # checks the links on the way, even if every folder was there
    return new_folders


def make_private_folder(prefix: str, base: Path | None = None) -> Made:
    """Make a folder for this user alone in `base` (default: that of temporary files), with an unguessable name."""
    return _made(Path(tempfile.mkdtemp(prefix=prefix, dir=base)))


@contextlib.contextmanager
def private_folder(prefix: str, base: Path | None = None) -> Iterator[Path]:
    """Yield such a folder, and remove it at the end of the context."""
    folder = make_private_folder(prefix, base)
    try:
        yield folder.path
    finally:
        folder.remove()


# Files that are whole or absent


@contextlib.contextmanager
def creating(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that becomes `path` when the body ends well; after an error nothing of it is left.

    A file that hpcdl keeps under this name is replaced; a link there is replaced, not followed. `durable`: fsync the
    file, so that it is whole after a crash too. The mode is what the umask and a setgid folder imply.
    """
    with _folder_of(path) as folder:
        temporary = temporary_name(path.name)
        descriptor = os.open(temporary, os.O_RDWR | _NEW, 0o666, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.flush()
                if durable:
                    # Before the rename: otherwise a crash may leave the new name without its content.
                    os.fsync(file.fileno())
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
    if durable:
        sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """As `creating`, for a library that needs a name: yield one with the same suffix, in a new private folder.

    The name leads through a descriptor of that folder (/proc/self/fd), so that no other process can replace it; it is
    valid in this process only.
    """
    with _folder_of(path) as folder:
        hidden = temporary_name(path.name)
        os.mkdir(hidden, 0o700, dir_fd=folder)
        inside = os.open(hidden, os.O_RDONLY | _FOLDER, dir_fd=folder)
        try:
            yield Path(f"{_BY_DESCRIPTOR}{inside}") / path.name
            sync_file(Path(f"{_BY_DESCRIPTOR}{inside}") / path.name)
            os.rename(path.name, path.name, src_dir_fd=inside, dst_dir_fd=folder)
        finally:
            os.close(inside)
            shutil.rmtree(hidden, ignore_errors=True, dir_fd=folder)
    sync_folder(path.parent)


def temporary_name(name: str) -> str:
    """Return a hidden name that cannot be guessed and that `sweep` recognises."""
    begin = name.encode(errors="surrogateescape")[:200].decode(errors="ignore")  # file names have at most 255 bytes
    return f".{begin}.{secrets.token_hex(8)}.tmp"


def open_new(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor of a new file, which the caller closes. Raises FileExistsError if it exists."""
    with _folder_of(path) as folder:
        return os.open(path.name, os.O_RDWR | _NEW, mode, dir_fd=folder)


def create(path: Path, content: bytes = b"", mode: int = 0o666) -> None:
    """Write a new file, whole or not at all. Raises FileExistsError if its name is taken."""
    with _folder_of(path) as folder:
        descriptor = os.open(path.name, os.O_RDWR | _NEW, mode, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except BaseException:
            os.unlink(path.name, dir_fd=folder)
            raise


def make_link(path: Path, to: str) -> None:
    """Make a new link. Raises FileExistsError if its name is taken."""
    with _folder_of(path) as folder:
        os.symlink(to, path.name, dir_fd=folder)


def touch(path: Path, content: bytes = b"") -> None:
    """Write a small file as a signal to another process; not durable, since it means nothing after a crash."""
    with creating(path, durable=False) as file:
        file.write(content)


def publish(path: Path, content: bytes) -> bool:
    """Create a file that is complete once visible; return False if another process created it first."""
    with _folder_of(path) as folder:
        temporary = temporary_name(path.name)
        descriptor = os.open(temporary, os.O_WRONLY | _NEW, 0o666, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            # A rename would replace the file of a process that was faster; a link fails.
            os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary, dir_fd=folder)
    return True


# Files that grow


def open_to_append(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor at the end of `path`, which is created if missing; the caller closes it.

    Raises OSError if it is a link or not a plain file. A file with a second hard link (`cp -al`) is copied first, so
    that the other copy stays unchanged.
    """
    with _folder_of(path) as folder:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = _opened(path, flags, mode, folder)
        if os.fstat(descriptor).st_nlink < 2:
            return descriptor
        with os.fdopen(descriptor, "rb") as shared, creating(path) as private:
            shutil.copyfileobj(shared, private)
        return _opened(path, flags, mode, folder)


def _opened(path: Path, flags: int, mode: int, folder: int) -> int:
    try:
        descriptor = os.open(path.name, flags, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            what = "a link, which is not followed" if error.errno == errno.ELOOP else "a folder"
            raise TargetError(error.errno, f"it is {what}; move it away", path) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TargetError(errno.EINVAL, "it is not a plain file; move it away", path)
    return descriptor


def cut(descriptor: int, num_bytes: int) -> None:
    """Cut a file that hpcdl keeps, and that this process has open for writing, to its first `num_bytes`."""
    os.ftruncate(descriptor, num_bytes)


def rewrite(path: Path, content: bytes) -> None:
    """Overwrite a file that hpcdl keeps without new disk space, for a full disk."""
    with _folder_of(path) as folder:
        descriptor = _opened(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, folder)
        try:
            # Before the cut: blocks that are freed on a full disk may be gone before they are needed again.
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)


# Removing


def remove_file(path: Path) -> bool:
    """Remove a plain file that hpcdl keeps under a name of its own, and that this user or the folder's owner owns.

    A link, a folder and any other user's file stay. Returns whether the file is gone, also if it did not exist.
    """
    try:
        with _folder_of(path) as folder:
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), os.fstat(folder).st_uid):
                return False
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        return True
    return True


def remove_folder(path: Path, holds: str) -> list[str]:
    """Remove a folder that hpcdl made, known by its name and by its content, which all fits the pattern `holds`.

    `holds` must match each path below the folder completely. If there is anything else, including a link or another
    user's file, all stays, and those paths are returned. The removal is one step (a rename first).
    """
    with contextlib.suppress(FileNotFoundError), _folder_of(path) as parent:
        if not stat.S_ISDIR(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode):
            return [path.name]
        foreign = others_in(path, holds)
        if foreign:
            return foreign
        hidden = temporary_name(path.name)
        os.rename(path.name, hidden, src_dir_fd=parent, dst_dir_fd=parent)
        shutil.rmtree(hidden, ignore_errors=True, dir_fd=parent)
    return []


def remove_content(path: Path, holds: str) -> list[str]:
    """Remove the content of a folder under the same rules; the folder itself, which the user made, stays."""
    foreign = others_in(path, holds)
    if not foreign:
        with contextlib.suppress(FileNotFoundError), _folder_of(path / "any") as folder:
            for name in os.listdir(path):  # noqa: PTH208  names, for the descriptor
                if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
                else:
                    os.unlink(name, dir_fd=folder)
    return foreign


def others_in(path: Path, holds: str) -> list[str]:
    """Return the paths in a folder that do not fit the pattern `holds`, or are links or other users'; sorted."""
    fits, user, foreign = re.compile(holds), path.lstat().st_uid, list[str]()
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            inner = Path(folder) / name
            relative = str(inner.relative_to(path))
            status = inner.lstat()
            if (
                not fits.fullmatch(relative)
                or stat.S_ISLNK(status.st_mode)
                or status.st_uid not in (user, os.geteuid())
            ):
                foreign.append(relative)
    return sorted(foreign)


def remove_private(path: Path, prefix: str, is_over: Callable[[Path], bool]) -> bool:
    """Remove a folder that only this user can enter and whose name begins with hpcdl's `prefix`, if `is_over`.

    `is_over` checks the folder's own note about its process. Links, other users' folders and accessible ones stay.
    """
    with contextlib.suppress(OSError), _folder_of(path) as parent:
        status = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
        private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if private and path.name.startswith(prefix) and is_over(path):
            shutil.rmtree(path.name, ignore_errors=True, dir_fd=parent)
            return True
    return False


def is_marked(path: Path, marks: Collection[str]) -> bool:
    """Return whether `path` is a folder, not a link to one, with a plain file under one of the names `marks`."""
    return _is_kind(path, stat.S_ISDIR) and any(_is_kind(path / name, stat.S_ISREG) for name in marks)


def _is_kind(path: Path, kind: Callable[[int], bool]) -> bool:
    with contextlib.suppress(OSError):
        return kind(path.lstat().st_mode)
    return False


def remove_marked(path: Path, marks: Collection[str]) -> Path | None:
    """Remove a folder that hpcdl made, known by a plain file in it under one of the names `marks`; return what is left.

    For a folder with links, such as a virtual environment; none is followed. An empty folder, which a kill leaves, is
    removed too. It is renamed first and its marks go last, so that `sweep_marked` finds what a kill leaves.
    """
    with _folder_of(path) as parent:
        try:
            inside = os.open(path.name, os.O_RDONLY | _FOLDER, dir_fd=parent)
        except FileNotFoundError:
            return None
        except OSError:  # a link, a file, or no access for this user
            return path
        try:
            if os.listdir(inside) and not is_marked(path, marks):  # noqa: PTH208  a descriptor
                return path
            hidden = path.name if _is_temporary(path.name) else temporary_name(path.name)
            if hidden != path.name:
                os.rename(path.name, hidden, src_dir_fd=parent, dst_dir_fd=parent)
            _clear(inside, {*os.listdir(inside)} - {*marks})  # noqa: PTH208
            if {*os.listdir(inside)} <= {*marks}:  # noqa: PTH208
                _clear(inside, marks)
                with contextlib.suppress(OSError):
                    os.rmdir(hidden, dir_fd=parent)
        finally:
            os.close(inside)
    remaining = path.with_name(hidden)
    return remaining if remaining.exists() else None


def _is_temporary(name: str) -> bool:
    return re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", name) is not None


def _clear(folder: int, names: Collection[str]) -> None:
    """Remove what can be removed; the caller sees what is left on failure or if another process removes it too."""
    for name in names:
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)


def sweep_marked(folder: Path, names: str, marks: Collection[str]) -> None:
    """Remove marked folders under temporary names (16 random digits) made from names that fit the pattern `names`."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if re.fullmatch(rf"\.(?:{names})\.[0-9a-f]{{16}}\.tmp", path.name):
            remove_marked(path, marks)


def remove_empty(path: Path) -> None:
    """Remove a folder only if it is empty, so that no file can be lost; a link stays."""
    with contextlib.suppress(OSError), _folder_of(path) as folder:
        os.rmdir(path.name, dir_fd=folder)


def sweep(folder: Path, names: str) -> list[str]:
    """Remove what killed writers left in `folder` under temporary names of files that fit the pattern `names`.

    The caller holds the folder's lock, so that no other process writes there. Only files and folders of this user go;
    their names are returned.
    """
    fits = re.compile(rf"\.(?:{names})\.{_TOKEN}\.tmp(?:\.\w+)?")
    swept = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if fits.fullmatch(path.name) and is_own(path):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and remove_file(path):
                swept.append(path.name)
            elif stat.S_ISDIR(mode):
                with _folder_of(path) as parent:
                    shutil.rmtree(path.name, ignore_errors=True, dir_fd=parent)
                swept.append(path.name)
    return swept


# Renaming


def move(path: Path, target: Path) -> None:
    """Rename what hpcdl made, in a folder that the caller holds, to a free name. Raises FileExistsError otherwise."""
    # `exists` is False for a link to nothing, and rename silently replaces links, files and empty folders.
    if target.is_symlink() or target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    with _folder_of(path) as source, _folder_of(target) as destination:
        os.rename(path.name, target.name, src_dir_fd=source, dst_dir_fd=destination)
    sync_folder(target.parent)


def keep_others(folder: Path, kept: Path, is_known: Callable[[str], bool]) -> list[str]:
    """Move, and never remove, what others put into a folder of hpcdl: to the same path below the new folder `kept`.

    Links are moved as links. `is_known` recognises hpcdl's own paths. Returns the moved paths.
    """
    foreign = [name for name in paths_in(folder) if not is_known(name)]
    for name in foreign:
        make_folder((kept / name).parent)
        move(folder / name, kept / name)
    return foreign


def paths_in(folder: Path) -> list[str]:
    """Return the paths below a folder except folders; no link is followed. Raises OSError if a folder is closed."""

    def closed(error: OSError) -> None:
        raise error

    paths = []
    for parent, folders, files in os.walk(folder, onerror=closed):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        paths += [str(Path(parent, name).relative_to(folder)) for name in (*links, *files)]
    return sorted(paths)


def free_name(path: Path, suffix: str = "") -> Path:
    """Return `path`.1 with the suffix, or the first free number after it."""
    names = (path.with_name(f"{path.name}.{number}{suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.is_symlink() and not name.exists())


def move_over(path: Path, target: Path) -> None:
    """Rename a file that this process made over one that hpcdl keeps under the name `target`."""
    with _folder_of(path) as source, _folder_of(target) as destination:
        os.rename(path.name, target.name, src_dir_fd=source, dst_dir_fd=destination)
    sync_folder(target.parent)


# Output that the user asked for, where the user said


def make_output_folder(path: Path, flag: str = "--out ") -> list[Made]:
    """Call `make_folder` for a folder that the user named with `flag`. Raises UsageError if it cannot be made."""
    try:
        return make_folder(path)
    except OSError as error:
        raise UsageError(f"cannot write to {flag}{path}: {error.strerror}; choose another folder") from error


_REPORTS_FOLDERS = ("figures", "tables")


def holds_shards(path: Path) -> bool:
    """Return whether a folder is that of a data set, or of one of its splits."""
    below = ["*/shard-*.h5"] if next(path.glob("manifest.*"), None) else []
    return any(next(path.glob(names), None) for names in ("shard-*.h5", *below))


def check_output_folder(path: Path, flag: str = "--out") -> list[str]:
    """Return the names in a folder for output that hpcdl did not write, in order; hidden ones are left out.

    Raises UsageError if it is a file, or holds the shards of a data set.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{flag} {path} is a file; name a folder")
    if holds_shards(path):
        raise UsageError(f"{flag} {path} holds a data set; name another folder")
    with contextlib.suppress(OSError):  # absent, or readable for others
        return sorted(
            entry.name
            for entry in path.iterdir()
            if not (entry.name.startswith(".") or entry.name in _REPORTS_FOLDERS or _written_as(entry))
        )
    return []


def check_output(path: Path) -> None:
    """Raise UsageError if `path` exists and hpcdl did not write it, or it was changed since."""
    try:
        with _folder_of(path) as folder:
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
                number = errno.EROFS if os.statvfs(path.parent).f_flag & os.ST_RDONLY else errno.EACCES
                number = number if path.parent.is_dir() else errno.ENOTDIR
                raise OSError(number, os.strerror(number), str(path.parent))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.filename}: {error.strerror}; choose another place") from error
    if not path.is_symlink() and not path.exists():
        return
    if is_output(path):
        return
    problem = "is a folder" if path.is_dir() else "exists, and is not a file that hpcdl wrote and nobody changed"
    raise UsageError(f"{path} {problem}; move it away, or choose another name")


def is_output(path: Path) -> bool:
    """Return whether `path` is a plain file that hpcdl wrote where the user said, unchanged since."""
    return not path.is_symlink() and path.is_file() and _digest(path) in _written_as(path)


def remove_output(path: Path) -> bool:
    """Remove a file where the user said, only if hpcdl wrote it there and it is unchanged (its digest is noted).

    Anything else stays. Returns whether the file is gone.
    """
    return is_output(path) and remove_file(path)


def check_outputs(paths: Iterable[Path]) -> None:
    """Check several outputs before any is written; folders that do not exist yet will be made."""
    for path in paths:
        if path.parent.is_symlink() or path.parent.exists():
            check_output(path)


@contextlib.contextmanager
def writing_output(path: Path) -> Iterator[Path]:
    """As `replacing`, for a file where the user said: it replaces only what hpcdl wrote there, unchanged since."""
    check_output(path)
    try:
        with replacing(path) as temporary:
            yield temporary
            digest = _digest(temporary)
            marked = _mark(temporary, digest)  # before the rename: under its final name the file is never without it
        if not marked:
            _note_output(path, digest)
    except PermissionError as error:  # a sticky folder, where another user's note may not be replaced
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another place") from error


def _mark(path: Path, digest: str) -> bool:
    """Note the digest of a new file in its attributes; return False if the file system has none."""
    try:
        os.setxattr(path, _DIGEST, digest.encode())
    except OSError:
        return False
    return True


def _written_as(path: Path) -> list[str]:
    """Return the digest that hpcdl noted when it wrote `path`; empty for other files."""
    with contextlib.suppress(OSError):
        return [os.getxattr(path, _DIGEST, follow_symlinks=False).decode("ascii", "replace")]
    return [noted] if (noted := _outputs(path.parent).get(path.name)) else []


def _note_output(path: Path, digest: str) -> None:
    digests = {name: value for name, value in _outputs(path.parent).items() if (path.parent / name).exists()}
    with creating(path.parent / OUTPUTS, durable=False) as file:
        file.write(json.dumps({**digests, path.name: digest}, indent=1).encode())


def _outputs(folder: Path) -> dict[str, str]:
    notes = folder / OUTPUTS
    with contextlib.suppress(OSError, ValueError):
        if is_own_file(notes):
            digests = json.loads(notes.read_bytes())
            return {str(name): str(value) for name, value in digests.items()} if isinstance(digests, dict) else {}
    return {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# Durability


def sync_file(path: Path) -> None:
    """Force the bytes of `path` to the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make a rename in `path` durable; file systems that cannot sync a folder are ignored."""
    with contextlib.suppress(OSError):
        sync_file(path)
