"""Where virtual clusters keep their chunks: a real store process, or plain memory.

A *shelf* serves several clusters, one *session* each. Both kinds give the same answers; memory
publishes a chunk only when every writer has committed, as the store does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import ConfigError, StoreError
from kvfold.store.client import EXISTS, NO_ROOM, REFUSED, Group, StoreClient, StoreSettings
from kvfold.store.messages import AUDIT_RECORD, MAX_RANKS, NO_FRAGMENT

Bytes = NDArray[np.uint8]
Copy = Callable[[int, int, int], None]
"""copy(rank, index of the chunk, slot offset): fill the rank's pages"""

KEY_BYTES = 32
ANSWER_S = 60.0
PUBLISH_S = 5.0
_ROOM_BYTES = 64 << 20
"""Beside the chunks themselves: extents of each slot size, and the reserve."""


class Session(Protocol):
    """One cluster on a shelf. `group` counts the groups given to `open`."""

    def arena(self, rank: int) -> memoryview | Bytes: ...
    def ask(
        self, group: int, keys: bytes, writers: Sequence[int], audits: Sequence[bytes]
    ) -> tuple[int, list[int], tuple[int, ...]]:
        """Return job, an offset or mark per key, and fragments whose owners differ.

        `writers` is a mask of ranks per key; `audits` one text of records per rank.
        """
        ...

    def commit(self, job: int, rank: int, indices: Sequence[int]) -> None: ...
    def load(self, group: int, keys: bytes, copy: Copy) -> str | None:
        """Have every chunk copied by every rank; return why that failed, or None."""
        ...

    def close(self) -> None: ...


class Shelf(Protocol):
    """Keeps chunks for the sessions opened on it."""

    def open(self, engine: str, world: int, fingerprint: str, groups: Sequence[Group]) -> Session:
        """Return a session for a cluster of `world` ranks."""
        ...


class MemoryShelf:
    """Chunks in one array of `capacity_bytes`; for tests with many small clusters."""

    def __init__(self, capacity_bytes: int) -> None:
        self.memory: Bytes = np.full(capacity_bytes, 0xC3, np.uint8)
        self.chunks: dict[bytes, int] = {}
        self.used_bytes = 0

    def open(self, engine: str, world: int, fingerprint: str, groups: Sequence[Group]) -> Session:
        return _MemorySession(self, world, groups)


class _MemorySession:
    def __init__(self, shelf: MemoryShelf, world: int, groups: Sequence[Group]) -> None:
        self._shelf, self._world, self._groups = shelf, world, groups
        self._open: dict[tuple[int, int], tuple[bytes, int, set[int]]] = {}
        self._jobs = 0

    def arena(self, rank: int) -> Bytes:
        return self._shelf.memory

    def ask(
        self, group: int, keys: bytes, writers: Sequence[int], audits: Sequence[bytes]
    ) -> tuple[int, list[int], tuple[int, ...]]:
        self._jobs += 1
        offsets: list[int] = []
        if conflicts := _conflicts(audits):
            return self._jobs, [REFUSED] * len(writers), conflicts
        for i, mask in enumerate(writers):
            key, slot = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], self._groups[group].slot_bytes
            offset = self._shelf.used_bytes
            if key in self._shelf.chunks:
                offset = EXISTS
            elif offset + slot > len(self._shelf.memory):
                offset = NO_ROOM
            else:
                self._shelf.used_bytes += slot
                waiting = {r for r in range(self._world) if mask >> r & 1}
                self._open[self._jobs, i] = key, offset, waiting
            offsets.append(offset)
        return self._jobs, offsets, ()

    def commit(self, job: int, rank: int, indices: Sequence[int]) -> None:
        for i in indices:
            key, offset, waiting = self._open[job, i]
            waiting.remove(rank)
            if not waiting:
                self._shelf.chunks[key] = offset

    def load(self, group: int, keys: bytes, copy: Copy) -> str | None:
        for i in range(len(keys) // KEY_BYTES):
            offset = self._shelf.chunks.get(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])
            if offset is None:
                return f"chunk {i} is not stored"
            for rank in range(self._world):
                copy(rank, i, offset)
        return None

    def close(self) -> None:
        self._open.clear()


def _conflicts(audits: Sequence[bytes]) -> tuple[int, ...]:
    seen: dict[int, int] = {}
    found: set[int] = set()
    for records in audits:
        for fragment, checksum in np.frombuffer(records, AUDIT_RECORD).tolist():
            if fragment != NO_FRAGMENT and seen.setdefault(fragment, checksum) != checksum:
                found.add(fragment)
    return tuple(sorted(found))


class StoreShelf:
    """A store process of its own, in a folder of its own; see `store_shelf`."""

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings

    def open(self, engine: str, world: int, fingerprint: str, groups: Sequence[Group]) -> Session:
        """Raises `ConfigError` for more ranks than a store serves, `StoreError` if none starts."""
        check_world(world)
        return _StoreSession(self.settings, engine, world, fingerprint, groups)


def check_world(world: int) -> None:
    """Raise `ConfigError` for more ranks than a store serves."""
    if world > MAX_RANKS:
        raise ConfigError("ranks", world, f"at most {MAX_RANKS}: one store serves one machine")


