"""The disk tier's root folder: whose it is, its format, and who holds it (docs/format.md, 1)."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvfold.errors import StoreError
from kvfold.store.files import FileSystem, read_file, sync_folder, write_file
from kvfold.store.slabs import PAGE, aligned_buffer

FORMAT = b"kvfold-disk 1\n"
MAX_TEXT_BYTES = 1 << 20
_NAMESPACE_NAME = re.compile(r"([0-9a-f]{64})\.json")


class RootFolder:
    """A root that this process has locked; any failure to get there is a `StoreError`."""

    def __init__(self, path: Path, files: FileSystem) -> None:
        self.path = path.resolve()
        self.slabs = self.path / "slabs"
        self.texts = self.path / "namespaces"
        self._files = files
        self._known: set[bytes] = set()
        self._writing = threading.Lock()
        with self._explained():
            self._own_folder(self.path)
            self._lock_fd = self._lock()
            try:
                self._check_format()
                for folder in (self.slabs, self.texts):
                    self._own_folder(folder)
                sync_folder(files, self.path)
            except BaseException:
                files.close(self._lock_fd)
                raise

    def close(self) -> None:
        """Let go of the lock."""
        self._files.close(self._lock_fd)

    def supports_direct(self) -> bool:
        """Whether files here can be read past the page cache."""
        try:
            fd = self._files.open(self.path / "lock", os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        try:
            self._files.pread(fd, [aligned_buffer(PAGE)], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            self._files.close(fd)
        return True

    def remember_text(self, digest: bytes, text: str) -> None:
        """Keep the clear text (JSON, at most 1 MiB) of a namespace; again changes nothing."""
        # All clients of an engine bring the same text at once, on several disk threads.
        with self._writing:
            if digest not in self._known:
                self._remember(digest, text)

    def _remember(self, digest: bytes, text: str) -> None:
        path = self.texts / f"{digest.hex()}.json"
        content = text.encode()
        if len(content) > MAX_TEXT_BYTES:
            raise StoreError(f"namespace text of {len(content)} bytes: at most {MAX_TEXT_BYTES}")
        kept = None
        with suppress(FileNotFoundError):
            kept = read_file(self._files, path, MAX_TEXT_BYTES)
        if kept != content:
            write_file(self._files, path, content)
        self._known.add(digest)

    def read_texts(self) -> dict[bytes, str]:
        """Return digest -> clear text of the namespaces remembered here, less unreadable ones."""
        texts = {}
        for name in sorted(self._files.list(self.texts)):
            match = _NAMESPACE_NAME.fullmatch(name)
            if match is None:
                continue
            with suppress(OSError, ValueError):
                content = read_file(self._files, self.texts / name, MAX_TEXT_BYTES)
                if content is not None:
                    text = content.decode()
                    json.loads(text)
                    texts[bytes.fromhex(match[1])] = text
        return texts

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"disk {self.path}: cannot be used ({error.strerror or error}): expected a folder"
                f" that user {os.geteuid()} may create and write"
            ) from error

    def _own_folder(self, path: Path) -> None:
        with suppress(FileExistsError):
            if path == self.path:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._files.make_folder(path)
        found = self._files.stat(path)
        if not stat.S_ISDIR(found.st_mode):
            raise StoreError(f"disk {path}: expected a folder")
        if found.st_uid != os.geteuid():
            raise StoreError(
                f"disk {path}: belongs to user {found.st_uid}, expected user {os.geteuid()}: give"
                " kvfold a folder of its own"
            )
        if found.st_mode & 0o022:
            raise StoreError(
                f"disk {path}: mode {stat.S_IMODE(found.st_mode):o} lets others write here,"
                f" expected 700: run chmod 700 {path}"
            )

    def _lock(self) -> int:
        fd = self._files.open(self.path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            self._files.lock(fd)
            self._files.pwrite(fd, [memoryview(b"%19d\n" % os.getpid())], 0)
        except BlockingIOError:
            holder = self._holder(fd)
            self._files.close(fd)
            raise StoreError(
                f"disk {self.path}: in use by the store with pid {holder}: stop it, or give this"
                " store another folder"
            ) from None
        except BaseException:
            self._files.close(fd)
            raise
        return fd

    def _holder(self, fd: int) -> str:
        text = bytearray(20)
        count = self._files.pread(fd, [memoryview(text)], 0)
        digits = bytes(text[:count]).strip()
        return digits.decode() if digits.isdigit() else "unknown"

    def _check_format(self) -> None:
        path = self.path / "format"
        try:
            found = read_file(self._files, path, 64)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                if self._files.list(self.slabs):
                    raise StoreError(
                        f"disk {self.path}: has slabs but no file 'format': restore it, or empty"
                        " the folder"
                    ) from None
            write_file(self._files, path, FORMAT)
            return
        if found != FORMAT:
            raise StoreError(
                f"disk {self.path}: format {found!r}, expected {FORMAT!r}: another version of"
                " kvfold wrote it; empty the folder or give this store another one"
            )
