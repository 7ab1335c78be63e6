"""What can go wrong under the disk tier: never a wrong byte, never more than the quota."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from faulty_files import FaultyFiles

from kvfold.errors import StoreError
from kvfold.store.disk import GROWTH_PAUSE_S, DiskTier, Found, ReadOutcome
from kvfold.store.slabs import (
    PAGE,
    SlabHeader,
    SlabShape,
    checksum,
    choose_shape,
    pack_slab_header,
    parse_slab_header,
)

MIB = 1 << 20
QUOTA = 2 * MIB  # three slots a slab
SLOT = 64 << 10
STRIDE = SLOT + PAGE
LENGTH = SLOT - 100
NAMESPACE = sha256(b"namespace").digest()
Open = Callable[..., DiskTier]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def open_tier(root: Path, files: FaultyFiles, clock: Clock) -> Iterator[Open]:
    opened: list[DiskTier] = []

    def call(quota_bytes: int = QUOTA, **kw: object) -> DiskTier:
        for tier in opened:
            with suppress(OSError):
                tier.close()
        tier = DiskTier(root, quota_bytes, files=files, clock=clock, **kw)  # type: ignore[arg-type]
        opened.append(tier)
        tier.add_class(SLOT)
        return tier

    yield call
    for tier in opened:
        with suppress(OSError):
            tier.close()


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def payload(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(LENGTH))


def store(tier: DiskTier, number: int, slot: int | None = None) -> int:
    slot = tier.alloc(SLOT) if slot is None else slot
    if slot >= 0:
        tier.write(slot, key(number), NAMESPACE, payload(number), number)
    return slot


def read(tier: DiskTier, number: int, slot: int) -> ReadOutcome:
    """Read chunk `number` from `slot`; whatever is OK must be right."""
    out = memoryview(bytearray(LENGTH))
    outcome = tier.read(slot, key(number), NAMESPACE, out)
    if outcome is ReadOutcome.OK:
        assert out == payload(number)
    return outcome


def scan(tier: DiskTier) -> dict[int, Found]:
    return {item.slot: item for batch in tier.scan() for item in batch}


def slab_paths(root: Path) -> list[Path]:
    return sorted((root / "slabs").iterdir())


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    change(path, offset, bytes([path.read_bytes()[offset] ^ 1]))


def copy_slot(path: Path, source: int, target: int) -> None:
    change(path, PAGE + target * STRIDE, path.read_bytes()[PAGE + source * STRIDE :][:STRIDE])


def change_header(path: Path, offset: int, data: bytes) -> None:
    """Change the first slot's header and make its checksum agree."""
    fields = bytearray(path.read_bytes()[PAGE : PAGE + 128])
    fields[offset : offset + len(data)] = data
    change(path, PAGE, bytes(fields) + checksum(bytes(fields)))


# --- ways a slot can be wrong: the damage, what a read says, what a restart finds

