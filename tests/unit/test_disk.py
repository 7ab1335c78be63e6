"""The disk tier: quota, classes, restart, root folder."""

import os
import random
import runpy
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

from kvfold.errors import ConfigError, StoreError
from kvfold.store.disk import DiskTier, Found, ReadOutcome
from kvfold.store.files import FileSystem, OpenFiles
from kvfold.store.slabs import choose_shape
from kvfold.store.slabtable import SlabTable

read_slots = runpy.run_path(str(Path(__file__).parents[1] / "slab_reader.py"))["read_slots"]

KIB, MIB = 1 << 10, 1 << 20
SLOT = 64 * KIB
NAMESPACE = sha256(b"namespace").digest()
Open = Callable[..., DiskTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    opened: list[DiskTier] = []

    def call(quota_bytes: int = MIB, *classes: int, root: str = "root", **kw: object) -> DiskTier:
        tier = DiskTier(tmp_path / root, quota_bytes, **kw)  # type: ignore[arg-type]
        opened.append(tier)
        for slot_bytes in classes or (SLOT,):
            tier.add_class(slot_bytes)
        return tier

    yield call
    for tier in opened:
        with suppress(OSError):  # closed by the test
            tier.close()


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def payload(number: int, length: int = SLOT - 100) -> memoryview:
    return memoryview(random.Random(number).randbytes(length))


def store(tier: DiskTier, number: int, slot_bytes: int = SLOT) -> int:
    slot = tier.alloc(slot_bytes)
    if slot >= 0:
        tier.write(slot, key(number), NAMESPACE, payload(number, slot_bytes - 100), number)
    return slot


def fill(tier: DiskTier, slot_bytes: int = SLOT, first: int = 0) -> dict[int, int]:
    """Store chunks until there is no room; returns chunk number -> slot."""
    placed = {}
    while (slot := store(tier, first, slot_bytes)) >= 0:
        placed[first] = slot
        first += 1
    return placed


def load(tier: DiskTier, number: int, slot: int, slot_bytes: int = SLOT) -> bool:
    out = memoryview(bytearray(slot_bytes - 100))
    good = tier.read(slot, key(number), NAMESPACE, out) is ReadOutcome.OK
    return good and out == payload(number, slot_bytes - 100)


def scan(tier: DiskTier) -> dict[bytes, Found]:
    return {item.key: item for batch in tier.scan() for item in batch}


def slab_files_bytes(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "root/slabs").iterdir())


@pytest.mark.parametrize("direct", [None, False])
def test_chunks_come_back_and_survive_a_restart(open_tier: Open, direct: bool | None) -> None:
    tier = open_tier(MIB, direct=direct)
    placed = fill(tier)
    assert len(placed) >= 12
    assert all(load(tier, number, slot) for number, slot in placed.items())
    tier.sync()
    tier.close()

    tier = open_tier(MIB, direct=direct)
    found = scan(tier)
    assert found == {
        key(n): Found(slot, key(n), NAMESPACE, SLOT - 100, SLOT, n) for n, slot in placed.items()
    }
    assert all(load(tier, number, slot) for number, slot in placed.items())
    assert tier.alloc(SLOT) == -1  # what was found is in use
    tier.free(placed[3])
    assert tier.alloc(SLOT) == placed[3]


