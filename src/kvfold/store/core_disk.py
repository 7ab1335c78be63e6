"""What the disk threads should do next: reads for tickets first, then background writes.

A published chunk is queued for writing, pinned, at most a quarter of its class at a time. Over that
bound it waits its turn unpinned, and is lost to the disk if it is evicted before. When the disk
fails to write, writing pauses for 1, 2, 4 ... 60 s, and what was queued waits in the same way. So
does what finds no free slot while a restarted store still scans its disk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvfold.store.chunks import READY, ChunkTable, Ints, SlotClass
from kvfold.store.disk import Found, ReadOutcome
from kvfold.store.latency import Latency

log = logging.getLogger("kvfold.store")

# Makes what was written durable, then calls the function with whether that worked.
Sync = Callable[[Callable[[bool], None]], None]

_PAUSE_AT_MOST_S = 60.0
_WARN_EVERY_S = 10.0
# Chunks over the bound: how many are remembered, and how many are queued at a time.
_LATER_AT_MOST = 1 << 20
_REFILL = 64


@dataclass(frozen=True)
class Order:
    """One chunk to move between its host and its disk slot; `view` is the host side."""

    is_read: bool
    entry: int
    slot: int
    key: bytes
    namespace: bytes
    view: memoryview
    sequence: int


@dataclass(frozen=True)
class Drained:
    """How a drain ended: chunks written meanwhile, chunks in host only, and whether all of what
    is on disk is durable."""

    written: int
    host_only: int
    synced: bool = True


class DiskQueue:
    """Orders for the disk threads, and what becomes of them."""

    def __init__(self, table: ChunkTable, clock: Callable[[], float], sync: Sync) -> None:
        self._table = table
        self._clock = clock
        self._sync = sync
        self._reads: deque[int] = deque()
        self._writes: deque[int] = deque()
        self._queued_of: dict[int, int] = {}  # class number -> chunks queued or under way
        self._later: deque[int] = deque()  # to be queued when there is room; not pinned
        self._writes_out = 0
        self._sequence = time.time_ns() // 1000
        self._resume_s = 0.0
        self._pause_s = 0.0
        self._warn_again_s = 0.0
        self._drains: list[tuple[int, Callable[[Drained], None]]] = []
        self.scanning = table.disk is not None
        self.stored_chunks = 0
        self.stored_bytes = 0
        self.loaded_chunks = 0
        self.loaded_bytes = 0
        self.skipped = 0
        self.corrupt = 0
        self.failed_reads = 0
        self.failed_writes = 0
        self.read_latency = Latency()
        self.write_latency = Latency()

    @property
    def paused(self) -> bool:
        return self._clock() < self._resume_s

    @property
    def queued_reads(self) -> int:
        return len(self._reads)

    @property
    def queued_writes(self) -> int:
        return len(self._writes) + self._writes_out

    # ---- what goes in -----------------------------------------------------------------------

    def read(self, entries: Ints) -> None:
        """Queue reads of chunks that are in state reading."""
        self._reads.extend(entries.tolist())

    def published(self, entries: Ints) -> None:
        """Queue writes of chunks, all of one class, that have just become ready."""
        table = self._table
        if table.disk is None:
            return
        durable = entries[table.durable[entries]]
        queued = 0
        if len(durable) and not self.paused and not self._later:
            queued = min(len(durable), self._room(table.classes[table.cls[durable[0]]]))
            self._enqueue(durable[:queued])
        self._later.extend(durable[queued:].tolist())
        while len(self._later) > _LATER_AT_MOST:
            self._later.popleft()
            self.skipped += 1

    def _room(self, cls: SlotClass) -> int:
        """How many more chunks of a class may be queued; queued ones cannot be evicted."""
        bound = max(1, self._table.arena.slots(cls.arena) // 4)
        return max(0, bound - self._queued_of.get(cls.number, 0))

    def _enqueue(self, entries: Ints) -> None:
        if len(entries):
            table = self._table
            table.pin(entries)
            table.queued[entries] = True
            self._writes.extend(entries.tolist())
            number = int(table.cls[entries[0]])
            self._queued_of[number] = self._queued_of.get(number, 0) + len(entries)

    def _refill(self) -> None:
        """Queue chunks whose turn to be written has come at last."""
        table = self._table
        while self._later and len(self._writes) < _REFILL and not self.paused:
            entry = self._later[0]
            if self._is_host_only(entry):
                if not self._room(table.classes[table.cls[entry]]):
                    return
                self._enqueue(np.array([entry], np.int64))
            else:  # evicted before it was written
                self.skipped += 1
            self._later.popleft()

    def _is_host_only(self, entry: int) -> bool:
        table = self._table
        ready = table.state[entry] == READY and table.durable[entry]
        return bool(ready and table.disk_slot[entry] < 0 and not table.queued[entry])

    def _host_only(self) -> Ints:
        table = self._table
        missing = (table.state == READY) & (table.disk_slot < 0)
        return np.flatnonzero(missing & table.durable & ~table.queued)

    def flush(self, done: Callable[[Drained], None]) -> None:
        """Write every chunk that is in host only; call `done` when none is left, or it fails."""
        table = self._table
        host_only = self._host_only()
        if table.disk is None:
            done(Drained(0, len(host_only)))
            return
        order = np.argsort(table.cls[host_only], kind="stable")
        self._later = deque(host_only[order].tolist())
        self._resume_s = 0.0
        self._drains.append((self.stored_chunks, done))
        self._end_drains()

    def _end_drains(self) -> None:
        """Report to those who wait for a drain if nothing is left that can be written."""
        if self.queued_writes or (self._later and not self.paused):
            return
        drains, self._drains = self._drains, []
        if drains:
            self._sync(lambda synced: self._report_drains(drains, synced))

    def _report_drains(
        self, drains: list[tuple[int, Callable[[Drained], None]]], synced: bool
    ) -> None:
        host_only = len(self._host_only())
        for before, done in drains:
            done(Drained(self.stored_chunks - before, host_only, synced))

    # ---- what comes out ---------------------------------------------------------------------

    def take(self, most_chunks: int, most_bytes: int) -> list[Order]:
        """Orders for one task of one thread: all reads or all writes, or none."""
        orders: list[Order] = []
        self._refill()
        queue = self._reads or self._writes
        taken_bytes = 0
        while queue and len(orders) < most_chunks:
            size = int(self._table.payload[queue[0]])
            if orders and taken_bytes + size > most_bytes:
                break
            taken_bytes += size
            entry = queue.popleft()
            order = self._read_order(entry) if queue is self._reads else self._write_order(entry)
            if order is not None:
                orders.append(order)
        if self._drains:
            self._end_drains()
        return orders

    def _read_order(self, entry: int) -> Order:
        return self._order(entry, True, int(self._table.disk_slot[entry]), 0)

    def _write_order(self, entry: int) -> Order | None:
        table = self._table
        try:
            cls = table.classes[table.cls[entry]]
            # Until the scan has ended nobody knows what was used least recently.
            slot = -1 if self.paused else table.take_disk(cls, evict=not self.scanning)
        except OSError as error:
            self._pause(error)
            slot = -1
        if slot < 0:
            self._unqueue(entry)
            if self.paused or self.scanning:
                self._later.append(entry)
            else:  # every disk slot of the class is being read
                self.skipped += 1
            return None
        self._writes_out += 1
        self._sequence += 1
        return self._order(entry, False, slot, self._sequence)

    def _order(self, entry: int, is_read: bool, slot: int, sequence: int) -> Order:
        table = self._table
        key = table.index.keys[entry].tobytes()
        namespace = table.namespaces[table.namespace[entry]]
        return Order(is_read, entry, slot, key, namespace, table.view(entry), sequence)

    def _unqueue(self, entry: int) -> None:
        table = self._table
        table.queued[entry] = False
        self._queued_of[int(table.cls[entry])] -= 1
        table.unpin(np.array([entry], np.int64))

    # ---- what came of it --------------------------------------------------------------------

    def read_done(self, order: Order, outcome: ReadOutcome | OSError) -> str | None:
        """Note a finished read; return None, or why the chunk cannot be had."""
        entry = order.entry
        if outcome is ReadOutcome.OK:
            self.loaded_chunks += 1
            self.loaded_bytes += len(order.view)
            self._table.end_read(entry, True)
            return None
        self._table.end_read(entry, False)
        if isinstance(outcome, OSError):
            self.failed_reads += 1
            self._warn_of_loss("cannot be read from disk: %s", outcome)
            return f"disk: {outcome.strerror or outcome}"
        self.corrupt += 1
        self._warn_of_loss("is corrupt on disk (%s) and dropped", outcome.value)
        return f"corrupt on disk ({outcome.value})"

    def _warn_of_loss(self, what: str, why: object) -> None:
        """Log a lost chunk, but not thousands of them."""
        if self._clock() >= self._warn_again_s:
            self._warn_again_s = self._clock() + _WARN_EVERY_S
            log.warning("a chunk " + what, why)

    def write_done(self, order: Order, error: OSError | None) -> None:
        """Note a finished write."""
        self._writes_out -= 1
        table = self._table
        assert table.disk is not None
        if error is None:
            self._pause_s = 0.0
            self.stored_chunks += 1
            self.stored_bytes += len(order.view)
            table.placed(order.entry, order.slot, order.sequence)
        else:
            self.failed_writes += 1
            table.disk.free(order.slot)
            self._pause(error)
            self._later.append(order.entry)
        self._unqueue(order.entry)
        if self._drains:
            self._end_drains()

    def _pause(self, error: OSError) -> None:
        """Stop writing for a while; say so once until a write succeeds again."""
        if self.paused:
            return
        if not self._pause_s:
            log.warning("writing to disk fails (%s): chunks stay in host memory only", error)
        self._pause_s = min(_PAUSE_AT_MOST_S, 2 * self._pause_s or 1.0)
        self._resume_s = self._clock() + self._pause_s

    # ---- a disk that was there before -------------------------------------------------------

    def found(self, batch: list[Found]) -> None:
        """Take in chunks that the scan found. Of two with one key the later written stays."""
        by_size: dict[int, list[Found]] = {}
        for item in sorted(batch, key=lambda found: found.sequence):
            by_size.setdefault(item.slot_bytes, []).append(item)
        for slot_bytes, items in by_size.items():
            self._found_class(slot_bytes, items)

    def _found_class(self, slot_bytes: int, items: list[Found]) -> None:
        table = self._table
        self._sequence = max(self._sequence, items[-1].sequence)
        latest = {item.key: item for item in items}
        for item in items:
            if latest[item.key] is not item:
                self._free(item)
        items = list(latest.values())
        keys = np.frombuffer(b"".join(item.key for item in items), "<u8").reshape(-1, 4)
        entries = table.find(keys)
        for item, entry in zip(items, entries.tolist(), strict=True):
            if entry >= 0:
                self._found_again(item, entry)
        new = np.flatnonzero(entries < 0)
        if not len(new):
            return
        fresh = [items[row] for row in new.tolist()]
        table.add_found(
            keys[new],
            np.array([item.slot for item in fresh], np.int64),
            table.slot_class(slot_bytes),
            np.array([table.namespace_number(item.namespace) for item in fresh], np.int64),
            np.array([item.payload_bytes for item in fresh], np.int64),
            np.array([item.sequence for item in fresh], np.int64),
        )

    def _found_again(self, item: Found, entry: int) -> None:
        """A found chunk whose key is known: stored anew since the start, or found twice."""
        table = self._table
        one = np.array([entry], np.int64)
        cls = table.classes[table.cls[entry]]
        same = (
            cls.slot_bytes == item.slot_bytes
            and table.namespaces[table.namespace[entry]] == item.namespace
            and int(table.payload[entry]) == item.payload_bytes
        )
        idle = table.state[entry] == READY and not table.queued[entry]
        if same and table.disk_slot[entry] < 0 and idle:
            table.placed(entry, item.slot, item.sequence)
            return
        later = int(table.sequence[entry]) < item.sequence
        if same and later and table.disk_slot[entry] >= 0 and table.disk_idle(one)[0]:
            assert table.disk is not None
            table.disk.free(int(table.disk_slot[entry]))
            table.placed(entry, item.slot, item.sequence)
            return
        self._free(item)

    def _free(self, item: Found) -> None:
        assert self._table.disk is not None
        self._table.disk.free(item.slot)

    def scan_finished(self) -> None:
        """Everything on disk is known: put it in the order in which it was written."""
        self.scanning = False
        table = self._table
        old = np.flatnonzero(table.disk_slot >= 0)
        table.order_disk(old[np.argsort(table.sequence[old], kind="stable")])
