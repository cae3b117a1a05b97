"""Whole files or none: everything is written to a temporary name and renamed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressnas.errors import InputError


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it to `path` when the block ends well.

    A killed process leaves at most a file whose name starts with `.part-`; `path` itself is either the old file
    or the whole new one. The suffix is kept, since some writers choose a format by it.

    Raises:
        InputError: the folder is missing or read-only, or the disk is full.
    """
    path = Path(path)
    part = None
    try:
        handle, name = tempfile.mkstemp(prefix=".part-", suffix=path.suffix, dir=path.parent)
        part = Path(name)
        os.close(handle)
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(part, 0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(part, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write `content` to `path`, whole or not at all. Text is UTF-8. Raises InputError as `whole_file` does."""
    with whole_file(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