def test_an_independent_reader_finds_the_same_bytes(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier(2 * MIB, SLOT, 2 * SLOT)
    placed = {store(tier, n): n for n in range(5)} | {store(tier, 9, 2 * SLOT): 9}
    assert {slot.slab << 20 | slot.index: slot for slot in read_slots(tmp_path / "root")} == {
        slot: (
            *(key(n), NAMESPACE, payload(n, size - 100), n, size),
            *(slot >> 20, slot & 0xFFFFF),
        )
        for slot, n in placed.items()
        for size in [2 * SLOT if n == 9 else SLOT]
    }


def test_no_slot_is_given_out_before_it_was_scanned(open_tier: Open) -> None:
    tier = open_tier(MIB)
    placed = fill(tier)
    tier.close()
    tier = open_tier(MIB)
    assert tier.alloc(SLOT) == -1
    assert tier.steal_candidate(SLOT) is None
    assert len(scan(tier)) == len(placed)


def test_new_slabs_may_grow_while_the_scan_runs(open_tier: Open) -> None:
    tier = open_tier(MIB)
    old = store(tier, 0)
    tier.close()
    tier = open_tier(MIB)
    new = store(tier, 1)
    assert new >= 0
    assert new >> 20 != old >> 20
    assert set(scan(tier)) == {key(0)}  # slabs of this run are not scanned
    assert load(tier, 0, old)
    assert load(tier, 1, new)


def test_quota_holds_through_twice_the_quota_and_a_restart(open_tier: Open, tmp_path: Path) -> None:
    quota = 2 * MIB + 4321
    tier = open_tier(quota)
    slots: list[int] = []
    for number in range(2 * quota // SLOT):
        if (slot := store(tier, number)) < 0:
            tier.free(slots.pop(0))
            slot = store(tier, number)
        slots.append(slot)
        assert tier.used_bytes == slab_files_bytes(tmp_path) <= quota
    assert tier.slots(SLOT) == len(slots)
    tier.close()
    tier = open_tier(quota)
    scan(tier)
    fill(tier, first=1000)
    assert tier.used_bytes == slab_files_bytes(tmp_path) <= quota


def test_a_smaller_quota_removes_slabs_at_the_start(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier(4 * MIB)
    placed = fill(tier)
    tier.close()
    tier = open_tier(MIB)
    assert 0 < tier.used_bytes == slab_files_bytes(tmp_path) <= MIB
    kept = scan(tier)
    assert kept
    assert all(load(tier, n, placed[n]) for n in placed if key(n) in kept)
    assert max(placed.values()) in {item.slot for item in kept.values()}  # the oldest went


def test_a_class_needs_a_slab(open_tier: Open) -> None:
    needed = choose_shape(SLOT, 0).length_bytes
    assert needed == 4096 + 4096 + SLOT
    open_tier(needed, root="a")
    with pytest.raises(StoreError, match=f"needs at least {needed} bytes"):
        open_tier(needed - 1, root="b")


def test_all_classes_together_need_a_slab_each(open_tier: Open) -> None:
    needed = 2 * 8192 + SLOT + 2 * SLOT
    tier = open_tier(needed - 1, SLOT)
    with pytest.raises(StoreError, match=f"needs at least {needed} bytes"):
        tier.add_class(2 * SLOT)
    assert tier.slots(SLOT) == 2  # the class refused sets nothing aside


@pytest.mark.parametrize("slot_bytes", [0, 100, 4097, -4096, (1 << 30) + 4096])
def test_slot_sizes_are_bounded(open_tier: Open, slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match="slot_bytes"):
        open_tier(MIB, slot_bytes)


def test_quota_is_set_aside_for_a_class_without_slabs(open_tier: Open) -> None:
    tier = open_tier(MIB, SLOT, 4 * SLOT)
    fill(tier)
    slot = store(tier, 7, 4 * SLOT)
    assert slot >= 0
    assert load(tier, 7, slot, 4 * SLOT)


def test_slots_counts_what_a_class_may_still_have(open_tier: Open) -> None:
    tier = open_tier(MIB, SLOT, 4 * SLOT)
    expected = tier.slots(SLOT)
    assert len(fill(tier)) == expected == tier.slots(SLOT)


def test_a_class_may_take_slabs_that_were_drained(open_tier: Open) -> None:
    tier = open_tier(MIB)
    placed = fill(tier)
    tier.add_class(4 * SLOT)
    assert tier.alloc(4 * SLOT) == -1
    victims = tier.steal_candidate(4 * SLOT)
    assert victims
    assert len(victims) < len(placed)
    for slot in victims:
        assert tier.alloc(4 * SLOT) == -1
        tier.free(slot)
    slot = store(tier, 99, 4 * SLOT)
    assert load(tier, 99, slot, 4 * SLOT)
    kept = {n: s for n, s in placed.items() if s not in victims}
    assert all(load(tier, n, s) for n, s in kept.items())
    assert tier.read(victims[0], key(0), NAMESPACE, memoryview(bytearray(9))) is not ReadOutcome.OK
    assert tier.used_bytes <= MIB


def test_the_slab_with_fewest_slots_in_use_is_stolen(open_tier: Open) -> None:
    tier = open_tier(8 * MIB, SLOT, 2 * SLOT)
    placed = fill(tier)
    fill(tier, 2 * SLOT, 500)
    fourth = [slot for slot in placed.values() if slot >> 20 == 3]
    assert len(fourth) == 15
    for slot in fourth[1:]:
        tier.free(slot)
    assert tier.steal_candidate(2 * SLOT) == fourth[:1]


def test_the_last_slab_is_never_stolen(open_tier: Open) -> None:
    tier = open_tier(5 * (8192 + SLOT), SLOT, 2 * SLOT)  # one slot a slab
    placed = fill(tier)
    other = fill(tier, 2 * SLOT, 50)
    assert (len(placed), len(other)) == (3, 1)
    tier.free(placed[1])
    assert tier.alloc(2 * SLOT) == -1  # the empty slab alone is too small
    assert tier.steal_candidate(2 * SLOT) == [placed[0]]
    tier.free(placed[0])
    assert store(tier, 51, 2 * SLOT) >= 0
    assert tier.steal_candidate(2 * SLOT) is None  # only one slab is left to the other class
    assert tier.steal_candidate(SLOT) == [other[50]]
    tier.free(other[50])
    assert len(fill(tier)) == 2
    assert tier.steal_candidate(SLOT) is None


def test_slabs_of_classes_nobody_wants_go_first(open_tier: Open) -> None:
    tier = open_tier(8 * MIB, SLOT)
    old = {slot for slot in fill(tier).values() if slot >> 20 < 3}
    tier.close()
    tier = open_tier(8 * MIB, 2 * SLOT, 4 * SLOT)
    for item in scan(tier).values():
        if item.slot not in old:
            tier.free(item.slot)
    fill(tier, 2 * SLOT)
    wanted = tier.steal_candidate(4 * SLOT)  # its first slab was set aside
    assert wanted == []
    fill(tier, 4 * SLOT)
    victims = tier.steal_candidate(4 * SLOT)
    assert victims
    assert set(victims) <= old  # though slabs of the class of 2 * SLOT hold fewer


def test_a_class_nobody_wants_may_be_taken_whole(open_tier: Open) -> None:
    tier = open_tier(MIB, SLOT)
    old = fill(tier)
    tier.close()
    tier = open_tier(MIB, 2 * SLOT)
    assert len(scan(tier)) == len(old)
    while (victims := tier.steal_candidate(2 * SLOT)) is not None:
        for slot in victims:
            tier.free(slot)
        assert fill(tier, 2 * SLOT)
    assert tier.slots(2 * SLOT) == MIB // (2 * SLOT + 8192)


def test_freeing_twice_is_a_programmer_error(open_tier: Open) -> None:
    tier = open_tier()
    slot = tier.alloc(SLOT)
    tier.free(slot)
    with pytest.raises(AssertionError):
        tier.free(slot)


def test_threads_read_and_write_at_once(open_tier: Open) -> None:
    tier = open_tier(8 * MIB)
    slots = {number: tier.alloc(SLOT) for number in range(80)}  # many slabs, none made yet
    failed: list[int] = []

    def work(mine: range) -> None:
        for number in mine:
            tier.write(slots[number], key(number), NAMESPACE, payload(number), number)
            if not load(tier, number, slots[number]):
                failed.append(number)

    threads = [threading.Thread(target=work, args=(range(i, 80, 4),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(load(tier, number, slot) for number, slot in slots.items())


def test_everything_is_private(open_tier: Open, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        tier = open_tier()
        store(tier, 0)
        tier.remember_namespace(NAMESPACE, "{}")
    finally:
        os.umask(old)
    root = tmp_path / "root"
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert {path.name for path in root.iterdir()} == {"format", "lock", "slabs", "namespaces"}
    assert (root / "format").read_bytes() == b"kvfold-disk 1\n"


def test_one_namespace_told_by_several_threads_at_once(tmp_path: Path) -> None:
    class Slow(FileSystem):
        def rename(self, old: Path, new: Path) -> None:
            time.sleep(0.02)
            super().rename(old, new)

    tier = DiskTier(tmp_path / "root", 1 << 20, files=Slow())
    with ThreadPoolExecutor(4) as pool:
        told = [pool.submit(tier.remember_namespace, NAMESPACE, "{}") for _ in range(8)]
    assert [future.exception() for future in told] == [None] * 8
    assert tier.namespaces() == {NAMESPACE: "{}"}
    tier.close()


def test_namespaces_are_kept(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    other = sha256(b"other").digest()
    tier.remember_namespace(NAMESPACE, '{"model": "a"}')
    tier.remember_namespace(NAMESPACE, '{"model": "a"}')
    tier.remember_namespace(other, '{"model": "\u00fc"}')
    tier.close()
    folder = tmp_path / "root/namespaces"
    assert {path.name for path in folder.iterdir()} == {
        NAMESPACE.hex() + ".json",
        other.hex() + ".json",
    }
    tier = open_tier()
    assert tier.namespaces() == {NAMESPACE: '{"model": "a"}', other: '{"model": "\u00fc"}'}
    before = (folder / f"{NAMESPACE.hex()}.json").stat().st_ino
    tier.remember_namespace(NAMESPACE, '{"model": "a"}')
    assert (folder / f"{NAMESPACE.hex()}.json").stat().st_ino == before  # not written again
    with pytest.raises(StoreError, match="at most"):
        tier.remember_namespace(sha256(b"x").digest(), "x" * (MIB + 1))


HOLDER = """
import sys, time
from pathlib import Path
from kvfold.store.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 1 << 20)
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_store_is_refused_and_a_killed_one_lets_go(
    open_tier: Open, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "root")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            with pytest.raises(StoreError, match=rf"pid {holder.pid}\b"):
                open_tier()
        finally:
            holder.kill()
    open_tier()
    with pytest.raises(StoreError, match=rf"pid {os.getpid()}\b"):
        open_tier()


def test_open_files_are_bounded_and_never_closed_under_a_user(tmp_path: Path) -> None:
    paths = [tmp_path / str(n) for n in range(5)]
    for path in paths:
        path.write_text(path.name)
    closed: list[int] = []

    class Files(FileSystem):
        def close(self, fd: int) -> None:
            closed.append(fd)
            super().close(fd)

    cache = OpenFiles(Files(), os.O_RDONLY, 2)
    with cache.use(paths[0]) as first:
        for path in paths[1:]:
            with cache.use(path) as fd:
                assert os.pread(fd, 9, 0).decode() == path.name
        assert len(closed) == 3
        cache.drop(paths[0])
        assert first not in closed
        assert os.pread(first, 9, 0) == b"0"
    assert first in closed
    cache.close()
    assert len(closed) == 5


def test_table_against_a_model() -> None:
    """Random calls: no slot twice, the quota holds, and no class is ever shut out."""
    sizes = [16 * KIB, 64 * KIB, 512 * KIB]
    for seed in range(30):
        rng = random.Random(seed)
        quota = rng.randrange(1 << 20, 8 << 20)
        table = SlabTable(Path("/x/slabs"), quota)
        used: dict[int, set[int]] = {size: set() for size in sizes}
        for size in sizes:
            table.add_class(size)
        for _ in range(400):
            size = rng.choice(sizes)
            if rng.random() < 0.3 and used[size]:
                slot = rng.choice(sorted(used[size]))
                used[size].remove(slot)
                table.free(slot)
                continue
            slot = table.take(size)
            if slot < 0 and (victims := table.victims(size, table.empty_slabs())) is not None:
                for slab in victims:
                    assert not slab.used
                    table.forget(slab)
                table.plan(size)
                slot = table.take(size)
                assert slot >= 0
            if slot < 0 and not used[size]:
                assert table.victims(size, table.slabs.values())
            if slot >= 0:
                assert all(slot not in slots for slots in used.values())
                used[size].add(slot)
            assert table.slab_bytes <= quota
            assert table.slab_bytes == sum(s.shape.length_bytes for s in table.slabs.values())
        for slot in [s for slots in used.values() for s in slots]:
            table.free(slot)
        assert len(table.empty_slabs()) == len(table.slabs)
        for size in sizes:
            assert table.slots(size, may_grow=True) >= 1
