"""A filesystem that fails on demand, for tests of the disk tier."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from kvfold.store.files import FileSystem

PAGE = 4096


class FaultyFiles(FileSystem):
    """The real filesystem, with faults switched on by the test.

    `errors`: operation name -> errno raised by it. `short_bytes`: a write stops after so many bytes
    and says so. `torn_bytes`: a write stops after so many bytes and claims to be complete. `owner`:
    user that every folder belongs to. `free`: free bytes of the filesystem. `crash` undoes what was
    not synced.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.short_bytes: int | None = None
        self.torn_bytes: int | None = None
        self.owner: int | None = None
        self.free: int | None = None
        self.calls: list[str] = []
        self._paths: dict[int, Path] = {}
        self._unsynced: list[tuple[Path, int, bytes]] = []  # what a write replaced
        self._unnamed: set[Path] = set()  # made since their folder was synced

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self.errors:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._enter("open")
        if flags & os.O_CREAT:
            self._enter("create")
            if not path.exists():
                self._unnamed.add(path)
        if flags & os.O_DIRECT:
            self._enter("open_direct")
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def pread(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._enter("pread")
        return super().pread(fd, parts, offset)

    def pwrite(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._enter("pwrite")
        data = b"".join(parts)
        path = self._paths[fd]
        with path.open("rb") as file:
            file.seek(offset)
            self._unsynced.append((path, offset, file.read(len(data))))
        limit = self.short_bytes if self.torn_bytes is None else self.torn_bytes
        if limit is None:
            return super().pwrite(fd, parts, offset)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data[:limit])
        return len(data) if self.torn_bytes is not None else limit

    def allocate(self, fd: int, length: int) -> None:
        self._enter("allocate")
        super().allocate(fd, length)

    def sync(self, fd: int) -> None:
        self._enter("sync")
        super().sync(fd)
        self._settle(self._paths[fd])

    def sync_data(self, fd: int) -> None:
        self._enter("sync_data")
        super().sync_data(fd)
        self._settle(self._paths[fd])

    def _settle(self, path: Path) -> None:
        self._unsynced = [item for item in self._unsynced if item[0] != path]
        self._unnamed = {made for made in self._unnamed if made.parent != path}

    def stat(self, path: Path) -> os.stat_result:
        found = list(super().stat(path))
        if self.owner is not None:
            found[4] = self.owner
        return os.stat_result(found)

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.free is None else self.free

    def make_folder(self, path: Path) -> None:
        self._enter("make_folder")
        super().make_folder(path)

    def remove(self, path: Path) -> None:
        self._enter("remove")
        super().remove(path)

    def rename(self, old: Path, new: Path) -> None:
        self._enter("rename")
        super().rename(old, new)
        self._unnamed.discard(old)
        self._unsynced = [
            (new if path == old else path, at, data) for path, at, data in self._unsynced
        ]

    def crash(self, rng: random.Random) -> None:
        """Lose some of the pages that were not synced, and of the files whose names were not."""
        for path, offset, old in reversed(self._unsynced):
            if path.exists():
                with path.open("r+b") as file:
                    for start in range(0, len(old), PAGE):
                        if rng.random() < 0.5:
                            file.seek(offset + start)
                            file.write(old[start : start + PAGE])
        for path in self._unnamed:
            if path.exists() and rng.random() < 0.5:
                path.unlink()
        self._unsynced, self._unnamed = [], set()
