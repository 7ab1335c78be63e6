"""The disk tier: chunks in slabs below one root folder, within a quota.

The parts: `slabs` (bytes and checks), `slabtable` (whose slots are free), `rootfolder` (whose
folder it is), `files` (the operating system). The format is docs/format.md.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvfold.errors import StoreError
from kvfold.sizes import format_bytes
from kvfold.store import slabs
from kvfold.store.files import FileSystem, OpenFiles, sync_folder
from kvfold.store.rootfolder import RootFolder
from kvfold.store.slabs import PAGE, ReadOutcome, SlabHeader, SlotHeader
from kvfold.store.slabtable import INDEX_BITS, INDEX_MASK, Slab, SlabTable, State

__all__ = ["DiskTier", "Found", "ReadOutcome"]

MAX_OPEN_FILES = 256
GROWTH_PAUSE_S = 10.0


class Found(NamedTuple):
    """A slot whose header is right. Its payload is checked when it is read."""

    slot: int
    key: bytes
    namespace: bytes
    payload_bytes: int
    slot_bytes: int
    sequence: int


class DiskTier:
    """Chunks in fixed-size slots of preallocated files below `root`, `quota_bytes` at most.

    `add_class`, `slots`, `alloc`, `free` and `steal_candidate` are for the store's main thread and
    do no disk I/O, except that `alloc` may remove an empty slab; everything else is for any thread.
    A slot must not be freed while it is being written or read. Raises `StoreError` if the root
    cannot be had or holds less than the quota.
    """

    def __init__(
        self,
        root: Path,
        quota_bytes: int,
        *,
        files: FileSystem | None = None,
        direct: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quota_bytes = quota_bytes
        self._files = files or FileSystem()
        self._clock = clock
        self._lock = threading.Lock()
        self._growth_error: OSError | None = None
        self._retry_at_s = 0.0
        self._rejected_slabs = 0
        self._root = RootFolder(root, self._files)
        try:
            self.direct = direct is not False and self._root.supports_direct()
            if direct and not self.direct:
                raise StoreError(f"disk {self._root.path}: its filesystem has no direct I/O")
            self._flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0)
            self._open = OpenFiles(self._files, self._flags, MAX_OPEN_FILES)
            self._table = SlabTable(self._root.slabs, quota_bytes)
            self._adopt_slabs()
            self._check_space()
        except OSError as error:
            self._root.close()
            raise StoreError(f"disk {self._root.path}: {error.strerror or error}") from error
        except BaseException:
            self._root.close()
            raise

    def close(self) -> None:
        """Close all files and let go of the root; `sync` first, and use nothing afterwards."""
        self._open.close()
        self._root.close()

    # --- what there is

    @property
    def used_bytes(self) -> int:
        """Bytes of all slabs, which is what the quota bounds."""
        return self._table.slab_bytes

    def report(self) -> dict[str, object]:
        """Figures for people and metrics; `growth_error` says why the tier does not grow now."""
        with self._lock:
            found = list(self._table.slabs.values())
            error = self._growth_error
        return {
            "path": str(self._root.path),
            "direct": self.direct,
            "quota_bytes": self.quota_bytes,
            "used_bytes": sum(slab.shape.length_bytes for slab in found),
            "slabs": len(found),
            "unscanned_slabs": sum(slab.state is State.UNSCANNED for slab in found),
            "rejected_slabs": self._rejected_slabs,
            "slots_used": sum(slab.used for slab in found),
            "growth_error": None if error is None else error.strerror or str(error),
        }

    def remember_namespace(self, digest: bytes, text: str) -> None:
        """Keep a namespace's clear text (JSON, up to 1 MiB) beside the slabs. Raises `OSError`."""
        self._root.remember_text(digest, text)

    def namespaces(self) -> dict[bytes, str]:
        """Return digest -> clear text of every namespace remembered in this root."""
        return self._root.read_texts()

    # --- slots, for the main thread

    def add_class(self, slot_bytes: int) -> None:
        """Make slots of `slot_bytes`, a multiple of 4096, available.

        Raises `StoreError` with the bytes needed if the quota cannot own a slab for every class
        added.
        """
        with self._lock:
            self._table.add_class(slot_bytes)

    def slots(self, slot_bytes: int) -> int:
        """How many slots the class has, plus those it could get from quota that nobody owns."""
        with self._lock:
            return self._table.slots(slot_bytes, may_grow=not self._growth_paused())

    def alloc(self, slot_bytes: int) -> int:
        """Return a free slot of the class (slab number << 20 | index), or -1 if there is none."""
        with self._lock:
            slot = self._table.take(slot_bytes)
            if slot < 0 and self._make_room(slot_bytes):
                self._table.plan(slot_bytes)
                slot = self._table.take(slot_bytes)
            return slot

    def free(self, slot: int) -> None:
        """Give a slot back; its bytes stay until they are overwritten."""
        with self._lock:
            self._table.free(slot)

    def steal_candidate(self, slot_bytes: int) -> list[int] | None:
        """Return the slots of other classes that, once all freed, let this class grow by a slab.

        They fill the slabs that are cheapest to drain, those of classes that nobody added first; no
        added class loses its last slab. None if that is impossible, or the filesystem is full.
        """
        with self._lock:
            if self._growth_paused():
                return None
            victims = self._table.victims(slot_bytes, self._table.slabs.values())
            return None if victims is None else [n for slab in victims for n in slab.used_slots()]

    # --- bytes, for any thread

    def write(
        self, slot: int, key: bytes, namespace: bytes, payload: memoryview, sequence: int
    ) -> None:
        """Write a chunk into a slot from `alloc`.

        `payload`: 1 to slot_bytes contiguous bytes, sent from where they lie if they begin on a
        page. Raises `OSError`; then the slot holds nothing and is to be freed.
        """
        payload = payload.cast("B")
        slab = self._table.slabs[slot >> INDEX_BITS]
        assert len(key) == len(namespace) == 32
        assert 1 <= len(payload) <= slab.shape.slot_bytes
        # The epoch is filled in when the slab is sure to exist.
        header = SlotHeader(b"", key, namespace, len(payload), sequence, slabs.checksum(payload))
        epoch = slab.epoch
        try:
            self._write(slab, slot & INDEX_MASK, header, payload)
        except FileNotFoundError:
            # Removed by hand: all its chunks are gone, and the slab is made anew.
            with slab.making:
                if slab.state is State.LIVE and slab.epoch == epoch:  # nobody has made it yet
                    slab.state = State.PLANNED
            self._write(slab, slot & INDEX_MASK, header, payload)

    def read(self, slot: int, key: bytes, namespace: bytes, out: memoryview) -> ReadOutcome:
        """Fill `out`, which has the chunk's exact length, and check it. Raises `OSError`.

        Unless the outcome is OK, `out` holds arbitrary bytes and the slot is to be freed.
        """
        out = out.cast("B")
        slab = self._table.slabs.get(slot >> INDEX_BITS)
        if slab is None:
            return ReadOutcome.CORRUPT_EPOCH
        wanted = SlotHeader(slab.epoch, key, namespace, len(out), 0, b"")
        offset = slab.shape.offset(slot & INDEX_MASK)
        try:
            with self._open.use(slab.path) as fd:
                return slabs.read_slot(self._files, fd, offset, slab.shape.slot_bytes, wanted, out)
        except FileNotFoundError:
            return ReadOutcome.CORRUPT_HEADER

    def scan(self) -> Iterator[list[Found]]:
        """Read the slot headers that an earlier run left, a slab at a time.

        What is found is in use from then on; the rest is free. Two slots may hold one key
        (docs/format.md, 3): keep the one of the larger sequence and free the other. A chunk found
        while a newer one is in memory likewise.
        """
        while True:
            with self._lock:
                waiting = (s for s in self._table.slabs.values() if s.state is State.UNSCANNED)
                slab = next(waiting, None)
            if slab is None:
                return
            found = self._read_headers(slab)
            with self._lock:
                self._table.scanned(slab, [item.slot & INDEX_MASK for item in found])
            if found:
                yield found

    def sync(self) -> None:
        """Make every finished write durable. Raises `OSError`."""
        with self._lock:
            dirty = [slab for slab in self._table.slabs.values() if slab.dirty]
        for slab in dirty:
            slab.dirty = False
            try:
                with self._open.use(slab.path) as fd:
                    self._files.sync_data(fd)
            except FileNotFoundError:
                continue  # given up or removed by hand: nothing to keep
            except OSError:
                slab.dirty = True
                raise

    # --- start

    def _adopt_slabs(self) -> None:
        names = self._files.list(self._root.slabs)
        numbers = (slabs.slab_number(name) for name in names)
        for number in sorted(number for number in numbers if number is not None):
            path = self._root.slabs / slabs.slab_name(number)
            header = self._load_header(path)
            if header is None:
                self._rejected_slabs += 1
                self._files.remove(path)
            else:
                self._table.admit(Slab(number, path, header.shape, header.epoch, State.UNSCANNED))
        for slab in list(self._table.slabs.values()):
            if self._table.slab_bytes <= self.quota_bytes:
                break
            self._files.remove(slab.path)  # the quota is smaller than it was: the oldest go
            self._table.forget(slab)

    def _load_header(self, path: Path) -> SlabHeader | None:
        """Return the header, less the slots that a cut file lost; None if the file is no slab."""
        try:
            fd = self._files.open(path, self._flags)
        except OSError as error:
            if error.errno == errno.ELOOP:  # a symbolic link
                return None
            raise
        try:
            header = slabs.parse_slab_header(slabs.read_page(self._files, fd, 0))
            if header is None:
                return None
            length = header.shape.length_bytes
            if self._files.size(fd) < length <= self.quota_bytes - self._table.slab_bytes:
                with suppress(OSError):  # no space to mend it: use what is left
                    self._files.allocate(fd, length)
            shape = header.shape.cut(self._files.size(fd))
            return SlabHeader(shape, header.epoch) if shape.slot_count else None
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            raise
        finally:
            self._files.close(fd)

    def _check_space(self) -> None:
        free = self._files.free_bytes(self._root.path)
        own = self._table.slab_bytes
        if self.quota_bytes > free + own:
            raise StoreError(
                f"disk {self._root.path}: a quota of {format_bytes(self.quota_bytes)}"
                f" ({self.quota_bytes} bytes), but only {format_bytes(free + own)}"
                f" ({free + own} bytes) to be had: {format_bytes(free)} free and"
                f" {format_bytes(own)} in kvfold's slabs; lower the quota or make room"
            )

    def _read_headers(self, slab: Slab) -> list[Found]:
        found = []
        shape = slab.shape
        base = slab.number << INDEX_BITS
        try:
            with self._open.use(slab.path) as fd:
                for index in range(shape.slot_count):
                    with suppress(OSError):  # an unreadable header is a free slot
                        page = slabs.read_page(self._files, fd, shape.offset(index))
                        header = slabs.parse_slot_header(page, shape.slot_bytes)
                        if header is not None and header.epoch == slab.epoch:
                            _, key, namespace, payload_bytes, sequence, _ = header
                            item = (key, namespace, payload_bytes, shape.slot_bytes, sequence)
                            found.append(Found(base | index, *item))
        except OSError:
            return []  # it cannot be opened: nothing in it can be served
        return found

    # --- growing

    def _growth_paused(self) -> bool:
        return self._growth_error is not None and self._clock() < self._retry_at_s

    def _pause_growth(self, error: OSError) -> None:
        self._growth_error = error
        self._retry_at_s = self._clock() + GROWTH_PAUSE_S

    def _make_room(self, slot_bytes: int) -> bool:
        """Whether the class may have one more slab; removes empty ones of others for it."""
        if self._growth_paused():
            return False
        victims = self._table.victims(slot_bytes, self._table.empty_slabs())
        if victims is None:
            return False
        for slab in victims:
            self._open.drop(slab.path)
            try:
                self._files.remove(slab.path)
            except FileNotFoundError:
                pass  # removed by hand
            except OSError as error:
                self._pause_growth(error)
                return False
            self._table.forget(slab)
        return True

    def _write(self, slab: Slab, index: int, header: SlotHeader, payload: memoryview) -> None:
        if slab.state is not State.LIVE:
            self._make(slab)
        header = header._replace(epoch=slab.epoch)
        with self._open.use(slab.path) as fd:
            slabs.write_slot(self._files, fd, slab.shape.offset(index), header, payload)
        slab.dirty = True

    def _make(self, slab: Slab) -> None:
        """Make a planned slab's file; on failure the tier keeps its present size for a while."""
        with slab.making:
            if slab.state is State.LIVE:
                return
            if slab.state is State.FAILED:
                raise OSError(errno.ENOSPC, "its slab could not be made", str(slab.path))
            self._open.drop(slab.path)
            slab.epoch = secrets.token_bytes(16)
            try:
                self._make_file(slab)
            except OSError as error:
                with suppress(OSError):
                    self._files.remove(slab.path)
                with self._lock:
                    self._table.fail(slab)
                    self._pause_growth(error)
                raise
            with self._lock:
                slab.state = State.LIVE
                self._growth_error = None

    def _make_file(self, slab: Slab) -> None:
        """Preallocate the slab, then write and sync its header, then its name."""
        page = slabs.aligned_buffer(PAGE)
        page[:] = slabs.pack_slab_header(SlabHeader(slab.shape, slab.epoch))
        fd = self._files.open(slab.path, self._flags | os.O_CREAT | os.O_TRUNC)
        try:
            self._files.allocate(fd, slab.shape.length_bytes)
            if self._files.pwrite(fd, [page], 0) != PAGE:
                raise OSError(errno.EIO, "short write of a slab header", str(slab.path))
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        sync_folder(self._files, self._root.slabs)
