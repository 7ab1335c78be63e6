"""Which entry has a key: a hash table made of arrays, without a Python object per entry.

A cell of the table is one uint64: the upper half of the key's first word, then the entry number
plus one (an empty cell is 0). The lower bits of the same word choose the cell to start at; keys
are uniformly random, so they are their own hash. Collisions probe linearly. At most half of the
cells are in use, so a present key is found in 1.5 cells on average, and nearly every wrong cell
is rejected by the upper half alone, without touching the key it stands for.

Every operation runs over a whole batch: in each round all keys that are still undecided look at
their next cell. Removal leaves no tombstones, so the table never decays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Entries = NDArray[np.int64]

_UPPER = np.uint64(0xFFFF_FFFF_0000_0000)
_LOWER = np.uint64(0x0000_0000_FFFF_FFFF)
_ONE = np.uint64(1)
_MAX_CAPACITY = 1 << 31


class KeyIndex:
    """A map from 32-byte keys to entry numbers, which the caller hands out.

    Keys are uint64 arrays of shape (n, 4), entries int64 arrays of shape (n,). Cost per entry of
    capacity: 32 bytes of key, 4 bytes of position and 16 to 32 bytes of table; memory that was
    never used is never touched.
    """

    keys: Keys
    """Key of each live entry, shape (capacity, 4); rows of other entries mean nothing."""

    def __init__(self, capacity: int) -> None:
        self.keys = np.zeros((0, 4), np.uint64)
        self._size = 0
        self._make(capacity)

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        return len(self.keys)

    def grow(self, capacity: int) -> None:
        """Make room for entries 0..capacity-1; live entries stay. Rebuilds the table: O(n)."""
        if capacity <= self.capacity:
            return
        cells = self._table[self._table != 0]
        entries = ((cells & _LOWER) - _ONE).astype(np.int64)
        old_keys = self.keys
        self._make(capacity)
        self.keys[: len(old_keys)] = old_keys
        self._place(self.keys[entries, 0], entries)

    def find(self, keys: Keys) -> Entries:
        """Entry of each key, or -1. Keys may repeat."""
        first = np.ascontiguousarray(keys[:, 0])
        found = np.full(len(first), -1, np.int64)
        at = (first & self._mask).view(np.int64)
        rows: Entries | None = None  # rows of `keys` still undecided; None = all, in order
        while len(at):
            cells = self._table.take(at)
            same = ((cells ^ first) & _UPPER) == 0
            # An empty cell may look like a match for a key whose upper half is zero.
            used = cells != 0
            hits = np.flatnonzero(same & used)
            if len(hits):
                hit_rows = hits if rows is None else rows[hits]
                entries = ((cells[hits] & _LOWER) - _ONE).view(np.int64)
                wrong = self._differ(entries, keys.take(hit_rows, axis=0))
                found[hit_rows] = entries
                if wrong.any():
                    found[hit_rows[wrong]] = -1
                    same[hits[wrong]] = False
            rest = np.flatnonzero(used & ~same)
            rows = rest if rows is None else rows[rest]
            first = first[rest]
            at = (at[rest] + 1) & int(self._mask)
        return found

    def insert(self, keys: Keys, entries: Entries) -> None:
        """Add keys that are absent and distinct, under entry numbers that are not in use."""
        if not len(entries):
            return
        assert entries.min() >= 0, "entry below zero"
        assert entries.max() < self.capacity, "entry beyond the capacity"
        self.keys[entries] = keys
        self._place(np.ascontiguousarray(keys[:, 0]), entries)
        self._size += len(entries)

    def remove(self, entries: Entries) -> None:
        """Delete live, distinct entries.

        The cells behind a deleted one may have been pushed there by it, up to the next empty
        cell. They are taken out and placed anew.
        """
        if not len(entries):
            return
        at = self._position[entries].astype(np.int64)
        cells = self._table[at]
        assert ((cells & _LOWER) == (entries + 1).astype(np.uint64)).all(), "entry is not live"
        self._table[at] = 0
        self._size -= len(entries)
        moved: list[Entries] = []
        mask = int(self._mask)
        while len(at):
            at = (at + 1) & mask
            cells = self._table[at]
            # Each walk ends at the next cell that was empty, or that this call has emptied: the
            # cells behind that one belong to its own walk, so no cell is taken twice.
            used = np.flatnonzero(cells)
            at = at[used]
            self._table[at] = 0
            moved.append(((cells[used] & _LOWER) - _ONE).view(np.int64))
        rest = np.concatenate(moved)
        self._place(self.keys[rest, 0], rest)

    def _make(self, capacity: int) -> None:
        assert 0 <= capacity <= _MAX_CAPACITY
        cells = 1 << max(3, (2 * capacity - 1).bit_length())
        self.keys = np.zeros((capacity, 4), np.uint64)
        self._table: NDArray[np.uint64] = np.zeros(cells, np.uint64)
        self._position: NDArray[np.uint32] = np.zeros(capacity, np.uint32)
        self._mask = np.uint64(cells - 1)

    def _differ(self, entries: Entries, keys: Keys) -> NDArray[np.bool_]:
        difference = self.keys.take(entries, axis=0)
        difference ^= keys
        # Four columns combined by hand: a reduction over so short an axis is ten times slower.
        pairs = difference[:, :2] | difference[:, 2:]
        return (pairs[:, 0] | pairs[:, 1]).astype(np.bool_)

    def _place(self, first: NDArray[np.uint64], entries: Entries) -> None:
        """Put cells for `entries`, whose keys' first words are `first`, into the table."""
        cells = (first & _UPPER) | (entries + 1).astype(np.uint64)
        at = (first & self._mask).view(np.int64)
        mask = int(self._mask)
        while len(at):
            free = np.flatnonzero(self._table[at] == 0)
            # Several may want one free cell: all write, whoever can read itself back has it.
            self._table[at[free]] = cells[free]
            placed = self._table[at] == cells
            won = np.flatnonzero(placed)
            self._position[(cells[won] & _LOWER).view(np.int64) - 1] = at[won]
            lost = np.flatnonzero(~placed)
            cells = cells[lost]
            at = (at[lost] + 1) & mask
