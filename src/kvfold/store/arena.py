"""The host tier's memory: one sealed memfd, divided among slot classes.

A class is a slot size. Each class numbers its slots on a grid of its own that starts at the
arena's first byte, so that a single class fills the arena up to one slot. The arena is divided
into units (extents); a slot can be used if its class owns every unit that it touches. A class
takes units when its own slots are in use, and a unit that no used slot touches any more is free
for any class again. Which slots are in use is one byte per slot; nothing is kept per free slot.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import StoreError

PAGE_BYTES = 4096
_MIN_UNIT_BYTES = 1 << 20
_MAX_UNIT_BYTES = 64 << 20
_FREE = -1

_POPULATE_STEP_BYTES = 8 << 20
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

Ints = NDArray[np.int64]


@dataclass
class _Class:
    slot_bytes: int
    slots: int
    """Slots of the whole grid, whoever owns the units."""
    used: NDArray[np.bool_]
    """By number on the grid."""
    used_slots: int = 0
    open_units: set[int] = field(default_factory=set)
    """Own units in which a slot begins that is free and can be used."""
    stuck: bool = False
    """No free unit is of use; holds until a unit changes hands."""


@dataclass(frozen=True)
class _Windows:
    """Some slots of a class, in order, with what it would take to own all they touch."""

    slots: Ints
    first: Ints
    last: Ints
    free_units: Ints
    foreign_units: Ints


def unit_bytes_of(size_bytes: int) -> int:
    """Unit of an arena: a sixteenth of it, within 1 MiB to 64 MiB if it is 4 MiB or more."""
    unit = size_bytes // 16 // PAGE_BYTES * PAGE_BYTES
    least = _MIN_UNIT_BYTES if size_bytes >= 4 * _MIN_UNIT_BYTES else PAGE_BYTES
    return min(max(unit, least), _MAX_UNIT_BYTES)


class Arena:
    """Slots in shared memory. A slot's number is its byte offset divided by 4,096.

    All methods belong to one thread. `populate` faults the memory in from a background thread,
    which `close` stops. `size_bytes` is rounded down to 4,096.

    Raises StoreError if the size is less than 4,096 or the memory cannot be had.
    """

    fd: int
    size_bytes: int
    memory: memoryview

    def __init__(self, size_bytes: int, *, populate: bool = True) -> None:
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        if self.size_bytes <= 0:
            raise StoreError(f"a host tier of {size_bytes} bytes needs at least {PAGE_BYTES} bytes")
        self.unit_bytes = unit_bytes_of(self.size_bytes)
        units = -(-self.size_bytes // self.unit_bytes)
        self._owner: Ints = np.full(units, _FREE, np.int64)
        self._touching: Ints = np.zeros(units, np.int64)  # used slots that touch the unit
        self._begun: Ints = np.zeros(units, np.int64)  # those of them that begin in it
        self._open: Ints = np.zeros(units, np.int64)  # free usable slots that begin in the unit
        self._classes: list[_Class] = []
        self._could_hold: dict[int, int] = {}
        self.fd = _sealed_memfd(self.size_bytes)
        try:
            self._map = _map_shared(self.fd, self.size_bytes)
        except OSError as error:
            os.close(self.fd)
            raise StoreError(f"cannot map {self.size_bytes} bytes of memory: {error}") from error
        self.memory = memoryview(self._map)
        self._populate = _Populate(self._map, _MADV_POPULATE_WRITE) if populate else None

    @property
    def populated_bytes(self) -> int:
        """How much the background thread has faulted in so far (0 without one)."""
        return self._populate.done_bytes if self._populate else 0

    def add_class(self, slot_bytes: int) -> int:
        """Number of the class of this slot size, which is new or already there.

        Raises StoreError if the arena cannot hold two such slots.
        """
        assert slot_bytes > 0, "slots have bytes"
        assert slot_bytes % PAGE_BYTES == 0, "slots are whole pages"
        for number, known in enumerate(self._classes):
            if known.slot_bytes == slot_bytes:
                return number
        slots = self.size_bytes // slot_bytes
        if slots < 2:
            raise StoreError(
                f"a host tier of {self.size_bytes} bytes cannot hold two slots of {slot_bytes} "
                f"bytes: it needs at least {2 * slot_bytes} bytes"
            )
        self._classes.append(_Class(slot_bytes, slots, np.zeros(slots, np.bool_)))
        return len(self._classes) - 1

    def slots(self, cls: int) -> int:
        """Slots that the class could have without a unit that another class owns."""
        if cls not in self._could_hold:
            slot_bytes = self._classes[cls].slot_bytes
            ours = (self._owner == _FREE) | (self._owner == cls)
            edges = np.flatnonzero(np.diff(ours, prepend=False, append=False))
            begin = edges[::2] * self.unit_bytes
            end = np.minimum(edges[1::2] * self.unit_bytes, self.size_bytes)
            held = end // slot_bytes - -(-begin // slot_bytes)
            self._could_hold[cls] = int(np.maximum(held, 0).sum())
        return self._could_hold[cls]

    def used(self, cls: int) -> int:
        """Slots of the class in use."""
        return self._classes[cls].used_slots

    def class_of(self, slot: int) -> int:
        """Class that owns the place where a slot begins; StoreError if none does."""
        owner = self._owner[slot * PAGE_BYTES // self.unit_bytes]
        if owner == _FREE:
            raise StoreError(f"slot {slot} is not in use")
        return int(owner)

    def alloc(self, cls: int) -> int:
        """A slot for the caller to use until `free`, or -1 if there is none."""
        owner = self._classes[cls]
        if owner.open_units:
            begin, end = self._beginning_in(owner, next(iter(owner.open_units)))
            number = begin + int(owner.used[begin:end].argmin())
        else:
            number = self._take_units(cls)
            if number < 0:
                return -1
        self._mark(owner, number, True)
        return number * owner.slot_bytes // PAGE_BYTES

    def free(self, slot: int) -> None:
        """Give a slot back. Units that no used slot touches any more become free."""
        cls = self.class_of(slot)
        owner = self._classes[cls]
        number, rest = divmod(slot * PAGE_BYTES, owner.slot_bytes)
        assert rest == 0, "no slot begins there"
        assert owner.used[number], "slot is free already"
        self._mark(owner, number, False)
        first, last = self._touched(owner, number)
        idle = [u for u in range(first, last + 1) if not self._touching[u]]
        if idle:
            self._owner[idle] = _FREE
            self._changed(owner, cls, idle[0], idle[-1])

    def view(self, slot: int, length: int) -> memoryview:
        """The first `length` bytes of a slot, writable."""
        begin = slot * PAGE_BYTES
        return self.memory[begin : begin + length]

    def steal_candidate(self, cls: int) -> list[int] | None:
        """Used slots of other classes that, once freed, leave a slot for `cls`.

        Of all choices the one with the fewest bytes in use; None if no other class is in the way.
        """
        windows = self._windows(cls)
        size_of = np.array([c.slot_bytes for c in self._classes] + [0], np.int64)
        slot_bytes = size_of[self._owner]  # a free unit's owner -1 is the 0
        slot_bytes[self._owner == cls] = 0
        begun = np.concatenate(([0], np.cumsum(self._begun * slot_bytes)))
        reaching_in = (self._touching - self._begun) * slot_bytes
        cost = begun[windows.last + 1] - begun[windows.first] + reaching_in[windows.first]
        choices = np.flatnonzero(windows.foreign_units)
        if not len(choices):
            return None
        best = choices[cost[choices].argmin()]
        slots: set[int] = set()
        for unit in range(int(windows.first[best]), int(windows.last[best]) + 1):
            if self._owner[unit] not in (_FREE, cls):
                slots.update(self._used_in(unit))
        return sorted(slots)

    def close(self) -> None:
        """Stop populating and let go of the memory; views handed out keep their mapping alive."""
        if self._populate:
            self._populate.stop()
        with contextlib.suppress(BufferError):  # views are in use: it goes with the last of them
            self.memory.release()
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _touched(self, owner: _Class, number: int) -> tuple[int, int]:
        """First and last unit that a slot touches."""
        begin = number * owner.slot_bytes
        return begin // self.unit_bytes, (begin + owner.slot_bytes - 1) // self.unit_bytes

    def _beginning_in(self, owner: _Class, unit: int) -> tuple[int, int]:
        """Range of the slots that begin in a unit and touch only units of the same owner."""
        begin = -(-unit * self.unit_bytes // owner.slot_bytes)
        end = min(-(-(unit + 1) * self.unit_bytes // owner.slot_bytes), owner.slots)
        if begin < end:
            first, last = self._touched(owner, end - 1)
            if (self._owner[first : last + 1] != self._owner[unit]).any():
                end -= 1  # only the last one can reach into the next unit
        return begin, max(begin, end)

    def _used_in(self, unit: int) -> list[int]:
        """Used slots that touch an owned unit."""
        owner = self._classes[self._owner[unit]]
        begin = unit * self.unit_bytes // owner.slot_bytes
        end = -(-(unit + 1) * self.unit_bytes // owner.slot_bytes)
        numbers = begin + np.flatnonzero(owner.used[begin:end])
        slots: list[int] = (numbers * (owner.slot_bytes // PAGE_BYTES)).tolist()
        return slots

    def _mark(self, owner: _Class, number: int, used: bool) -> None:
        change = 1 if used else -1
        first, last = self._touched(owner, number)
        owner.used[number] = used
        owner.used_slots += change
        self._touching[first : last + 1] += change
        self._begun[first] += change
        self._open[first] -= change
        if self._open[first]:
            owner.open_units.add(first)
        else:
            owner.open_units.discard(first)

    def _take_units(self, cls: int) -> int:
        """Own what one more slot needs, and return that slot's number, or -1.

        Prefers the slot that needs the fewest units. Even classes grow up from the start and odd
        ones down from the end, to stay whole.
        """
        owner = self._classes[cls]
        if owner.stuck:
            return -1
        windows = self._windows(cls)
        choices = np.flatnonzero((windows.foreign_units == 0) & (windows.free_units > 0))
        if not len(choices):
            owner.stuck = True
            return -1
        if cls % 2:
            choices = choices[::-1]
        best = choices[windows.free_units[choices].argmin()]
        first, last = int(windows.first[best]), int(windows.last[best])
        self._owner[first : last + 1] = cls
        self._changed(owner, cls, first, last)
        return int(windows.slots[best])

    def _windows(self, cls: int) -> _Windows:
        """The first and the last slot that begin in each unit.

        The others touch no unit but the one they begin in, like the first: they are no cheaper.
        """
        owner = self._classes[cls]
        borders = -(-np.arange(len(self._owner) + 1) * self.unit_bytes // owner.slot_bytes)
        slots = np.unique(np.concatenate((borders[:-1], borders[1:] - 1)))
        slots = slots[(slots >= 0) & (slots < owner.slots)]
        begin = slots * owner.slot_bytes
        first = begin // self.unit_bytes
        last = (begin + owner.slot_bytes - 1) // self.unit_bytes
        free = np.concatenate(([0], np.cumsum(self._owner == _FREE)))
        own = np.concatenate(([0], np.cumsum(self._owner == cls)))
        free_units = free[last + 1] - free[first]
        foreign_units = last + 1 - first - free_units - (own[last + 1] - own[first])
        return _Windows(slots, first, last, free_units, foreign_units)

    def _changed(self, owner: _Class, cls: int, first: int, last: int) -> None:
        """Units first..last went to the class or left it: count anew what that makes usable."""
        for known in self._classes:
            known.stuck = False
        self._could_hold.clear()
        reach = -(-owner.slot_bytes // self.unit_bytes)
        for unit in range(max(0, first - reach), last + 1):
            count = 0
            if self._owner[unit] == cls:
                begin, end = self._beginning_in(owner, unit)
                count = end - begin - int(np.count_nonzero(owner.used[begin:end]))
            elif self._owner[unit] != _FREE:
                continue
            self._open[unit] = count
            if count:
                owner.open_units.add(unit)
            else:
                owner.open_units.discard(unit)


def map_arena(fd: int, size_bytes: int) -> memoryview:
    """A client's shared, writable mapping of an arena, faulted in from a background thread.

    The mapping lives until the last view of it is gone. Raises StoreError if the descriptor is not
    a sealed memory file of at least `size_bytes`: it could shrink under our feet.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        held_bytes = os.fstat(fd).st_size
        if not seals & fcntl.F_SEAL_SHRINK or not 0 < size_bytes <= held_bytes:
            raise StoreError(
                f"not an arena of {size_bytes} bytes: it has {held_bytes} bytes, seals {seals:#x}"
            )
        mapping = _map_shared(fd, size_bytes)
    except OSError as error:
        raise StoreError(f"cannot map an arena of {size_bytes} bytes: {error}") from error
    _Populate(mapping, _MADV_POPULATE_READ)
    return memoryview(mapping)


