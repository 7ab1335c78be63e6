"""Which slabs there are, whose slots are free, and who may grow within the quota.

Pure bookkeeping, no files: `kvfold.store.disk` makes and removes what is decided here, and holds a
lock around every call. Calls cost O(1) but for `victims`, which looks at the slabs handed to it.
"""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvfold.errors import ConfigError, StoreError
from kvfold.store.slabs import (
    MAX_SLOT_BYTES,
    PAGE,
    SlabShape,
    choose_shape,
    slab_name,
    valid_slot_bytes,
)

INDEX_BITS = 20
INDEX_MASK = (1 << INDEX_BITS) - 1


class State(enum.Enum):
    """A slab's state (docs/format.md, 2)."""

    PLANNED = enum.auto()  # quota set aside; the first write makes the file
    LIVE = enum.auto()
    UNSCANNED = enum.auto()  # of an earlier run; gives out no slot before its headers are read
    FAILED = enum.auto()  # the file could not be made; forgotten when its last slot is freed


@dataclass(eq=False, slots=True)
class Slab:
    number: int
    path: Path
    shape: SlabShape
    epoch: bytes
    state: State
    dirty: bool = False
    making: threading.Lock = field(default_factory=threading.Lock)
    taken: bytearray = field(init=False)
    free: list[int] = field(init=False)
    used: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        count = self.shape.slot_count
        self.taken = bytearray(count)
        self.free = [] if self.state is State.UNSCANNED else list(range(count - 1, -1, -1))

    @property
    def settled(self) -> bool:
        """Whether it is known which of its slots are in use, and all of them may be."""
        return self.state in (State.PLANNED, State.LIVE)

    def used_slots(self) -> list[int]:
        base = self.number << INDEX_BITS
        return [base | index for index, taken in enumerate(self.taken) if taken]


@dataclass(slots=True)
class SizeClass:
    shape: SlabShape  # of new slabs
    wanted: bool = False  # asked for in this run: it must own a slab
    slabs: int = 0
    slots: int = 0
    roomy: dict[int, Slab] = field(default_factory=dict)  # slabs with free slots


