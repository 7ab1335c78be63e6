"""What the tiers hold, counted chunk by chunk for people and metrics.

A tally may run beside the store's loop: it only reads, a slice at a time so that the loop gets the
interpreter between two, and what changes meanwhile is counted in either way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.store.chunks import ABSENT, DISK, READING, READY, STATE_NAMES, WRITING, ChunkTable

_SLICE = 1 << 14
_STATES = len(STATE_NAMES)

_IN_HOST = np.zeros(_STATES, np.bool_)
_IN_HOST[[WRITING, READING, READY]] = True

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Tally:
    """Counts by class or namespace number; a row per tier (host, disk) where there are two.

    class_states: (classes, states) chunks; class_on_disk: (classes,); namespace_chunks:
    (namespaces,) chunks in either tier; tier_chunks, tier_bytes: (2, namespaces) chunks, payload.
    """

    class_states: Counts
    class_on_disk: Counts
    namespace_chunks: Counts
    tier_chunks: Counts
    tier_bytes: Counts
    pinned: int

    @property
    def in_host(self) -> int:
        return int(self.class_states[:, READY].sum())

    @property
    def only_on_disk(self) -> int:
        return int(self.class_states[:, DISK].sum())


def tally(table: ChunkTable) -> Tally:
    """Count every chunk. Safe beside the thread that changes the table."""
    classes, namespaces = len(table.classes), len(table.namespaces)
    # The arrays are replaced when the table grows: take each once, and what all of them have.
    state, cls, namespace = table.state, table.cls, table.namespace
    payload, disk_slot, pins = table.payload, table.disk_slot, table.pins
    entries = min(len(a) for a in (state, cls, namespace, payload, disk_slot, pins))
    class_states = np.zeros((classes, _STATES), np.int64)
    class_on_disk = np.zeros(classes, np.int64)
    namespace_chunks = np.zeros(namespaces, np.int64)
    tier_chunks = np.zeros((2, namespaces), np.int64)
    tier_bytes = np.zeros((2, namespaces), np.int64)
    pinned = 0
    for begin in range(0, entries, _SLICE):
        part = slice(begin, min(begin + _SLICE, entries))
        states, of_class, of_namespace = (
            array[part].astype(np.int64) for array in (state, cls, namespace)
        )
        # Numbers given out since we began are not counted.
        known = (states != ABSENT) & (of_class < classes) & (of_namespace < namespaces)
        live = begin + np.flatnonzero(known)
        if not len(live):
            continue
        states, of_class = states[known], of_class[known]
        of_namespace, size = of_namespace[known], payload[live]
        on_disk = disk_slot[live] >= 0
        counted = np.bincount(of_class * _STATES + states, minlength=classes * _STATES)
        class_states += counted.reshape(classes, _STATES)
        class_on_disk += np.bincount(of_class[on_disk], minlength=classes)
        in_host = states == READY
        namespace_chunks += np.bincount(of_namespace[in_host | on_disk], minlength=namespaces)
        for tier, here in enumerate((in_host, on_disk)):
            tier_chunks[tier] += np.bincount(of_namespace[here], minlength=namespaces)
            summed = np.bincount(of_namespace[here], size[here], minlength=namespaces)
            tier_bytes[tier] += summed.astype(np.int64)
        pinned += int(np.count_nonzero((pins[live] > 0) & _IN_HOST[states]))
        time.sleep(0)  # the loop may have the interpreter now
    return Tally(class_states, class_on_disk, namespace_chunks, tier_chunks, tier_bytes, pinned)