def unpublished(scheduler: StoreClient, keys: bytes) -> str | None:
    """Wait a moment for commits under way; say which chunk is not there."""
    until_s = time.monotonic() + PUBLISH_S
    while True:
        tiers = scheduler.lookup(keys, ANSWER_S)
        if (at := tiers.find(0)) < 0:
            return None
        if time.monotonic() > until_s:
            return f"chunk {at} is not stored"
        time.sleep(0.01)


@contextmanager
def store_shelf(payload_bytes: int) -> Iterator[StoreShelf]:
    """Yield a shelf with room for `payload_bytes` of slots; its store ends with the block."""
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        settings = StoreSettings(
            host_bytes=2 * payload_bytes + _ROOM_BYTES,
            store_name="selftest",
            runtime_dir=folder,
            linger_s=10.0,
            populate=False,
        )
        shelf = StoreShelf(settings)
        try:
            yield shelf
        finally:
            _stop(settings.runtime_path())


def _stop(folder: Path) -> None:
    """End the store of `folder`, if one runs."""
    try:
        StoreClient.connect_tool(folder).stop(drain=False)
    except StoreError:
        return  # it never started, or has ended


class _StoreSession:
    def __init__(
        self,
        settings: StoreSettings,
        engine: str,
        world: int,
        fingerprint: str,
        groups: Sequence[Group],
    ) -> None:
        self._world, self._groups, self._jobs, self._tickets = world, groups, 0, 0
        self._news: SimpleQueue[tuple[int, int, list[int], list[int]] | str] = SimpleQueue()
        self._clients: list[StoreClient] = []
        connect = partial(
            StoreClient.connect,
            settings,
            engine=engine,
            world=world,
            fingerprint=fingerprint,
            groups=groups,
        )
        self._pool = ThreadPoolExecutor(world, "selftest-rank")
        try:
            self._scheduler = connect(role="scheduler")
            self._clients.append(self._scheduler)
            for rank in range(world):
                ready = partial(self._ready, rank)
                self._clients.append(
                    connect(role="worker", rank=rank, on_ready=ready, on_failed=self._failed)
                )
        except BaseException:
            self.close()
            raise

    def arena(self, rank: int) -> memoryview:
        arena = self._clients[1 + rank].arena
        if arena is None:
            raise StoreError(f"rank {rank} has no memory of the store")
        return arena

    def ask(
        self, group: int, keys: bytes, writers: Sequence[int], audits: Sequence[bytes]
    ) -> tuple[int, list[int], tuple[int, ...]]:
        self._jobs += 1
        job, everyone = self._jobs, (1 << self._world) - 1
        masks, space = np.array(writers, np.uint64), self._groups[group].namespace
        # All at once: an audited job is answered when every rank has asked.
        asked = [
            self._pool.submit(client.ask, job, group, space, keys, everyone, masks, audit, ANSWER_S)
            for client, audit in zip(self._clients[1:], audits, strict=True)
        ]
        verdicts = [future.result() for future in asked]
        offsets, conflicts = verdicts[0].offsets.tolist(), verdicts[0].conflicts.tolist()
        for rank, verdict in enumerate(verdicts):
            if verdict.offsets.tolist() != offsets:
                raise StoreError(f"the store answered rank {rank} otherwise than rank 0")
        return job, offsets, tuple(conflicts)

    def commit(self, job: int, rank: int, indices: Sequence[int]) -> None:
        self._clients[1 + rank].commit(job, np.array(indices, np.uint32), True)

    def load(self, group: int, keys: bytes, copy: Copy) -> str | None:
        self._tickets += 1
        ticket, chunks = self._tickets, len(keys) // KEY_BYTES
        if missing := unpublished(self._scheduler, keys):
            return missing
        space, everyone = self._groups[group].namespace, (1 << self._world) - 1
        self._scheduler.open_ticket(ticket, group, space, keys, everyone)
        left, failure = chunks * self._world, None
        while left and failure is None:
            try:
                news = self._news.get(timeout=ANSWER_S)
            except Empty:
                failure = f"the store announced nothing for {ANSWER_S:.0f} s"
                break
            if isinstance(news, str):
                failure = news
                break
            rank, announced, indices, offsets = news
            if announced != ticket:  # of a load that failed
                continue
            for index, offset in zip(indices, offsets, strict=True):
                copy(rank, index, offset)
            self._clients[1 + rank].ack(ticket, np.array(indices, np.uint32))
            left -= len(indices)
        if not self._released(ticket) and failure is None:
            failure = "the store did not hold the chunks to the end"
        while not self._news.empty():  # failures are told to every rank
            self._news.get()
        return failure

    def _released(self, ticket: int) -> bool:
        answers: SimpleQueue[bool] = SimpleQueue()
        for client in self._clients[1:]:
            client.done(ticket, answers.put)
        held = [answers.get(timeout=ANSWER_S) for _ in self._clients[1:]]
        return all(held)

    def _ready(
        self, rank: int, ticket: int, indices: NDArray[np.uint32], offsets: NDArray[np.uint64]
    ) -> None:
        self._news.put((rank, ticket, indices.tolist(), offsets.tolist()))

    def _failed(self, ticket: int, index: int, reason: str) -> None:
        self._news.put(f"chunk {index}: {reason}")

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._pool.shutdown()
