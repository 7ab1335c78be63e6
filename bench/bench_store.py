"""The store's process: lookups through the socket while the disk is busy, and CPU per chunk."""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvfold.store.client import REFUSED, Group, StoreClient
from kvfold.store.settings import StoreSettings

SLOT_BYTES = 512 << 10
HOST_BYTES = 1 << 30
DISK_BYTES = 4 << 30
LOOKUP_KEYS = 8192
LOOKUPS = 50
CPU_CHUNKS = 2000
_JOB_CHUNKS = 64
_SPACE = bytes(32)


class _Store:
    """A private store on the disk of the working folder, and one worker."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=".bench-store-", dir=Path.cwd()))
        settings = StoreSettings(
            host_bytes=HOST_BYTES,
            disk_path=str(self.folder / "disk"),
            disk_bytes=DISK_BYTES,
            runtime_dir=str(self.folder),
            private=True,
        )
        self.client = StoreClient.connect(
            settings,
            role="worker",
            engine="bench",
            fingerprint="bench",
            groups=[Group(SLOT_BYTES, SLOT_BYTES, _SPACE, "{}")],
        )
        self._job = 0

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *_: object) -> None:
        pid = self.client.store_pid
        self.client.stop(drain=False)
        self.client.close()
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self, count: int, *, touch: bool = True) -> bytes:
        """Store `count` new chunks; return their keys, whether or not they found room."""
        assert self.client.arena is not None
        keys = secrets.token_bytes(32 * count)
        offsets = self.client.ask(self._job, 0, _SPACE, keys, 1, np.ones(count, np.uint64)).offsets
        given = np.flatnonzero(offsets < REFUSED).astype(np.uint32)
        arena = np.frombuffer(self.client.arena, np.uint8)
        for row in given if touch else ():
            offset = int(offsets[row])
            arena[offset : offset + SLOT_BYTES] = row & 0xFF
        self.client.commit(self._job, given, True)
        self._job += 1
        return keys

    def cpu_s(self) -> float:
        """Processor time of the store's process so far."""
        fields = Path(f"/proc/{self.client.store_pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def lookups_while_the_disk_is_busy() -> dict[str, Any]:
    """Median of 50 lookups of 8,192 keys through the socket, two disk threads writing."""
    with _Store() as store:
        known = b"".join(store.store(_JOB_CHUNKS) for _ in range(16))
        unknown = secrets.token_bytes(32 * (LOOKUP_KEYS - len(known) // 32))
        stop = threading.Event()

        def keep_busy() -> None:
            while not stop.is_set():
                # The bytes do not matter: without copies of ours the store's own work is all.
                store.store(_JOB_CHUNKS, touch=False)
                disk = store.client.status()["disk"]
                time.sleep(0.02 if disk["queued_writes"] > 128 else 0)

        writer = threading.Thread(target=keep_busy)
        writer.start()
        time.sleep(0.5)
        before = store.client.status()["disk"]["stored_chunks"]
        start_s = time.perf_counter()
        times_s: list[float] = []
        for _ in range(LOOKUPS):
            begin_s = time.perf_counter()
            store.client.lookup(known + unknown, 10)
            times_s.append(time.perf_counter() - begin_s)
            time.sleep(0.02)
        took_s = time.perf_counter() - start_s
        written = store.client.status()["disk"]["stored_chunks"] - before
        stop.set()
        writer.join()
    rate = written * SLOT_BYTES / took_s / 1e9
    return {
        "name": f"{LOOKUP_KEYS:,} keys through the socket, two disk threads busy",
        "value": 1e3 * statistics.median(times_s),
        "unit": "ms",
        "aim": 5,
        "better": "lower",
        "detail": f"worst of {LOOKUPS} {1e3 * max(times_s):.1f} ms; disk at {rate:.2f} GB/s",
    }


def cpu_per_chunk() -> dict[str, Any]:
    """The store's processor time for a chunk of 512 KiB from ask to disk."""
    with _Store() as store:
        store.store(_JOB_CHUNKS)
        store.client.flush(60)
        begin_s, stored = store.cpu_s(), store.client.status()["disk"]["stored_chunks"]
        while store.client.status()["disk"]["stored_chunks"] < stored + CPU_CHUNKS:
            store.store(_JOB_CHUNKS)
            while store.client.status()["disk"]["queued_writes"] > 256:
                time.sleep(0.01)
        used_s = store.cpu_s() - begin_s
        count = store.client.status()["disk"]["stored_chunks"] - stored
    return {
        "name": "store's CPU per chunk of 512 KiB, from ask to disk",
        "value": 1e6 * used_s / count,
        "unit": "µs",
        "aim": None,
        "better": "lower",
        "detail": f"{count} chunks; checksums included",
    }


ROWS = [lookups_while_the_disk_is_busy, cpu_per_chunk]
