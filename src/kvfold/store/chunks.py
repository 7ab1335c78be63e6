"""The chunk table: one entry per key, its state, and where its bytes are in both tiers.

All of it is arrays indexed by entry number, so that a batch of any size costs a few numpy calls.
This module takes and gives slots; who may do what when is decided by tickets, jobs and the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.store.arena import PAGE_BYTES, Arena
from kvfold.store.disk import DiskTier
from kvfold.store.index import KeyIndex
from kvfold.store.messages import Keys64
from kvfold.store.recency import Recency

ABSENT, WRITING, READING, READY, DISK = range(5)
STATE_NAMES = ("absent", "writing", "reading", "ready", "disk")

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# What `Tiers` says of each state: 0 absent, 1 disk, 2 host.
TIER_OF_STATE = np.array([0, 0, 1, 2, 1], np.uint8)
_FIRST_CAPACITY = 1 << 12
# Making room for entries in advance costs memory only when used, but is cheaper than growing.
_RESERVE_AT_MOST = 1 << 20


@dataclass(eq=False)
class SlotClass:
    """All chunks of one slot size. `arena` is the arena's number of it once a client uses it."""

    number: int
    slot_bytes: int
    host_order: Recency
    disk_order: Recency
    arena: int = -1
    windows: int = 0  # slots promised to admitted tickets
    writing: int = 0  # slots in the hands of jobs
    quarantined: int = 0
    waiting_tickets: int = 0  # queued: opened, no window yet


