"""The one door between the disk tier and the operating system.

Every file operation of the tier goes through a `FileSystem`, so that a test can stand in the door
and run out of space, fail, tear a write or drop what was not synced. All errors are `OSError`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class FileSystem:
    """The real filesystem. A test derives from it and overrides what is to go wrong."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open without following a link at the end of `path`; returns the descriptor."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """Fill `parts` in order from `offset`; returns the bytes read, fewer at the file's end."""
        return os.preadv(fd, parts, offset)

    def pwrite(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """Write `parts` in order at `offset`; returns the bytes written, which may be fewer."""
        return os.pwritev(fd, parts, offset)

    def allocate(self, fd: int, length: int) -> None:
        """Own the blocks of the first `length` bytes; new ones read as zeros."""
        os.posix_fallocate(fd, 0, length)

    def sync(self, fd: int) -> None:
        """Make bytes, length and, of a folder, names durable."""
        os.fsync(fd)

    def sync_data(self, fd: int) -> None:
        """Make bytes durable (and the length if it is needed to read them)."""
        os.fdatasync(fd)

    def lock(self, fd: int) -> None:
        """Take the exclusive lock or raise `BlockingIOError`."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def stat(self, path: Path) -> os.stat_result:
        """Of `path` itself, not of what it links to."""
        return os.lstat(path)

    def free_bytes(self, path: Path) -> int:
        """What this user may still write to the filesystem of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def list(self, path: Path) -> list[str]:
        return os.listdir(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)


def sync_folder(files: FileSystem, path: Path) -> None:
    """Make the names in `path` durable."""
    fd = files.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.sync(fd)
    finally:
        files.close(fd)


def write_file(files: FileSystem, path: Path, content: bytes) -> None:
    """Replace `path` by `content`, whole or not at all, durably."""
    temporary = path.with_name(path.name + ".tmp")
    fd = files.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        written = files.pwrite(fd, [memoryview(content)], 0)
        if written != len(content):
            raise OSError(f"{temporary}: {written} of {len(content)} bytes were written")
        files.sync(fd)
    finally:
        files.close(fd)
    files.rename(temporary, path)
    sync_folder(files, path.parent)


def read_file(files: FileSystem, path: Path, limit_bytes: int) -> bytes | None:
    """Return the content of `path`, or None if it is longer than `limit_bytes`."""
    buffer = bytearray(limit_bytes + 1)
    fd = files.open(path, os.O_RDONLY)
    try:
        count = files.pread(fd, [memoryview(buffer)], 0)
    finally:
        files.close(fd)
    return None if count > limit_bytes else bytes(buffer[:count])


@dataclass(slots=True)
class _OpenFile:
    fd: int
    users: int = 0
    dropped: bool = False


class OpenFiles:
    """Open descriptors by path, at most about `limit` of them, shared by threads.

    A tier may have more slabs than a process may have descriptors. A descriptor is closed only when
    nobody uses it, so that a number is never handed out twice under a running read.
    """

    def __init__(self, files: FileSystem, flags: int, limit: int) -> None:
        self._files = files
        self._flags = flags
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[Path, _OpenFile] = {}

    @contextmanager
    def use(self, path: Path) -> Iterator[int]:
        """Yield a descriptor of `path`; raises `OSError` if it cannot be opened."""
        with self._lock:
            entry = self._open.pop(path, None)
            if entry is None:
                entry = _OpenFile(self._files.open(path, self._flags))
            entry.users += 1
            self._open[path] = entry  # most recently used last
            if len(self._open) > self._limit:
                self._close_idle()
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                if entry.dropped and not entry.users:
                    self._files.close(entry.fd)

    def drop(self, path: Path) -> None:
        """Close `path` as soon as nobody uses it; the next `use` opens it anew."""
        with self._lock:
            self._drop(path)

    def close(self) -> None:
        with self._lock:
            for path in list(self._open):
                self._drop(path)

    def _close_idle(self) -> None:
        idle = next((path for path, entry in self._open.items() if not entry.users), None)
        if idle is not None:
            self._drop(idle)

    def _drop(self, path: Path) -> None:
        entry = self._open.pop(path, None)
        if entry is None:
            return
        entry.dropped = True
        if not entry.users:
            self._files.close(entry.fd)