DAMAGES = {
    "payload, first bit": (lambda p: flip(p, 2 * PAGE), "checksum", {0, 1}),
    "payload, last bit": (lambda p: flip(p, 2 * PAGE + LENGTH - 1), "checksum", {0, 1}),
    "key": (lambda p: flip(p, PAGE + 40), "header", {1}),
    "payload length": (lambda p: flip(p, PAGE + 96), "header", {1}),
    "header checksum": (lambda p: flip(p, PAGE + 130), "header", {1}),
    "zeros": (lambda p: change(p, PAGE, bytes(STRIDE)), "header", {1}),
    "header without payload": (lambda p: change(p, 2 * PAGE, bytes(SLOT)), "checksum", {0, 1}),
    "payload without header": (lambda p: change(p, PAGE, bytes(PAGE)), "header", {1}),
    "another chunk": (lambda p: copy_slot(p, 1, 0), "key", {0, 1}),
    "of another slab": (lambda p: change_header(p, 16, bytes(16)), "epoch", {1}),
    "another namespace": (lambda p: change_header(p, 64, bytes(32)), "namespace", {0, 1}),
    "shorter": (lambda p: change_header(p, 96, b"\1"), "length", {0, 1}),
    "longer than a slot": (lambda p: change_header(p, 96, b"\xff" * 8), "header", {1}),
    "of another version": (lambda p: change_header(p, 8, b"\2"), "header", {1}),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("direct", [None, False])
def test_a_damaged_slot_is_a_miss_and_is_repaired_by_the_next_store(
    open_tier: Open, root: Path, name: str, direct: bool | None
) -> None:
    damage, expected, found_later = DAMAGES[name]
    tier = open_tier(direct=direct)
    assert (store(tier, 0), store(tier, 1)) == (0, 1)
    damage(slab_paths(root)[0])
    for _ in range(2):  # at once, and after a restart
        assert read(tier, 0, 0) is ReadOutcome(expected)
        assert read(tier, 1, 1) is ReadOutcome.OK
        tier = open_tier(direct=direct)
        assert set(scan(tier)) == found_later
    store(tier, 0, 0)
    assert read(tier, 0, 0) is ReadOutcome.OK
    assert read(tier, 1, 1) is ReadOutcome.OK


def test_swapped_slots_are_misses_where_they_were_and_right_where_they_are(
    open_tier: Open, root: Path
) -> None:
    tier = open_tier()
    store(tier, 0)
    store(tier, 1)
    (path,) = slab_paths(root)
    saved = path.read_bytes()[PAGE : PAGE + STRIDE]
    copy_slot(path, 1, 0)
    change(path, PAGE + STRIDE, saved)
    assert read(tier, 0, 0) is ReadOutcome.CORRUPT_KEY
    assert read(tier, 1, 1) is ReadOutcome.CORRUPT_KEY
    tier = open_tier()
    assert {slot: item.key for slot, item in scan(tier).items()} == {0: key(1), 1: key(0)}
    assert read(tier, 1, 0) is read(tier, 0, 1) is ReadOutcome.OK


# --- ways a slab can be wrong


@pytest.fixture
def slab(open_tier: Open, root: Path) -> Path:
    """The only slab of a stopped tier; chunks 0, 1 and 2 lie in its slots 0, 1 and 2."""
    tier = open_tier()
    assert [store(tier, number) for number in range(3)] == [0, 1, 2]
    tier.close()
    (path,) = slab_paths(root)
    return path


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 24, 39, 40, 55])
def test_a_slab_with_a_damaged_header_is_removed(open_tier: Open, slab: Path, offset: int) -> None:
    flip(slab, offset)
    tier = open_tier()
    assert not slab.exists()
    assert scan(tier) == {}
    assert tier.used_bytes == 0
    assert tier.report()["rejected_slabs"] == 1
    assert read(tier, 0, store(tier, 0)) is ReadOutcome.OK


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 100])
def test_a_slab_cut_before_its_first_slot_ends_is_mended(
    open_tier: Open, slab: Path, size: int
) -> None:
    os.truncate(slab, size)
    tier = open_tier()
    assert scan(tier) == {}
    placed = [store(tier, number) for number in range(tier.slots(SLOT))]
    assert all(read(tier, n, slot) is ReadOutcome.OK for n, slot in enumerate(placed))


