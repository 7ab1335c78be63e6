"""Arena against a plain model that knows pages and the rule of units, and nothing else."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfold.errors import StoreError
from kvfold.store.arena import PAGE_BYTES, Arena, map_arena, unit_bytes_of

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8 * MIB, populate=False)
    yield made
    made.close()


class ArenaMachine(RuleBasedStateMachine):
    """Slots of one to nine pages in an arena of 61 to 83 pages, whose units have three to five."""

    @initialize(
        pages=st.integers(61, 83),
        sizes=st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 9]), min_size=1, max_size=3, unique=True),
    )
    def make(self, pages: int, sizes: list[int]) -> None:
        self.arena = Arena(pages * PAGE_BYTES + 17, populate=False)
        self.pages = pages
        self.unit = unit_bytes_of(pages * PAGE_BYTES) // PAGE_BYTES
        self.sizes = sizes
        assert [self.arena.add_class(size * PAGE_BYTES) for size in sizes] == [*range(len(sizes))]
        self.used: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()

    def units(self, cls: int, slot: int) -> set[int]:
        return {page // self.unit for page in range(slot, slot + self.sizes[cls])}

    def owned(self, cls: int) -> set[int]:
        return {u for slot, of in self.used.items() if of == cls for u in self.units(cls, slot)}

    def foreign(self, cls: int) -> set[int]:
        return set().union(*(self.owned(c) for c in range(len(self.sizes)) if c != cls))

    def grid(self, cls: int) -> list[int]:
        size = self.sizes[cls]
        return [slot for slot in range(0, self.pages, size) if slot + size <= self.pages]

    def possible(self, cls: int) -> list[int]:
        foreign = self.foreign(cls)
        return [slot for slot in self.grid(cls) if not self.units(cls, slot) & foreign]

    @rule(data=st.data(), count=st.sampled_from([1, 1, 3, 20]))
    def alloc(self, data: st.DataObject, count: int) -> None:
        cls = data.draw(st.sampled_from(range(len(self.sizes))))
        for _ in range(count):
            possible = [slot for slot in self.possible(cls) if slot not in self.used]
            slot = self.arena.alloc(cls)
            if not possible:
                assert slot == -1
                return
            assert slot in possible
            own = [s for s in possible if self.units(cls, s) <= self.owned(cls)]
            assert not own or slot in own, "took a unit although its own have room"
            self.used[slot] = cls

    @precondition(lambda self: self.used)
    @rule(data=st.data(), share=st.sampled_from([0.1, 0.5, 1]))
    def free(self, data: st.DataObject, share: float) -> None:
        random = data.draw(st.randoms(use_true_random=False))
        for slot in random.sample(sorted(self.used), max(1, int(share * len(self.used)))):
            self.arena.free(slot)
            del self.used[slot]

    @rule(data=st.data())
    def steal(self, data: st.DataObject) -> None:
        cls = data.draw(st.sampled_from(range(len(self.sizes))))
        foreign = self.foreign(cls)
        costs = []
        for slot in self.grid(cls):
            wanted = self.units(cls, slot) & foreign
            in_the_way = [
                s for s, of in self.used.items() if of != cls and self.units(of, s) & wanted
            ]
            if wanted:
                costs.append(sum(self.sizes[self.used[s]] for s in in_the_way))
        candidate = self.arena.steal_candidate(cls)
        if not costs:
            assert candidate is None
            return
        assert candidate is not None
        assert sum(self.sizes[self.used[s]] for s in candidate) == min(costs)
        for slot in candidate:
            assert self.used.pop(slot) != cls
            self.arena.free(slot)
        assert [slot for slot in self.possible(cls) if slot not in self.used]
        slot = self.arena.alloc(cls)
        assert slot >= 0
        self.used[slot] = cls

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "arena"):
            return
        for cls in range(len(self.sizes)):
            assert self.arena.slots(cls) == len(self.possible(cls))
            assert self.arena.used(cls) == sum(of == cls for of in self.used.values())
        for slot, cls in self.used.items():
            assert self.arena.class_of(slot) == cls


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("slot_bytes", [PAGE_BYTES, 499_712, 3_944_448, 40_103_936])
def test_one_class_has_the_whole_arena(slot_bytes: int) -> None:
    arena = Arena(200 * MIB + 5 * PAGE_BYTES, populate=False)
    cls = arena.add_class(slot_bytes)
    fits = arena.size_bytes // slot_bytes
    assert arena.slots(cls) == fits
    slots = {arena.alloc(cls) for _ in range(fits)}
    assert len(slots) == fits
    assert -1 not in slots
    assert arena.alloc(cls) == -1
    for slot in slots:
        arena.free(slot)
    other = arena.add_class(8192)
    assert arena.slots(other) == arena.size_bytes // 8192
    arena.close()


@pytest.mark.parametrize(
    ("size_bytes", "unit_bytes"),
    [
        (PAGE_BYTES, PAGE_BYTES),
        (MIB, MIB // 16),
        (4 * MIB, MIB),
        (100 * MIB, 1600 * PAGE_BYTES),
        (1 << 40, 64 * MIB),
    ],
)
def test_unit_bytes(size_bytes: int, unit_bytes: int) -> None:
    assert unit_bytes_of(size_bytes) == unit_bytes


def test_views_are_the_slots_bytes(arena: Arena) -> None:
    cls = arena.add_class(8192)
    assert arena.add_class(8192) == cls
    first, second = arena.alloc(cls), arena.alloc(cls)
    arena.view(first, 8192)[:] = b"a" * 8192
    arena.view(second, 5000)[:] = b"b" * 5000
    assert arena.view(first, 8192) == b"a" * 8192
    begin = second * PAGE_BYTES
    assert arena.memory[begin : begin + 5001] == b"b" * 5000 + b"\0"
    assert os.pread(arena.fd, 5000, begin) == b"b" * 5000


def test_too_small(arena: Arena) -> None:
    with pytest.raises(StoreError, match="needs at least 8396800 bytes"):
        arena.add_class(4 * MIB + PAGE_BYTES)
    with pytest.raises(StoreError, match="4095 bytes needs at least 4096"):
        Arena(4095)


def test_misuse_is_caught(arena: Arena) -> None:
    cls = arena.add_class(8192)
    slot, other = arena.alloc(cls), arena.alloc(cls)
    with pytest.raises(AssertionError):
        arena.free(slot + 1)
    arena.free(slot)
    with pytest.raises(AssertionError):
        arena.free(slot)
    arena.free(other)
    with pytest.raises(StoreError, match="not in use"):
        arena.free(other)


def test_the_memory_is_sealed(arena: Arena) -> None:
    for size_bytes in (arena.size_bytes - 1, arena.size_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def mapping_flags(pid: int | str) -> list[str]:
    flags, ours = [], False
    with open(f"/proc/{pid}/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                ours = "kvfold-arena" in line
            elif ours and line.startswith("VmFlags"):
                flags.append(line)
    return flags


def test_a_forked_child_does_not_keep_the_memory(arena: Arena) -> None:
    assert mapping_flags("self")
    assert all(" dc " in line for line in mapping_flags("self"))  # dc: do not copy on fork


def test_a_client_in_another_process_shares_the_bytes(arena: Arena) -> None:
    arena.memory[4096:4101] = b"store"
    script = (
        "import sys; from kvfold.store.arena import map_arena\n"
        "memory = map_arena(int(sys.argv[1]), int(sys.argv[2]))\n"
        "assert memory[4096:4101] == b'store'\n"
        "memory[0:6] = b'client'\n"
    )
    command = [sys.executable, "-c", script, str(arena.fd), str(arena.size_bytes)]
    subprocess.run(command, pass_fds=[arena.fd], check=True)
    assert bytes(arena.memory[0:6]) == b"client"


def test_what_is_no_arena_is_refused(arena: Arena) -> None:
    map_arena(arena.fd, arena.size_bytes).release()
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8 * MIB)
    reading, writing = os.pipe()
    for fd, size_bytes in [
        (arena.fd, arena.size_bytes + 4096),
        (arena.fd, 0),
        (unsealed, 8 * MIB),
        (reading, 4096),
    ]:
        with pytest.raises(StoreError):
            map_arena(fd, size_bytes)
    for fd in (unsealed, reading, writing):
        os.close(fd)


def resident_bytes(memory: memoryview) -> int:
    with open("/proc/self/smaps") as lines:
        total, ours = 0, False
        for line in lines:
            if "-" in line.split()[0]:
                ours = "kvfold-arena" in line
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def populating() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kvfold-populate"]


def test_memory_is_populated_in_the_background() -> None:
    arena = Arena(40 * MIB)
    for thread in populating():
        thread.join(60)
    assert arena.populated_bytes == 40 * MIB
    assert resident_bytes(arena.memory) == 40 * MIB
    client = map_arena(arena.fd, arena.size_bytes)
    for thread in populating():
        thread.join(60)
    assert resident_bytes(client) == 80 * MIB
    assert bytes(client[:3]) == b"\0\0\0"
    arena.close()


def test_closing_stops_populating_and_leaves_views_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.store.arena._POPULATE_STEP_BYTES", mmap.PAGESIZE)
    arena = Arena(512 * MIB)
    while not arena.populated_bytes:
        time.sleep(0.001)
    view = arena.view(arena.alloc(arena.add_class(4096)), 4096)
    arena.close()
    assert not populating()
    assert arena.populated_bytes < 512 * MIB
    view[:] = b"x" * 4096
    assert view[0] == ord("x")
    arena.close()
    with pytest.raises(ValueError, match="released"):
        arena.memory[0]


def test_a_client_that_drops_the_mapping_stops_populating(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvfold.store.arena._POPULATE_STEP_BYTES", mmap.PAGESIZE)
    arena = Arena(512 * MIB, populate=False)
    map_arena(arena.fd, arena.size_bytes).release()
    for thread in populating():
        thread.join(60)
    assert os.fstat(arena.fd).st_blocks * 512 < 512 * MIB
    assert len(mapping_flags("self")) == 1
    arena.close()


def test_classes_that_grow_side_by_side_stay_whole(arena: Arena) -> None:
    small, large = arena.add_class(96 * PAGE_BYTES), arena.add_class(160 * PAGE_BYTES)
    taken = [small, large]
    while any(slot >= 0 for slot in taken):
        taken = [arena.alloc(small), arena.alloc(large)]
    in_use = arena.used(small) * 96 * PAGE_BYTES + arena.used(large) * 160 * PAGE_BYTES
    # Only where they meet, and at the end of the arena, can a slot's worth be lost.
    assert arena.size_bytes - in_use < (96 + 160) * PAGE_BYTES


def test_own_slots_beside_those_to_be_drained_cost_nothing() -> None:
    arena = Arena(64 * PAGE_BYTES, populate=False)  # units of four pages
    small, large = arena.add_class(PAGE_BYTES), arena.add_class(6 * PAGE_BYTES)
    pages = [arena.alloc(small) for _ in range(64)]
    for slot in pages[:8]:
        arena.free(slot)
    assert arena.alloc(large) == 0  # touches units 0 and 1
    for slot in pages[8:]:
        if slot != 9 and (slot < 16 or slot % 4 > 1):
            arena.free(slot)
    # Of the small ones, unit 2 has one in use, unit 3 none and every other unit two. A large slot
    # in units 1 and 2 costs the one; in units 3 and 4 it would cost two.
    assert arena.steal_candidate(large) == [9]
    arena.close()
