"""Which entries were used least recently, in a ring of records with no Python object per entry.

Every touch writes a record, the entry's number, at the next position of a log that lives in a
ring, and remembers that position as the entry's latest. A record is live if it is its entry's
latest; all others are stale and are skipped. The oldest live record is the next to be evicted.

Entries that stay for long while others are touched again and again would leave the log full of
stale records. So touches also pay for compaction: once a quarter of the records are stale, a
sweep goes from the newest record towards the oldest, eight records for each one written, and
slides live ones up against the newer. Their order, and everything else, stays as it was at
any moment of the sweep, so no call ever has to wait for the end of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Entries = NDArray[np.int64]

_BATCH = 8192
_SLACK = 4 * _BATCH
_SWEEP_PER_RECORD = 8
_ABSENT = 0


class Recency:
    """A least-recently-used order over the entries 0..capacity-1.

    Amortised O(1) per entry. Only stale records that lie together can make one call longer, and
    they are never more than about half as many as the entries. Cost per entry of capacity: 24
    bytes.
    """

    _head: int
    _tail: int
    _live: int

    def __init__(self, capacity: int) -> None:
        self._make(capacity)

    def __len__(self) -> int:
        return self._live

    @property
    def capacity(self) -> int:
        return len(self._latest)

    def grow(self, capacity: int) -> None:
        """Make room for entries 0..capacity-1; the order stays. Rebuilds the log: O(entries)."""
        if capacity <= self.capacity:
            return
        entries, _ = self._live_records(self._head, self._tail - self._head)
        touched_ns = self._touched_ns
        self._make(capacity)
        for begin in range(0, len(entries), _BATCH):
            self._append(entries[begin : begin + _BATCH])
        self._touched_ns[: len(touched_ns)] = touched_ns

    def touch(self, entries: Entries) -> None:
        """Make entries the most recently used, the last one most of all. Adds absent ones.

        Entries may repeat: the last time counts.
        """
        now_ns = time.monotonic_ns()
        for begin in range(0, len(entries), _BATCH):
            batch = entries[begin : begin + _BATCH]
            self._append(batch)
            self._touched_ns[batch] = now_ns
            self._tidy(len(batch))

    def drop(self, entries: Entries) -> None:
        """Forget entries. Absent and repeated ones are fine."""
        for begin in range(0, len(entries), _BATCH):
            batch = np.unique(entries[begin : begin + _BATCH])
            self._live -= int(np.count_nonzero(self._latest[batch]))
            self._latest[batch] = _ABSENT
            self._tidy(len(batch))

    def pop(
        self, count: int, allowed: Callable[[Entries], NDArray[np.bool_]] | None = None
    ) -> Entries:
        """Take out up to `count` entries, the least recently used first.

        `allowed` is asked about entries in that order, perhaps about more than are needed. Those it
        refuses leave the order too, if they come before the last one taken: the caller touches
        them when it would allow them again.
        """
        taken: list[Entries] = []
        width = 64
        while count > 0 and self._live:
            width = min(max(width, count), self._tail - self._head)
            entries, positions = self._live_records(self._head, width)
            chosen = np.ones(len(entries), np.bool_) if allowed is None else allowed(entries)
            picks = np.flatnonzero(chosen)[:count]
            if len(picks) == count:
                end = int(picks[-1]) + 1
                self._head = int(positions[end - 1]) + 1
            else:
                end = len(entries)
                self._head += width
            self._latest[entries[:end]] = _ABSENT
            self._live -= end
            taken.append(entries[picks])
            count -= len(picks)
            width = min(2 * width, _BATCH)
        return np.concatenate(taken) if taken else np.zeros(0, np.int64)

    def oldest_stamp(self) -> int | None:
        """When the least recently used entry was touched (time.monotonic_ns); None if empty."""
        width = 64
        while self._live:
            width = min(width, self._tail - self._head)
            entries, positions = self._live_records(self._head, width)
            if len(entries):
                self._head = int(positions[0])
                return int(self._touched_ns[entries[0]])
            self._head += width
            width = min(2 * width, _BATCH)
        return None

    def _make(self, capacity: int) -> None:
        self._latest: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._touched_ns: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._ring: NDArray[np.int32] = np.zeros(2 * capacity + _SLACK, np.int32)
        self._head = self._tail = 1  # positions grow for ever; 0 means absent
        self._live = 0
        # A sweep's state: live records at or above `_packed` are done, those below `_unswept` are
        # not, and whatever lies between is stale.
        self._unswept = self._packed = self._head

    def _at(self, position: int, count: int) -> NDArray[np.int64]:
        """Places in the ring of `count` positions."""
        size = len(self._ring)
        begin = position % size
        places = np.arange(begin, begin + count)
        if begin + count > size:
            places[size - begin :] -= size
        return places

    def _live_records(self, position: int, count: int) -> tuple[Entries, NDArray[np.int64]]:
        """Live records among `count` positions: their entries and positions, oldest first."""
        entries = self._ring[self._at(position, count)]
        positions = np.arange(position, position + count)
        live = np.flatnonzero(self._latest[entries] == positions)
        return entries[live].astype(np.int64), positions[live]

    def _append(self, entries: Entries) -> None:
        while self._tail + len(entries) - self._head > len(self._ring):
            self._sweep(_BATCH)
        positions = np.arange(self._tail, self._tail + len(entries))
        absent = self._latest[entries] == _ABSENT
        self._ring[self._at(self._tail, len(entries))] = entries
        self._latest[entries] = positions  # of an entry that repeats, the last position stays
        self._live += int(np.count_nonzero(absent & (self._latest[entries] == positions)))
        self._tail += len(entries)

    def _tidy(self, records: int) -> None:
        """Pay for `records` records that may have become stale."""
        stale = self._tail - self._head - self._live
        if self._unswept > self._head or stale > self._live // 4 + _SLACK // 2:
            self._sweep(_SWEEP_PER_RECORD * records)

    def _sweep(self, records: int) -> None:
        """Slide live records of the next `records` positions up; begins a sweep if none is on."""
        if self._unswept <= self._head:
            self._unswept = self._packed = self._tail
        begin = max(self._head, self._unswept - records)
        entries, _ = self._live_records(begin, self._unswept - begin)
        self._packed -= len(entries)
        self._ring[self._at(self._packed, len(entries))] = entries
        self._latest[entries] = np.arange(self._packed, self._packed + len(entries))
        self._unswept = begin
        if begin == self._head:
            self._head = self._unswept = self._packed
