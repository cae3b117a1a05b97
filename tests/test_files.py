"""Whole files or none."""

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compressnas import files
from compressnas.errors import InputError
from compressnas.files import whole_file, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("content, expected", [("häh\n", "häh\n".encode()), (b"\x00\xff", b"\x00\xff"), ("", b"")])
def test_content_is_written_as_given(content: str | bytes, expected: bytes, tmp_path: Path) -> None:
    for path in (tmp_path / "new.txt", str(tmp_path / "new.txt")):
        write_whole(path, content)
        assert (tmp_path / "new.txt").read_bytes() == expected
    assert names(tmp_path) == ["new.txt"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_the_old_file_survives_an_exception(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "old")
    expected = InputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), whole_file(path) as part:
        part.write_text("half of the n")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["result.json"]


def test_nothing_appears_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with whole_file(path) as part:
        part.write_text("new")
        assert not path.exists() and part.suffix == ".safetensors" and part.parent == tmp_path
    assert path.read_text() == "new"


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    program = (
        "import os, signal, sys\nfrom compressnas.files import whole_file\n"
        "with whole_file(sys.argv[1]) as part:\n"
        "    part.write_text('half of the n')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    left_over = [name for name in names(tmp_path) if name != "result.json"]
    assert len(left_over) == 1 and left_over[0].startswith(".part-")


def test_a_full_disk_is_bad_input_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "old")

    def full(file: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match=r"cannot write .*result.json: No space left on device") as caught:
        write_whole(path, "new")
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert path.read_text() == "old" and names(tmp_path) == ["result.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_device_that_is_really_full(tmp_path: Path) -> None:
    expected = pytest.raises(InputError, match="No space left on device")
    with expected, whole_file(tmp_path / "result.json"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    assert names(tmp_path) == []


def test_a_disk_that_is_full_when_the_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_whole(tmp_path / "result.json", "new")
    assert names(tmp_path) == []


def test_a_folder_that_is_missing_or_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing" / "a.json", tmp_path / "file" / "a.json"):
        with pytest.raises(InputError, match=r"cannot write .*a.json: "):
            write_whole(path, "new")


def test_a_target_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*taken: "):
        write_whole(tmp_path / "taken", "new")
    assert names(tmp_path) == ["taken"]


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**settings: object) -> tuple[int, str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files.tempfile, "mkstemp", refused)  # permissions do not stop the superuser
    with pytest.raises(InputError, match=r"cannot write .*a.json: Permission denied"):
        write_whole(tmp_path / "a.json", "new")


@pytest.mark.usefixtures("umask")
def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.umask(0o027) == 0o027  # looking at it has not changed it
