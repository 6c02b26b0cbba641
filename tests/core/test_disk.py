"""Only files that hpcdl made are removed, and nothing is written through a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.core.storage import disk
from hpcdl.core.storage.files import write_output, write_text
from hpcdl.core.storage.lock import FILE_NAME, check_free, writing
from hpcdl.run.ended import one_line

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user's: needs root")
NOBODY = 65534


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("years of work")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def test_a_link_in_place_of_a_file_is_replaced(folder: Path, precious: Path) -> None:
    (folder / "x.json").symlink_to(precious)
    write_text(folder / "x.json", "new")
    (folder / "note").symlink_to(precious)
    disk.touch(folder / "note")
    assert precious.read_text() == "years of work"
    assert (folder / "x.json").read_text() == "new"
    assert not (folder / "note").is_symlink()


def test_temporary_names_cannot_be_guessed_and_nothing_is_left(folder: Path) -> None:
    seen = set()
    for number in range(3):
        with disk.creating(folder / "x") as file:
            seen |= {*names(folder)} - {"x"}
            file.write(b"%d" % number)
        with disk.replacing(folder / "y.h5") as temporary:
            temporary.write_bytes(b"0")
            seen |= {name for name in names(folder) if name.endswith(".tmp")}
            assert temporary.suffix == ".h5"
    assert len({name for name in seen if "/" not in name and name.endswith(".tmp")}) == 6
    assert names(folder) == ["x", "y.h5"]


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "\udcff" * 250])
def test_a_file_may_have_the_longest_name(folder: Path, name: str) -> None:
    write_text(folder / name, "new")
    assert names(folder) == [name]


def test_an_error_leaves_the_old_file(folder: Path) -> None:
    write_text(folder / "x", "old")

    def fail(way: object) -> None:
        with way(folder / "x"):  # type: ignore[operator]
            raise OSError("disk full")

    for way in (disk.creating, disk.replacing):
        with pytest.raises(OSError, match="disk full"):
            fail(way)
    assert (folder / "x").read_text() == "old"
    assert names(folder) == ["x"]


@pytest.mark.parametrize(
    ("call", "named", "change"),
    [
        ("fsync", (), lambda path: write_text(path, "x")),
        ("fdopen", (), lambda path: disk.create(path, b"x")),
        ("mkdir", ("file",), disk.make_folder),
    ],
)
def test_what_finds_no_room_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, named: tuple[str, ...], change: Callable[[Path], object]
) -> None:
    """The error names the path without space, although the kernel's error names none or only a relative one."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *named)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left") as caught:
        change(folder / "file")
    reported = f"cannot write {folder / 'file'}: No space left on device; make room"
    assert one_line(caught.value).startswith(reported)
    assert not names(folder)


def test_a_setgid_folder_gives_its_group_and_the_umask_the_mode(folder: Path) -> None:
    folder.chmod(0o2775)
    before = os.umask(0o007)
    try:
        with disk.replacing(folder / "y") as temporary:
            temporary.write_bytes(b"0")
        write_text(folder / "x", "0")
    finally:
        os.umask(before)
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in "xy"} == {0o660}


