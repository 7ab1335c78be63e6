"""The disk tier against the disk's own limit, measured the same way within seconds of each other.

Both sides move the same buffers with two threads and the same open flags: ours through `DiskTier`
(headers, checksums), the limit by bare `pwritev` and `preadv` at aligned offsets of one
preallocated file. A disk's speed drifts, so ratios are taken pair by pair and the median pair
counts.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvfold.store.disk import DiskTier, ReadOutcome

KIB, MIB = 1 << 10, 1 << 20
SIDE_BYTES = 256 * MIB
ARENA_BYTES = 128 * MIB
PAIRS = 7
THREADS = 2
AIM = 0.8
NAMESPACE = sha256(b"bench").digest()

Move = Callable[[int, memoryview], None]


class Side:
    """One way to store and load chunk number i, and the seconds of each pass over all chunks."""

    def __init__(self, store: Move, load: Move) -> None:
        self.moves = {"store": store, "load": load}
        self.spent_s: dict[str, list[float]] = {"store": [], "load": []}
        self.cpu_s: dict[str, list[float]] = {"store": [], "load": []}


class Rig:
    """Two threads, a shared and populated buffer like the arena, and a folder on the disk."""

    def __init__(self, slot_bytes: int, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.slot_bytes = slot_bytes
        self.count = SIDE_BYTES // slot_bytes
        self.folder = folder
        self.pool = pool
        self.arena = memoryview(mmap.mmap(-1, ARENA_BYTES, flags=mmap.MAP_SHARED))
        block = os.urandom(MIB)
        for start in range(0, ARENA_BYTES, MIB):
            self.arena[start : start + MIB] = block
        for number in range(ARENA_BYTES // slot_bytes):  # so that no two slots are equal
            self.arena[number * slot_bytes : number * slot_bytes + 8] = number.to_bytes(8, "little")

    def slot(self, number: int) -> memoryview:
        start = number * self.slot_bytes % ARENA_BYTES
        return self.arena[start : start + self.slot_bytes]

    def measure(self, side: Side, verb: str) -> None:
        """Move every chunk once, the threads taking turns."""
        move = side.moves[verb]

        def work(first: int) -> None:
            for number in range(first, self.count, THREADS):
                move(number, self.slot(number))

        cpu, start = time.process_time(), time.perf_counter()
        for task in [self.pool.submit(work, first) for first in range(THREADS)]:
            task.result()
        side.spent_s[verb].append(time.perf_counter() - start)
        side.cpu_s[verb].append(time.process_time() - cpu)


@contextmanager
def ours(rig: Rig) -> Iterator[tuple[Side, bool]]:
    """The tier's side, and whether it is direct."""
    tier = DiskTier(rig.folder / "tier", SIDE_BYTES + SIDE_BYTES // 4)
    tier.add_class(rig.slot_bytes)
    slots = [tier.alloc(rig.slot_bytes) for _ in range(rig.count)]
    keys = [sha256(b"%d" % number).digest() for number in range(rig.count)]

    def store(number: int, view: memoryview) -> None:
        tier.write(slots[number], keys[number], NAMESPACE, view, number)

    def load(number: int, view: memoryview) -> None:
        if tier.read(slots[number], keys[number], NAMESPACE, view) is not ReadOutcome.OK:
            raise SystemExit("the tier did not give back what it was given")

    yield Side(store, load), tier.direct
    tier.close()


@contextmanager
def limit(rig: Rig, direct: bool) -> Iterator[Side]:
    """The disk's own side."""
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    fd = os.open(rig.folder / "limit", flags, 0o600)
    os.posix_fallocate(fd, 0, rig.count * rig.slot_bytes)

    def store(number: int, view: memoryview) -> None:
        os.pwritev(fd, [view], number * rig.slot_bytes)

    def load(number: int, view: memoryview) -> None:
        os.preadv(fd, [view], number * rig.slot_bytes)

    yield Side(store, load)
    os.close(fd)


def compare(slot_bytes: int) -> dict[str, Any]:
    """Store and load 256 MiB in slots of `slot_bytes`, in interleaved pairs.

    Per verb: median ratio of our rate to the limit's, median rates in GB/s, and CPU per chunk of
    ours in microseconds. The first pass makes slabs and is given apart, as `filling_ratio`.
    """
    out = Path(__file__).resolve().parent.parent / "out"
    out.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-disk-", dir=out))
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            rig = Rig(slot_bytes, folder, pool)
            with ours(rig) as (tier, direct), limit(rig, direct) as bare:
                for pair in range(1 + PAIRS):
                    order = [tier, bare] if pair % 2 else [bare, tier]
                    for verb in ("store", "load"):
                        for side in order:
                            rig.measure(side, verb)
                return figures(rig, tier, bare, direct)
    finally:
        shutil.rmtree(folder)


def figures(rig: Rig, tier: Side, bare: Side, direct: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "slot_bytes": rig.slot_bytes,
        "direct": direct,
        "filling_ratio": bare.spent_s["store"][0] / tier.spent_s["store"][0],
    }
    total = rig.count * rig.slot_bytes
    for verb in ("store", "load"):
        mine, limits = tier.spent_s[verb][1:], bare.spent_s[verb][1:]
        ratios = [theirs / own for own, theirs in zip(mine, limits, strict=True)]
        found[f"{verb}_ratio"] = statistics.median(ratios)
        found[f"{verb}_ratio_range"] = [min(ratios), max(ratios)]
        found[f"{verb}_gb_per_s"] = total / statistics.median(mine) / 1e9
        found[f"{verb}_limit_gb_per_s"] = total / statistics.median(limits) / 1e9
        cpu_s = statistics.median(tier.cpu_s[verb][1:])
        found[f"{verb}_cpu_us_per_chunk"] = 1e6 * cpu_s / rig.count
        bare_s = statistics.median(bare.cpu_s[verb][1:])
        found[f"{verb}_limit_cpu_us_per_chunk"] = 1e6 * bare_s / rig.count
    return found


def _rows(slot_bytes: int) -> list[dict[str, Any]]:
    found = compare(slot_bytes)
    size = f"{slot_bytes // KIB} KiB" if slot_bytes < MIB else f"{slot_bytes // MIB} MiB"
    how = "direct" if found["direct"] else "buffered"
    shown = []
    for verb, title in (("store", "arena to disk"), ("load", "disk to arena")):
        low, high = found[f"{verb}_ratio_range"]
        detail = (
            f"{found[f'{verb}_gb_per_s']:.2f} of {found[f'{verb}_limit_gb_per_s']:.2f} GB/s, {how},"
            f" median of {PAIRS} pairs ({low:.2f} to {high:.2f})"
        )
        if verb == "store":
            detail += f"; while the slabs are made {found['filling_ratio']:.2f}"
        shown.append(
            {
                "name": f"{title}, {size} slots, {THREADS} threads",
                "value": found[f"{verb}_ratio"],
                "unit": "of the disk's limit",
                "aim": AIM,
                "better": "higher",
                "detail": detail,
            }
        )
    shown.append(
        {
            "name": f"CPU to write one {size} chunk to disk",
            "value": found["store_cpu_us_per_chunk"],
            "unit": "us",
            "aim": None,
            "better": "lower",
            "detail": f"the bare write takes {found['store_limit_cpu_us_per_chunk']:.0f} us",
        }
    )
    return shown


def slots_of_512_kib() -> list[dict[str, Any]]:
    """Rows for slots of 512 KiB."""
    return _rows(512 * KIB)


def slots_of_4_mib() -> list[dict[str, Any]]:
    """Rows for slots of 4 MiB."""
    return _rows(4 * MIB)


ROWS = [slots_of_512_kib, slots_of_4_mib]

if __name__ == "__main__":
    for slot_size in (512 * KIB, 4 * MIB):
        print(json.dumps(compare(slot_size), indent=2))