class SlabTable:
    """Slabs of several slot sizes whose lengths together stay within `quota_bytes`.

    A slot is `slab number << 20 | index`. Slot sizes other than those of `add_class` exist only
    through slabs of earlier runs, which anybody may take.
    """

    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.slab_bytes = 0
        self.slabs: dict[int, Slab] = {}
        self.next_number = 0
        self._folder = folder
        self._classes: dict[int, SizeClass] = {}
        self._empty: dict[int, Slab] = {}  # settled, no slot in use

    def add_class(self, slot_bytes: int) -> None:
        """Want slots of `slot_bytes`; `StoreError` if not every class can own a slab."""
        if not valid_slot_bytes(slot_bytes):
            expected = f"a multiple of {PAGE} from {PAGE} to {MAX_SLOT_BYTES}"
            raise ConfigError("slot_bytes", slot_bytes, expected)
        own = self._class(slot_bytes)
        wanted = [c.shape.length_bytes for c in self._classes.values() if c.wanted or c is own]
        if sum(wanted) > self.quota_bytes:
            raise StoreError(
                f"disk {self._folder.parent}: a quota of {self.quota_bytes} bytes cannot hold a"
                f" slab for each of {len(wanted)} slot sizes: needs at least {sum(wanted)} bytes"
            )
        own.wanted = True

    def slots(self, slot_bytes: int, *, may_grow: bool) -> int:
        """Slots the class has, plus, if it may grow, those of quota that nobody owns."""
        own = self._classes[slot_bytes]
        if not may_grow:
            return own.slots
        spare = max(0, self.quota_bytes - self.slab_bytes - self._reserve(own))
        return own.slots + spare // own.shape.length_bytes * own.shape.slot_count

    def take(self, slot_bytes: int) -> int:
        """Return a free slot, in use from now on, or -1."""
        roomy = self._classes[slot_bytes].roomy
        if not roomy:
            return -1
        slab = next(iter(roomy.values()))
        index = slab.free.pop()
        slab.taken[index] = 1
        slab.used += 1
        self._sort_in(slab)
        return slab.number << INDEX_BITS | index

    def free(self, slot: int) -> None:
        slab = self.slabs[slot >> INDEX_BITS]
        index = slot & INDEX_MASK
        assert slab.taken[index], f"slot {slot} is not in use"
        slab.taken[index] = 0
        slab.free.append(index)
        slab.used -= 1
        if slab.state is State.FAILED and not slab.used:
            self.forget(slab)
        else:
            self._sort_in(slab)

    def victims(self, slot_bytes: int, candidates: Iterable[Slab]) -> list[Slab] | None:
        """The slabs of other classes to give up so that this class may grow by a slab.

        Those of unwanted classes first, then those with fewest slots in use; no wanted class loses
        its last. Empty if the quota has room as it is, None if the candidates do not suffice.
        """
        own = self._classes[slot_bytes]
        needed = own.shape.length_bytes + self._reserve(own)
        missing = needed + self.slab_bytes - self.quota_bytes
        if missing <= 0:
            return []
        others = [s for s in candidates if s.settled and self._class_of(s) is not own]
        others.sort(key=lambda s: (self._class_of(s).wanted, s.used, s.number))
        left = {size: known.slabs for size, known in self._classes.items()}
        chosen = []
        for slab in others:
            if self._class_of(slab).wanted and left[slab.shape.slot_bytes] == 1:
                continue
            left[slab.shape.slot_bytes] -= 1
            missing -= slab.shape.length_bytes
            chosen.append(slab)
            if missing <= 0:
                return chosen
        return None

    def empty_slabs(self) -> list[Slab]:
        return list(self._empty.values())

    def plan(self, slot_bytes: int) -> Slab:
        """Set quota aside for one more slab of the class; `victims` must have said that it fits."""
        number = self.next_number
        path = self._folder / slab_name(number)
        shape = self._classes[slot_bytes].shape
        slab = Slab(number, path, shape, secrets.token_bytes(16), State.PLANNED)
        self.admit(slab)
        return slab

    def admit(self, slab: Slab) -> None:
        own = self._class(slab.shape.slot_bytes)
        own.slabs += 1
        own.slots += slab.shape.slot_count
        self.slabs[slab.number] = slab
        self.slab_bytes += slab.shape.length_bytes
        self.next_number = max(self.next_number, slab.number + 1)
        self._sort_in(slab)

    def forget(self, slab: Slab) -> None:
        """Give the slab's length back to the quota."""
        if slab.state is not State.FAILED:
            self._leave_class(slab)
        del self.slabs[slab.number]
        self.slab_bytes -= slab.shape.length_bytes

    def fail(self, slab: Slab) -> None:
        """The slab's file could not be made: give out no more of its slots."""
        self._leave_class(slab)
        slab.state = State.FAILED

    def scanned(self, slab: Slab, indices: Iterable[int]) -> None:
        """The slab's slots at `indices` are in use, all others are free."""
        for index in indices:
            slab.taken[index] = 1
        slab.used = slab.taken.count(1)
        slab.free = [i for i in range(slab.shape.slot_count - 1, -1, -1) if not slab.taken[i]]
        slab.state = State.LIVE
        self._sort_in(slab)

    def _class(self, slot_bytes: int) -> SizeClass:
        known = self._classes.get(slot_bytes)
        if known is None:
            known = SizeClass(choose_shape(slot_bytes, self.quota_bytes))
            self._classes[slot_bytes] = known
        return known

    def _class_of(self, slab: Slab) -> SizeClass:
        return self._classes[slab.shape.slot_bytes]

    def _reserve(self, own: SizeClass) -> int:
        """Bytes set aside for other wanted classes that own no slab yet."""
        return sum(
            other.shape.length_bytes
            for other in self._classes.values()
            if other.wanted and other is not own and not other.slabs
        )

    def _leave_class(self, slab: Slab) -> None:
        own = self._class_of(slab)
        own.slabs -= 1
        own.slots -= slab.shape.slot_count
        own.roomy.pop(slab.number, None)
        self._empty.pop(slab.number, None)

    def _sort_in(self, slab: Slab) -> None:
        """Keep `roomy` and `_empty` true after the slab's slots or state changed."""
        roomy = self._class_of(slab).roomy
        if slab.free and slab.state is not State.FAILED:
            roomy[slab.number] = slab
        else:
            roomy.pop(slab.number, None)
        if slab.settled and not slab.used:
            self._empty[slab.number] = slab
        else:
            self._empty.pop(slab.number, None)