class ChunkTable:
    """Entries of all chunks in either tier. Every method that takes entries wants distinct ones."""

    def __init__(self, arena: Arena, disk: DiskTier | None) -> None:
        self.arena = arena
        self.disk = disk
        self.classes: list[SlotClass] = []
        self._by_size: dict[int, SlotClass] = {}
        self.namespaces: list[bytes] = []
        self._namespace_numbers: dict[bytes, int] = {}
        self.index = KeyIndex(0)
        self.capacity = 0
        self.state = np.zeros(0, np.uint8)
        self.cls = np.zeros(0, np.int16)
        self.namespace = np.zeros(0, np.int32)
        self.host_slot: Ints = np.zeros(0, np.int64)
        self.disk_slot: Ints = np.zeros(0, np.int64)
        self.pins = np.zeros(0, np.int32)
        self.payload: Ints = np.zeros(0, np.int64)
        self.sequence = np.zeros(0, np.uint64)
        self.durable: Bools = np.zeros(0, np.bool_)
        self.queued: Bools = np.zeros(0, np.bool_)  # waits for, or is under, a disk write
        self._free: Ints = np.zeros(0, np.int64)
        self._free_count = 0
        # Namespace numbers and keys of what became absent, while somebody wants to know.
        self.gone: list[tuple[NDArray[np.int32], Keys64]] | None = None
        self.evicted_host = 0
        self.evicted_disk = 0
        self._grow(_FIRST_CAPACITY)

    # ---- classes, namespaces, entries -------------------------------------------------------

    def slot_class(self, slot_bytes: int) -> SlotClass:
        """The class of this slot size, made if it is new."""
        known = self._by_size.get(slot_bytes)
        if known is None:
            capacity = self.capacity
            orders = Recency(capacity), Recency(capacity)
            known = SlotClass(len(self.classes), slot_bytes, *orders)
            self.classes.append(known)
            self._by_size[slot_bytes] = known
        return known

    def use_class(self, slot_bytes: int) -> SlotClass:
        """The class, ready for clients. Raises `StoreError` if a tier is too small for it."""
        number = self.arena.add_class(slot_bytes)
        if self.disk is not None:
            self.disk.add_class(slot_bytes)
        cls = self.slot_class(slot_bytes)
        cls.arena = number
        wanted = self.arena.slots(number)
        wanted += self.disk.slots(slot_bytes) if self.disk is not None else 0
        if self.capacity < min(wanted, _RESERVE_AT_MOST):
            self._grow(min(wanted, _RESERVE_AT_MOST))
        return cls

    def namespace_number(self, digest: bytes) -> int:
        number = self._namespace_numbers.get(digest)
        if number is None:
            number = self._namespace_numbers[digest] = len(self.namespaces)
            self.namespaces.append(digest)
        return number

    def known_namespace(self, digest: bytes) -> int | None:
        """The namespace's number if any chunk ever had it."""
        return self._namespace_numbers.get(digest)

    def _grow(self, capacity: int) -> None:
        old = self.capacity
        self.index.grow(capacity)
        for cls in self.classes:
            cls.host_order.grow(capacity)
            cls.disk_order.grow(capacity)
        more = capacity - old

        def longer(array: NDArray[np.generic], fill: int) -> NDArray[np.generic]:
            return np.concatenate((array, np.full(more, fill, array.dtype)))

        for name in ("state", "cls", "namespace", "pins", "payload", "sequence"):
            setattr(self, name, longer(getattr(self, name), 0))
        for name in ("durable", "queued"):
            setattr(self, name, longer(getattr(self, name), False))
        for name in ("host_slot", "disk_slot"):
            setattr(self, name, longer(getattr(self, name), -1))
        fresh = np.arange(capacity - 1, old - 1, -1, dtype=np.int64)
        self._free = np.concatenate(
            (self._free[: self._free_count], fresh, np.zeros(old, np.int64))
        )
        self._free_count += more
        self.capacity = capacity

    def _take_entries(self, count: int) -> Ints:
        while self._free_count < count:
            self._grow(2 * self.capacity)
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy()

    def _add(self, keys: Keys64, state: int, cls: SlotClass, namespace: int, payload: int) -> Ints:
        entries = self._take_entries(len(keys))
        self.index.insert(keys, entries)
        self.state[entries] = state
        self.cls[entries] = cls.number
        self.namespace[entries] = namespace
        self.payload[entries] = payload
        return entries

    def _forget(self, entries: Ints) -> None:
        """Make entries absent that have no slot in either tier any more."""
        if not len(entries):
            return
        if self.gone is not None:
            # Also what was never complete: others may have been told that it exists.
            self.gone.append((self.namespace[entries], self.index.keys[entries]))
        self.index.remove(entries)
        for cls, part in self._by_class(entries):
            cls.host_order.drop(part)
            cls.disk_order.drop(part)
        self.state[entries] = ABSENT
        self.pins[entries] = 0
        self.queued[entries] = False
        self.host_slot[entries] = -1
        self.disk_slot[entries] = -1
        self._free[self._free_count : self._free_count + len(entries)] = entries
        self._free_count += len(entries)

    def _by_class(self, entries: Ints) -> list[tuple[SlotClass, Ints]]:
        if len(self.classes) == 1 or not len(entries):
            return [(self.classes[0], entries)] if len(entries) else []
        numbers = self.cls[entries]
        return [(self.classes[n], entries[numbers == n]) for n in np.unique(numbers)]

    # ---- finding and recency ----------------------------------------------------------------

    def find(self, keys: Keys64) -> Ints:
        """Entry of each key, or -1."""
        return self.index.find(keys)

    def tiers(self, keys: Keys64) -> bytes:
        """One byte per key: 0 absent, 1 disk, 2 host. What is found counts as used."""
        entries = self.index.find(keys)
        present = entries >= 0
        tiers = np.where(present, TIER_OF_STATE[self.state[entries]], 0).astype(np.uint8)
        self.touch(entries[present])
        return tiers.tobytes()

    def touch(self, entries: Ints) -> None:
        """Count entries as used now, in both tiers; they may repeat."""
        for cls, part in self._by_class(entries):
            cls.host_order.touch(part[self.state[part] == READY])
            if self.disk is not None:
                cls.disk_order.touch(part[self.disk_slot[part] >= 0])

    def pin(self, entries: Ints) -> None:
        self.pins[entries] += 1

    def unpin(self, entries: Ints) -> None:
        """Undo a pin. What nobody reads any more may be evicted, the latest last."""
        self.pins[entries] -= 1
        idle = entries[(self.pins[entries] == 0) & (self.state[entries] == READY)]
        for cls, part in self._by_class(idle):
            cls.host_order.touch(part)

    # ---- host slots -------------------------------------------------------------------------

    def _evictable(self, entries: Ints) -> Bools:
        idle: Bools = (self.pins[entries] == 0) & (self.state[entries] == READY)
        return idle

    def take_host(self, cls: SlotClass, count: int) -> Ints:
        """Up to `count` host slots: free ones, then those of the least recently used chunks."""
        slots: list[int] = []
        while len(slots) < count:
            slot = self.arena.alloc(cls.arena)
            if slot >= 0:
                slots.append(slot)
                continue
            tried = self._others_are_older([c.host_order for c in self.classes], cls)
            if tried and self._steal_host(cls):
                continue
            victims = cls.host_order.pop(count - len(slots), self._evictable)
            if len(victims):
                slots.extend(self.host_slot[victims].tolist())
                self._leave_host(victims)
            elif tried or not self._steal_host(cls):
                break
        return np.array(slots, np.int64)

    @staticmethod
    def _others_are_older(orders: list[Recency], cls: SlotClass) -> bool:
        """Whether some other class holds what was used before anything of this class was."""
        if len(orders) == 1:
            return False
        own = orders[cls.number].oldest_stamp()
        stamps = (order.oldest_stamp() for order in orders)
        return any(stamp is not None and (own is None or stamp < own) for stamp in stamps)

    def free_host(self, slots: Sequence[int] | Ints) -> None:
        """Give host slots back that belong to no entry."""
        for slot in slots:
            self.arena.free(int(slot))

    def _leave_host(self, entries: Ints) -> None:
        """Evict ready chunks from host; their slots now belong to the caller."""
        self.evicted_host += len(entries)
        on_disk = self.disk_slot[entries] >= 0
        stay = entries[on_disk]
        self.state[stay] = DISK
        self.host_slot[stay] = -1
        self._forget(entries[~on_disk])

    def _steal_host(self, cls: SlotClass) -> bool:
        """Drain the cheapest place that other classes hold, if nothing there is in use."""
        wanted = self.arena.steal_candidate(cls.arena)
        if not wanted:
            return False
        owners = np.flatnonzero(np.isin(self.host_slot, np.array(wanted, np.int64)))
        if len(owners) != len(wanted) or not self._evictable(owners).all():
            return False
        slots = self.host_slot[owners]
        for other, part in self._by_class(owners):
            other.host_order.drop(part)
        self._leave_host(owners)
        self.free_host(slots)
        return True

    # ---- state changes ----------------------------------------------------------------------

    def begin_write(
        self, keys: Keys64, slots: Ints, cls: SlotClass, namespace: int, payload: int, durable: bool
    ) -> Ints:
        """absent -> writing: new entries for absent, distinct keys, each with a host slot."""
        entries = self._add(keys, WRITING, cls, namespace, payload)
        self.host_slot[entries] = slots
        self.durable[entries] = durable
        cls.writing += len(entries)
        return entries

    def publish(self, entries: Ints) -> None:
        """writing -> ready."""
        self.state[entries] = READY
        for cls, part in self._by_class(entries):
            cls.writing -= len(part)
            cls.host_order.touch(part)

    def abort_write(self, entries: Ints) -> Ints:
        """writing -> absent. The slots, which somebody may still touch, go to the caller."""
        slots = self.host_slot[entries]
        for cls, part in self._by_class(entries):
            cls.writing -= len(part)
        self._forget(entries)
        return slots

    def begin_read(self, entries: Ints, slots: Ints) -> None:
        """disk-only -> reading, into host slots."""
        self.state[entries] = READING
        self.host_slot[entries] = slots

    def end_read(self, entry: int, ok: bool) -> None:
        """reading -> ready, or absent with both slots freed."""
        one = np.array([entry], np.int64)
        cls = self.classes[self.cls[entry]]
        if ok:
            self.state[entry] = READY
            self.touch(one)
            return
        assert self.disk is not None
        self.arena.free(int(self.host_slot[entry]))
        cls.disk_order.drop(one)
        self.disk.free(int(self.disk_slot[entry]))
        self._forget(one)

    # ---- disk slots -------------------------------------------------------------------------

    def disk_idle(self, entries: Ints) -> Bools:
        idle: Bools = (self.state[entries] != READING) & (self.disk_slot[entries] >= 0)
        return idle

    def take_disk(self, cls: SlotClass, *, evict: bool = True) -> int:
        """A disk slot, free or (if `evict`) of the least recently used chunk, or -1.

        Raises `OSError`.
        """
        assert self.disk is not None
        while (slot := self.disk.alloc(cls.slot_bytes)) < 0 and evict:
            tried = self._others_are_older([c.disk_order for c in self.classes], cls)
            if tried and self._steal_disk(cls):
                continue
            victims = cls.disk_order.pop(1, self.disk_idle)
            if len(victims):
                slot = int(self.disk_slot[victims[0]])
                self._leave_disk(victims)
                break
            if tried or not self._steal_disk(cls):
                break
        return slot

    def _leave_disk(self, entries: Ints) -> None:
        """Evict from disk; the slots now belong to the caller."""
        self.evicted_disk += len(entries)
        self.disk_slot[entries] = -1
        self._forget(entries[self.state[entries] == DISK])

    def _steal_disk(self, cls: SlotClass) -> bool:
        assert self.disk is not None
        wanted = self.disk.steal_candidate(cls.slot_bytes)
        if not wanted:
            return False
        owners = np.flatnonzero(np.isin(self.disk_slot, np.array(wanted, np.int64)))
        if len(owners) != len(wanted) or not self.disk_idle(owners).all():
            return False
        slots = self.disk_slot[owners].tolist()
        for other, part in self._by_class(owners):
            other.disk_order.drop(part)
        self._leave_disk(owners)
        for slot in slots:
            self.disk.free(slot)
        return True

    def placed(self, entry: int, slot: int, sequence: int) -> None:
        """A ready chunk is complete on disk too."""
        self.disk_slot[entry] = slot
        self.sequence[entry] = sequence
        self.classes[self.cls[entry]].disk_order.touch(np.array([entry], np.int64))

    def add_found(
        self, keys: Keys64, slots: Ints, cls: SlotClass, namespace: Ints, payload: Ints, seq: Ints
    ) -> Ints:
        """absent -> disk-only: chunks that a scan found; absent, distinct keys, oldest first."""
        entries = self._add(keys, DISK, cls, 0, 0)
        self.namespace[entries] = namespace
        self.payload[entries] = payload
        self.disk_slot[entries] = slots
        self.sequence[entries] = seq
        self.durable[entries] = True
        cls.disk_order.touch(entries)
        return entries

    def order_disk(self, entries: Ints) -> None:
        """Count chunks on disk as used in this order."""
        for cls, part in self._by_class(entries):
            cls.disk_order.touch(part)

    def view(self, entry: int) -> memoryview:
        """The payload of an entry in its host slot."""
        return self.arena.view(int(self.host_slot[entry]), int(self.payload[entry]))

    def offsets(self, entries: Ints) -> NDArray[np.uint64]:
        """Byte offsets of host slots in the arena."""
        return (self.host_slot[entries] * PAGE_BYTES).astype(np.uint64)