def _sealed_memfd(size_bytes: int) -> int:
    fd = os.memfd_create("kvfold-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(fd)
        raise StoreError(f"cannot have {size_bytes} bytes of shared memory: {error}") from error
    return fd


def _map_shared(fd: int, size_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size_bytes)
    # A forked child (an engine's worker, a shell) must not keep the arena's memory alive.
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


class _Populate:
    """Faults a mapping in, a step at a time, from a thread of its own.

    Touching shared memory for the first time costs seven times a copy. Best effort: kernels before
    5.14 refuse, and then the first copies pay. The thread ends when the mapping is dropped.
    """

    def __init__(self, mapping: mmap.mmap, advice: int) -> None:
        self.done_bytes = 0
        self._advice = advice
        self._mapping = weakref.ref(mapping)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfold-populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        # Called through ctypes because mmap.madvise would hold the interpreter's lock.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while not self._stopping.is_set():
            mapping = self._mapping()
            if mapping is None or self.done_bytes >= len(mapping):
                return
            step_bytes = min(_POPULATE_STEP_BYTES, len(mapping) - self.done_bytes)
            step = (ctypes.c_char * step_bytes).from_buffer(mapping, self.done_bytes)
            refused = madvise(ctypes.addressof(step), step_bytes, self._advice)
            del step, mapping
            if refused:
                return
            self.done_bytes += step_bytes
