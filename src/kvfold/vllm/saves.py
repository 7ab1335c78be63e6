"""The worker's stores: ask the store, copy what this rank writes, commit, and report every job
once.

Jobs run one after another on a thread of their own, in the order of the scheduler's numbers.
Whatever happens a job is reported, because the scheduler holds references to its source blocks
until then; it is reported only when this worker no longer reads them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import KvfoldError
from kvfold.store.client import NO_ROOM, REFUSED, Verdicts
from kvfold.vllm.messages import StoreOrder
from kvfold.vllm.threads import start_thread

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

FINISH_S = 2.0
"""How long a closing worker goes on with queued jobs."""
COMMIT_EVERY = 8
"""Chunks copied between two commits: published early without a message per chunk."""


class JobClient(Protocol):
    """The part of the store's client that stores need."""

    def ask(
        self,
        job: int,
        group: int,
        namespace: bytes,
        keys: bytes,
        askers: int,
        writers: NDArray[np.uint64],
        audit: bytes = b"",
        timeout_s: float = 10,
    ) -> Verdicts: ...
    def commit(self, job: int, indices: NDArray[np.uint32], ok: bool) -> None: ...


class SaveSource(Protocol):
    """How this rank's pages reach slots: the plan's rotations, writers, copies and audits."""

    rotations: int
    writer_masks: NDArray[np.uint64]
    """One mask of writing ranks per rotation."""
    rank: int
    world: int

    def copy(self, connection: int, rotation: int, blocks: Sequence[int], offset: int) -> int: ...
    def audit_records(self, blocks: NDArray[np.int32]) -> bytes: ...


@dataclass(frozen=True)
class SaveReport:
    """A finished job; `conflicts` are fragments whose replicas differed in its audit."""

    job: int
    conflicts: tuple[int, ...] = ()


@dataclass
class SaveCounters:
    """Totals of this worker; they never go down."""

    jobs: int = 0
    chunks_asked: int = 0
    chunks_written: int = 0
    bytes: int = 0
    no_room: int = 0
    dropped_jobs: int = 0


@dataclass(frozen=True)
class _Item:
    order: StoreOrder
    client: JobClient | None
    connection: int
    computed: Callable[[], None]
    until_s: float


class Saves:
    """Runs the store jobs of one worker on a thread of its own."""

    def __init__(
        self,
        source: SaveSource,
        deadline_s: float,
        *,
        stored: Callable[[bytes, Sequence[int]], None] | None = None,
    ) -> None:
        self._source, self._deadline_s, self._stored = source, deadline_s, stored
        self._jobs: SimpleQueue[_Item | None] = SimpleQueue()
        self._reports: deque[SaveReport] = deque()
        self._stopped = False
        self.counters = SaveCounters()
        self._thread = start_thread("kvfold-saves", self._run)

    def submit(
        self,
        order: StoreOrder,
        client: JobClient | None,
        connection: int,
        computed: Callable[[], None],
    ) -> None:
        """Queue a job. `computed()` blocks until the step that wrote its blocks is complete."""
        until_s = time.monotonic() + self._deadline_s
        self._jobs.put(_Item(order, client, connection, computed, until_s))

    def take_reports(self) -> list[SaveReport]:
        """Jobs ended since the last call, each exactly once."""
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def close(self) -> bool:
        """Finish queued jobs for a moment, drop the rest and end the thread.

        Returns False if a copy still runs.
        """
        self._jobs.put(None)
        self._thread.join(timeout=FINISH_S)
        self._stopped = True
        self._thread.join(timeout=self._deadline_s + FINISH_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            conflicts: tuple[int, ...] = ()
            try:
                # A job that waited too long behind others is dropped unasked: its blocks are held.
                if item.client is None or self._stopped or time.monotonic() > item.until_s:
                    self.counters.dropped_jobs += 1
                else:
                    item.computed()
                    conflicts = self._store(item, item.client)
            except KvfoldError as error:
                self.counters.dropped_jobs += 1
                logger.debug("kvfold: job %d dropped: %s", item.order.job, error)
            except Exception:
                self.counters.dropped_jobs += 1
                logger.exception("kvfold: job %d failed", item.order.job)
            self.counters.jobs += 1
            self._reports.append(SaveReport(item.order.job, conflicts))

    def _store(self, item: _Item, client: JobClient) -> tuple[int, ...]:
        source, order = self._source, item.order
        if self._stored is not None:
            for i, blocks in enumerate(order.blocks.tolist()):
                self._stored(order.keys[32 * i : 32 * i + 32], blocks)
        rotations = np.frombuffer(order.keys, dtype=np.uint8)[::32] % source.rotations
        verdicts = client.ask(
            order.job,
            0,
            order.namespace,
            order.keys,
            (1 << source.world) - 1,
            source.writer_masks[rotations],
            source.audit_records(order.blocks) if order.audit else b"",
            max(0.001, item.until_s - time.monotonic()),
        )
        self.counters.chunks_asked += len(rotations)
        self.counters.no_room += int(np.count_nonzero(verdicts.offsets == np.uint64(NO_ROOM)))
        mine = (source.writer_masks[rotations] >> np.uint64(source.rank)) & np.uint64(1) == 1
        granted = np.flatnonzero((verdicts.offsets < np.uint64(REFUSED)) & mine)
        committed = 0
        try:
            while committed < len(granted):
                part = granted[committed : committed + COMMIT_EVERY]
                for i in part.tolist():
                    blocks, offset = order.blocks[i].tolist(), int(verdicts.offsets[i])
                    self.counters.bytes += source.copy(
                        item.connection, int(rotations[i]), blocks, offset
                    )
                client.commit(order.job, part.astype(np.uint32), True)
                committed += len(part)
        finally:
            self.counters.chunks_written += committed
            if committed < len(granted):
                client.commit(order.job, granted[committed:].astype(np.uint32), False)
        return tuple(verdicts.conflicts.tolist())


def no_wait() -> None:
    """`computed` for devices whose step is complete when `wait_for_save` runs (CPU)."""