def test_a_cut_slab_keeps_whole_slots_and_is_extended(open_tier: Open, slab: Path) -> None:
    length = slab.stat().st_size
    os.truncate(slab, PAGE + STRIDE + STRIDE // 2)
    tier = open_tier()
    assert slab.stat().st_size == length
    assert set(scan(tier)) == {0, 1}
    assert read(tier, 0, 0) is ReadOutcome.OK
    assert read(tier, 1, 1) is ReadOutcome.CORRUPT_CHECKSUM
    assert read(tier, 2, 2) is ReadOutcome.CORRUPT_HEADER


def test_a_cut_slab_on_a_full_disk_is_used_as_far_as_it_goes(
    open_tier: Open, slab: Path, files: FaultyFiles
) -> None:
    os.truncate(slab, PAGE + 2 * STRIDE - 1)
    files.errors["allocate"] = errno.ENOSPC
    tier = open_tier()
    assert set(scan(tier)) == {0}
    assert tier.used_bytes == PAGE + STRIDE
    assert read(tier, 0, 0) is ReadOutcome.OK
    assert slab.stat().st_size == PAGE + 2 * STRIDE - 1


def test_a_slab_cut_under_a_running_store_is_a_miss(open_tier: Open, root: Path) -> None:
    tier = open_tier()
    slots = [store(tier, number) for number in range(3)]
    os.truncate(slab_paths(root)[0], PAGE + STRIDE + 2 * PAGE)
    assert read(tier, 0, slots[0]) is ReadOutcome.OK
    assert read(tier, 1, slots[1]) is ReadOutcome.CORRUPT_LENGTH
    assert read(tier, 2, slots[2]) is ReadOutcome.CORRUPT_HEADER
    store(tier, 1, slots[1])
    assert read(tier, 1, slots[1]) is ReadOutcome.OK


def test_a_slab_longer_than_it_says_has_no_slots_there(open_tier: Open, slab: Path) -> None:
    last = slab.read_bytes()[PAGE : PAGE + STRIDE]
    with slab.open("ab") as file:
        file.write(last)
    assert set(scan(open_tier())) == {0, 1, 2}


def test_a_huge_claim_in_a_good_header_allocates_nothing(
    open_tier: Open, slab: Path, files: FaultyFiles
) -> None:
    claim = pack_slab_header(SlabHeader(SlabShape(1 << 30, 1 << 20), bytes(16)))
    change(slab, 0, claim)
    files.calls.clear()
    tier = open_tier()
    assert "allocate" not in files.calls
    assert tier.used_bytes == 0
    assert scan(tier) == {}


def test_a_new_epoch_over_old_bytes_makes_them_free_space(open_tier: Open, slab: Path) -> None:
    header = parse_slab_header(memoryview(slab.read_bytes()[:PAGE]))
    assert header is not None
    change(slab, 0, pack_slab_header(header._replace(epoch=os.urandom(16))))
    tier = open_tier()
    assert scan(tier) == {}
    assert read(tier, 0, 0) is ReadOutcome.CORRUPT_EPOCH
    slot = store(tier, 0)
    assert slot == 0
    assert read(tier, 0, slot) is ReadOutcome.OK


def test_a_deleted_slab_is_gone_after_a_restart(open_tier: Open, slab: Path) -> None:
    slab.unlink()
    tier = open_tier()
    assert scan(tier) == {}
    assert tier.used_bytes == 0


def test_a_slab_deleted_under_a_running_store_is_made_anew(
    open_tier: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.store.disk.MAX_OPEN_FILES", 1)
    tier = open_tier()
    slots = [store(tier, number) for number in range(4)]
    assert slots[3] >> 20 == 1  # so that the first slab is not open now
    path = slab_paths(root)[0]
    old = parse_slab_header(memoryview(path.read_bytes()[:PAGE]))
    path.unlink()
    assert read(tier, 0, slots[0]) is ReadOutcome.CORRUPT_HEADER
    store(tier, 0, slots[0])
    new = parse_slab_header(memoryview(path.read_bytes()[:PAGE]))
    assert old is not None
    assert new is not None
    assert new.epoch != old.epoch
    assert read(tier, 0, slots[0]) is ReadOutcome.OK
    assert read(tier, 1, slots[1]) is not ReadOutcome.OK
    assert read(tier, 3, slots[3]) is ReadOutcome.OK
    assert len(scan(open_tier())) == 2


def test_links_and_strange_names_are_left_alone(
    open_tier: Open, slab: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copy(slab, target)
    link = slab.with_name("00000001.slab")
    link.symlink_to(target)
    strange = [slab.with_name(name) for name in ("notes.txt", "1.slab", "0000000A.slab")]
    for path in strange:
        path.write_text("mine")
    tier = open_tier()
    assert set(scan(tier)) == {0, 1, 2}
    assert target.exists()
    assert not link.exists()
    assert all(path.read_text() == "mine" for path in strange)


def test_a_slab_whose_removal_was_lost_does_not_break_the_quota(
    open_tier: Open, root: Path
) -> None:
    tier = open_tier()
    while store(tier, 0) >= 0:
        pass
    back = shutil.copy(slab_paths(root)[0], root / "slabs/000000ff.slab")
    tier = open_tier()
    assert Path(back).exists()
    assert tier.used_bytes == sum(p.stat().st_size for p in slab_paths(root)) <= QUOTA


# --- the root folder


def test_a_root_of_another_format_is_refused(open_tier: Open, slab: Path, root: Path) -> None:
    (root / "format").write_text("kvfold-disk 2\n")
    with pytest.raises(StoreError, match=r"format b'kvfold-disk 2\\n', expected"):
        open_tier()
    (root / "format").unlink()
    with pytest.raises(StoreError, match="no file 'format'"):
        open_tier()
    assert slab.exists()


def test_a_root_of_somebody_else_is_refused(open_tier: Open, files: FaultyFiles) -> None:
    files.owner = os.geteuid() + 1
    with pytest.raises(StoreError, match=rf"user {files.owner}, expected user {os.geteuid()}\b"):
        open_tier()


def test_a_root_that_others_may_write_is_refused(open_tier: Open, root: Path) -> None:
    root.mkdir()
    root.chmod(0o770)
    with pytest.raises(StoreError, match=r"770.*chmod 700"):
        open_tier()


def test_a_root_that_is_a_file_is_refused(open_tier: Open, root: Path) -> None:
    root.write_text("")
    with pytest.raises(StoreError, match="expected a folder"):
        open_tier()


@pytest.mark.parametrize("operation", ["make_folder", "create", "rename"])
def test_a_read_only_root_is_refused(
    open_tier: Open, files: FaultyFiles, root: Path, operation: str
) -> None:
    files.errors[operation] = errno.EROFS
    with pytest.raises(StoreError, match=rf"{root}.*Read-only file system"):
        open_tier()
    files.errors.clear()
    open_tier()  # and the lock was let go


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused(open_tier: Open, root: Path) -> None:
    root.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        open_tier()


def test_a_quota_larger_than_the_disk_is_refused_with_both_figures(
    open_tier: Open, files: FaultyFiles
) -> None:
    files.free = 3 * MIB
    with pytest.raises(StoreError, match=rf"4 MiB \({4 * MIB} .*3 MiB \({3 * MIB} "):
        open_tier(4 * MIB)
    tier = open_tier(3 * MIB)
    store(tier, 0)
    files.free -= tier.used_bytes
    assert open_tier(3 * MIB).used_bytes > 0  # what kvfold's slabs hold counts as to be had


def test_a_lock_without_a_number_is_still_a_lock(open_tier: Open, root: Path) -> None:
    held = DiskTier(root, MIB)
    (root / "lock").write_bytes(b"\xff" * 100)
    with pytest.raises(StoreError, match="pid unknown"):
        open_tier()
    held.close()


def test_without_direct_io_the_tier_is_buffered_and_says_so(
    open_tier: Open, files: FaultyFiles
) -> None:
    files.errors["open_direct"] = errno.EINVAL
    tier = open_tier()
    assert not tier.direct
    assert read(tier, 0, store(tier, 0)) is ReadOutcome.OK
    with pytest.raises(StoreError, match="no direct I/O"):
        open_tier(direct=True)
    files.errors["open_direct"] = errno.EIO  # that is no answer to the question
    with pytest.raises(StoreError, match="Input/output"):
        open_tier()


def test_unreadable_namespace_files_are_left_out(open_tier: Open, root: Path) -> None:
    tier = open_tier()
    tier.remember_namespace(NAMESPACE, '{"a": 1}')
    folder = root / "namespaces"
    (folder / ("00" * 32 + ".json")).write_bytes(b"\xff\xfe")
    (folder / ("11" * 32 + ".json")).write_text("{")
    (folder / ("22" * 32 + ".json")).write_bytes(b'"' + b"x" * MIB + b'"')
    (folder / ("AA" * 32 + ".json")).write_text("{}")
    (folder / ("33" * 32 + ".json.tmp")).write_text("{}")
    (folder / ("44" * 32 + ".json")).symlink_to(folder / f"{NAMESPACE.hex()}.json")
    (folder / ("55" * 32 + ".json")).mkdir()
    assert tier.namespaces() == {NAMESPACE: '{"a": 1}'}


@pytest.mark.parametrize("operation", ["create", "pwrite", "sync", "rename"])
def test_a_namespace_that_could_not_be_written_is_not_there_and_may_be_tried_again(
    open_tier: Open, files: FaultyFiles, operation: str
) -> None:
    tier = open_tier()
    files.errors[operation] = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        tier.remember_namespace(NAMESPACE, "{}")
    assert tier.namespaces() == {}
    files.errors.clear()
    tier.remember_namespace(NAMESPACE, "{}")
    assert tier.namespaces() == {NAMESPACE: "{}"}


# --- operations that fail


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        ("allocate", errno.ENOSPC),
        ("create", errno.EDQUOT),
        ("pwrite", errno.EIO),
        ("sync", errno.EIO),
    ],
)
def test_a_tier_that_cannot_grow_keeps_its_size_and_heals(
    open_tier: Open, files: FaultyFiles, clock: Clock, root: Path, operation: str, number: int
) -> None:
    tier = open_tier()
    slots = [store(tier, n) for n in range(choose_shape(SLOT, QUOTA).slot_count)]
    size = tier.used_bytes

    files.errors[operation] = number
    slot = tier.alloc(SLOT)
    other = tier.alloc(SLOT)
    assert other >> 20 == slot >> 20 != slots[0] >> 20
    for failed in (slot, other):  # the second fails without another attempt
        with pytest.raises(OSError, match=r".") as error:
            store(tier, 99, failed)
        assert error.value.errno in (number, errno.ENOSPC)
        assert read(tier, 99, failed) is not ReadOutcome.OK
    tier.free(slot)
    tier.free(other)
    assert tier.used_bytes == size == sum(p.stat().st_size for p in slab_paths(root))
    assert tier.slots(SLOT) == len(slots)
    assert tier.alloc(SLOT) == -1
    assert tier.steal_candidate(SLOT) is None
    assert tier.report()["growth_error"] == os.strerror(number)

    if operation != "pwrite":
        tier.free(slots[0])
        assert store(tier, 7) == slots[0]  # what it has goes on working
    assert read(tier, 1, slots[1]) is ReadOutcome.OK

    files.errors.clear()
    assert tier.alloc(SLOT) == -1  # not yet
    clock.now += GROWTH_PAUSE_S
    slot = store(tier, 99)
    assert read(tier, 99, slot) is ReadOutcome.OK
    assert tier.report()["growth_error"] is None


def test_a_slab_that_cannot_be_removed_keeps_its_quota(
    open_tier: Open, files: FaultyFiles, root: Path
) -> None:
    tier = open_tier()
    tier.add_class(4 * SLOT)
    placed = []
    while (slot := store(tier, len(placed))) >= 0:
        placed.append(slot)
    tier.write(tier.alloc(4 * SLOT), key(0), NAMESPACE, payload(0), 0)
    size = tier.used_bytes
    files.errors["remove"] = errno.EROFS
    victims = tier.steal_candidate(4 * SLOT)
    assert victims
    for slot in victims:
        tier.free(slot)
    assert tier.alloc(4 * SLOT) == -1
    assert tier.used_bytes == size == sum(p.stat().st_size for p in slab_paths(root))


FULL = PAGE + -(-LENGTH // PAGE) * PAGE
CUTS = [0, 1, 128, 143, 144, PAGE, PAGE + 1, FULL // 2, FULL - PAGE, PAGE + LENGTH - 1]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("over", [None, 5], ids=["zeros", "an old chunk"])
@pytest.mark.parametrize("says_so", [True, False], ids=["short", "torn"])
def test_a_write_that_stops_early_is_never_a_hit(
    open_tier: Open, files: FaultyFiles, cut: int, over: int | None, says_so: bool
) -> None:
    tier = open_tier()
    neighbour, slot = store(tier, 0), tier.alloc(SLOT)
    if over is not None:
        store(tier, over, slot)
    if says_so:
        files.short_bytes = cut
        with pytest.raises(OSError, match="short write"):
            store(tier, 1, slot)
    else:
        files.torn_bytes = cut
        store(tier, 1, slot)
    files.short_bytes = files.torn_bytes = None
    old_is_whole = over is not None and cut <= 1  # the first byte is the same in every slot
    for _ in range(2):  # at once, and after a restart
        assert read(tier, 1, slot) is not ReadOutcome.OK
        assert read(tier, 0, neighbour) is ReadOutcome.OK
        if old_is_whole:
            assert read(tier, over, slot) is ReadOutcome.OK
        tier = open_tier()
        found = scan(tier)
    assert (slot in found) is (cut >= 144 or old_is_whole)
    store(tier, 1, slot)
    assert read(tier, 1, slot) is ReadOutcome.OK


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_raises_and_leaves_its_neighbours(
    open_tier: Open, files: FaultyFiles, number: int
) -> None:
    tier = open_tier()
    neighbour, slot = store(tier, 0), tier.alloc(SLOT)
    files.errors["pwrite"] = number
    with pytest.raises(OSError, match=os.strerror(number)):
        store(tier, 1, slot)
    files.errors.clear()
    assert read(tier, 1, slot) is ReadOutcome.CORRUPT_HEADER
    assert read(tier, 0, neighbour) is ReadOutcome.OK
    tier.free(slot)
    assert store(tier, 1) == slot
    assert read(tier, 1, slot) is ReadOutcome.OK


def test_a_failed_read_raises_and_the_next_may_succeed(open_tier: Open, files: FaultyFiles) -> None:
    tier = open_tier()
    slot = store(tier, 0)
    files.errors["pread"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        read(tier, 0, slot)
    files.errors.clear()
    assert read(tier, 0, slot) is ReadOutcome.OK


def test_a_scan_that_cannot_read_finds_free_space(
    open_tier: Open, slab: Path, files: FaultyFiles
) -> None:
    tier = open_tier()
    files.errors["pread"] = errno.EIO
    assert scan(tier) == {}
    files.errors.clear()
    slot = store(tier, 9)
    assert slot >> 20 == 0
    assert read(tier, 9, slot) is ReadOutcome.OK


def test_a_failed_sync_is_tried_again(open_tier: Open, files: FaultyFiles) -> None:
    tier = open_tier()
    store(tier, 0)
    files.errors["sync_data"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        tier.sync()
    files.errors.clear()
    files.calls.clear()
    tier.sync()
    tier.sync()
    assert files.calls.count("sync_data") == 1


# --- crashes


@pytest.mark.parametrize("seed", range(20))
def test_a_crash_loses_only_what_was_not_synced(
    open_tier: Open, files: FaultyFiles, root: Path, seed: int
) -> None:
    rng = random.Random(seed)
    tier = open_tier()
    slots: dict[int, int] = {}
    for number in range(rng.randrange(1, 20)):
        if (slot := store(tier, number)) >= 0:
            slots[number] = slot
    tier.sync()
    durable = dict(slots)
    for number in range(100, 100 + rng.randrange(12)):  # evict, overwrite, grow
        if rng.random() < 0.5 or (slot := tier.alloc(SLOT)) < 0:
            victim = rng.choice(list(slots))
            slot = slots.pop(victim)
            durable.pop(victim, None)
        store(tier, number, slot)
        slots[number] = slot
    tier.close()
    files.crash(rng)

    tier = open_tier()
    numbers = {key(number): number for number in range(200)}
    good = {
        numbers[item.key]: slot
        for slot, item in scan(tier).items()
        if read(tier, numbers[item.key], slot) is ReadOutcome.OK  # which checks the bytes
    }
    assert durable.items() <= good.items()
    assert tier.used_bytes == sum(p.stat().st_size for p in slab_paths(root)) <= QUOTA


@pytest.mark.parametrize("left", [b"", bytes(PAGE), bytes(PAGE + 3 * STRIDE), b"KVFDSLAB"])
def test_a_crash_while_a_slab_is_made_leaves_nothing(
    open_tier: Open, slab: Path, left: bytes
) -> None:
    half = slab.with_name("00000001.slab")
    half.write_bytes(left)
    tier = open_tier()
    assert not half.exists()
    assert set(scan(tier)) == {0, 1, 2}


def test_no_slot_is_written_before_its_slab_is_durable(open_tier: Open, files: FaultyFiles) -> None:
    tier = open_tier()
    slot = tier.alloc(SLOT)
    files.calls.clear()
    store(tier, 0, slot)
    steps = [c for c in files.calls if c in ("create", "allocate", "pwrite", "sync")]
    assert steps == ["create", "allocate", "pwrite", "sync", "sync", "pwrite"]