@as_root
def test_another_users_link_is_not_a_folder_to_write_to(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.symlink_to(folder)
    os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(OSError, match="it is a link that belongs to nobody; name the folder that it points to"):
        write_text(theirs / "x", "new")
    with pytest.raises(UsageError, match="cannot write"):
        write_output(theirs / "x", "new")
    own = tmp_path / "own"
    own.symlink_to("folder")
    write_text(own / "x", "new")
    assert names(folder) == ["x"]


def test_appending_follows_no_link(folder: Path, precious: Path) -> None:
    (folder / "log").symlink_to(precious)
    with pytest.raises(OSError, match="it is a link, which is not followed"):
        disk.open_to_append(folder / "log")
    os.mkfifo(folder / "pipe")
    with pytest.raises(OSError, match="not a plain file"):
        disk.open_to_append(folder / "pipe")


def test_a_copy_by_hard_links_stays_as_it_is(folder: Path) -> None:
    (folder / "log").write_text("a\n")
    (folder / "copy").hardlink_to(folder / "log")
    with os.fdopen(disk.open_to_append(folder / "log"), "ab") as file:
        file.write(b"b\n")
    assert (folder / "log").read_text() == "a\nb\n"
    assert (folder / "copy").read_text() == "a\n"


def test_only_a_plain_file_is_removed(folder: Path, precious: Path) -> None:
    (folder / "link").symlink_to(precious)
    (folder / "inner").mkdir()
    (folder / "file").touch()
    assert not disk.remove_file(folder / "link")
    assert not disk.remove_file(folder / "inner")
    assert disk.remove_file(folder / "file")
    assert disk.remove_file(folder / "file"), "gone before"
    assert names(folder) == ["inner", "link"]


@as_root
def test_another_users_file_is_not_removed(folder: Path) -> None:
    (folder / "theirs").touch()
    os.chown(folder / "theirs", NOBODY, NOBODY)
    assert not disk.remove_file(folder / "theirs")
    assert names(folder) == ["theirs"]


@pytest.mark.parametrize("foreign", ["step/thesis.txt", "step/rank-0.npz.bak", "step/more/rank-0.npz", "link"])
def test_a_folder_with_anything_else_in_it_stays_whole(folder: Path, precious: Path, foreign: str) -> None:
    (folder / "step").mkdir()
    (folder / "step" / "rank-0.npz").touch()
    if foreign == "link":
        (folder / "step" / "rank-1.npz").symlink_to(precious)
    else:
        (folder / foreign).parent.mkdir(exist_ok=True)
        (folder / foreign).touch()
    before = names(folder)
    assert disk.remove_folder(folder / "step", r"rank-\d+\.npz")
    assert disk.remove_content(folder / "step", r"rank-\d+\.npz")
    assert names(folder) == before


def test_a_folder_of_hpcdls_goes_and_its_content(folder: Path) -> None:
    for name in ("step", "other"):
        (folder / name).mkdir()
        (folder / name / "rank-0.npz").touch()
    assert disk.remove_folder(folder / "step", r"rank-\d+\.npz") == []
    assert disk.remove_content(folder / "other", r"rank-\d+\.npz") == []
    assert disk.remove_folder(folder / "absent", ".+") == []
    assert names(folder) == ["other"]


def test_a_link_in_place_of_a_folder_is_not_removed(folder: Path, tmp_path: Path) -> None:
    (folder / "rank-0.npz").touch()
    (tmp_path / "link").symlink_to(folder)
    assert disk.remove_folder(tmp_path / "link", ".+") == ["link"]
    assert names(folder) == ["rank-0.npz"]


def test_a_folder_that_took_the_place_of_what_was_made_stays(folder: Path) -> None:
    made = disk.make_folder(folder / "a" / "b")
    assert [item.path.name for item in made] == ["b", "a"]
    (folder / "a" / "b").rename(folder / "elsewhere")
    (folder / "a" / "b").mkdir()
    made[0].remove()
    assert names(folder) == ["a", "a/b", "elsewhere"]
    made[1].remove(if_empty=True)
    assert (folder / "a").is_dir()
    assert disk.make_folder(folder / "a") == []
    (folder / "file").touch()
    with pytest.raises(FileExistsError):
        disk.make_folder(folder / "file")


def test_sweeping_takes_temporary_names_of_hpcdls_alone(folder: Path) -> None:
    ours = [disk.temporary_name("shard-00001.h5"), ".shard-00002.h5.4711.tmp"]
    users = [".x.tmp", ".shard-00001.h5.tmp", ".thesis.0123456789abcdef.tmp", "shard-00001.h5"]
    for name in (*ours, *users):
        (folder / name).touch()
    (folder / disk.temporary_name("shard-00003.h5")).mkdir()
    assert len(disk.sweep(folder, r"shard-\d+\.h5")) == 3
    assert names(folder) == sorted(users)


def test_a_name_that_is_taken_is_not_moved_over(folder: Path, precious: Path) -> None:
    (folder / "run").mkdir()
    (folder / "taken").symlink_to(precious / "nowhere")
    with pytest.raises(FileExistsError):
        disk.move(folder / "run", folder / "taken")
    (folder / "run.1").mkdir()
    assert disk.free_name(folder / "run") == folder / "run.2"


def test_a_named_file_replaces_only_what_hpcdl_wrote(folder: Path, precious: Path) -> None:
    page = folder / "report.html"
    write_output(page, "one")
    write_output(page, "two")
    page.write_text("two, and what the user has added")
    for taken in (page, precious, folder):
        with pytest.raises(UsageError, match="move it away, or choose another name"):
            write_output(taken, "three")
    assert page.read_text() == "two, and what the user has added"
    page.unlink()
    page.symlink_to(precious)
    with pytest.raises(UsageError):
        write_output(page, "three")
    with pytest.raises(UsageError, match="Not a directory; choose another place"):
        write_output(precious / "x", "three")
    assert precious.read_text() == "years of work"


def test_without_attributes_a_file_beside_it_says_what_hpcdl_wrote(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without extended attributes is imitated; a file beside the output marks it as hpcdl's."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "setxattr", refused)
    monkeypatch.setattr(os, "getxattr", refused)
    for text in ("one", "two"):
        write_output(folder / "report.md", text)
    assert names(folder) == [disk.OUTPUTS, "report.md"]
    (folder / "report.md").write_text("changed")
    with pytest.raises(UsageError, match="move it away"):
        write_output(folder / "report.md", "three")


@pytest.mark.parametrize("kind", ["link", "hard link", "content"])
def test_a_lock_that_is_not_hpcdls_is_left_alone(folder: Path, precious: Path, kind: str) -> None:
    lock = folder / FILE_NAME
    if kind == "link":
        lock.symlink_to(precious)
    elif kind == "hard link":
        lock.hardlink_to(precious)
    else:
        lock.write_text("years of work")

    def hold() -> None:
        with writing(folder):
            pass

    with pytest.raises(UsageError, match=r"remove it|move it away"):
        hold()
    assert precious.read_text() == "years of work"
    assert lock.read_text() == "years of work"


def test_a_reader_of_a_lock_changes_nothing(folder: Path) -> None:
    check_free(folder)
    assert names(folder) == []
    with writing(folder), pytest.raises(UsageError, match="another hpcdl writes"):
        check_free(folder)
    check_free(folder)
    assert names(folder) == []


def test_a_lock_for_which_there_is_no_room_is_not_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"), writing(folder):
        pass
    assert names(folder) == []


def test_without_inodes_the_file_is_named_that_was_to_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then names a path by a descriptor; a lock is not taken for one of somebody else."""
    plain = os.open

    def full(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return plain(path, flags, mode, dir_fd=dir_fd)

    with pytest.raises(OSError, match="No space left") as of_file, disk.replacing(folder / "figure.svg") as temporary:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="No space left") as of_lock, writing(folder):
        pass
    paths = [error.value.filename for error in (of_file, of_lock)]
    assert paths == [str(folder / "figure.svg"), str(folder / FILE_NAME)]
