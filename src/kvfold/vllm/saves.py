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
from kvfold.store.client import EXISTS, NO_ROOM, REFUSED, Verdicts
from kvfold.vllm.messages import StoreOrder
from kvfold.vllm.metrics import (
    CHUNKS_NO_ROOM,
    STORE_JOBS_DROPPED,
    STORE_SECONDS,
    STORED_AS_TP_COPIES_BYTES,
    STORED_BYTES,
    STORED_CHUNKS,
    Recorder,
)
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
    """How this rank's pages reach slots. Groups are numbered as in the store."""

    rank: int
    world: int
    writer_masks: Sequence[NDArray[np.uint64]]
    """Per group one mask of writing ranks per rotation."""
    labels: Sequence[str]
    """Each group's name in metrics."""
    copies_bytes: Sequence[int]
    """Per group, what the engine's own TP copies of a chunk would take."""

    def copy(
        self, connection: int, group: int, rotation: int, blocks: Sequence[int], offset: int
    ) -> int: ...
    def audit_records(self, group: int, blocks: NDArray[np.int32]) -> bytes: ...


@dataclass(frozen=True)
class SaveReport:
    """A finished job.

    `conflicts` are (group, fragment) pairs whose replicas differed in its audit. `stored` has one
    byte per chunk: 1 if the store has it or this worker did what it had to do for it.
    """

    job: int
    conflicts: tuple[tuple[int, int], ...]
    stored: bytes


@dataclass(frozen=True)
class _Item:
    order: StoreOrder
    client: JobClient | None
    connection: int
    computed: Callable[[], None]
    started_s: float


class Saves:
    """Runs the store jobs of one worker on a thread of its own."""

    def __init__(
        self,
        source: SaveSource,
        deadline_s: float,
        *,
        recorder: Recorder | None = None,
        offered: Callable[[int, bytes, Sequence[int]], None] | None = None,
    ) -> None:
        self._source, self._deadline_s, self._offered = source, deadline_s, offered
        self._recorder = recorder or Recorder()
        self._jobs: SimpleQueue[_Item | None] = SimpleQueue()
        self._reports: deque[SaveReport] = deque()
        self._stopped = False
        self._thread = start_thread("kvfold-saves", self._run)

    def submit(
        self,
        order: StoreOrder,
        client: JobClient | None,
        connection: int,
        computed: Callable[[], None],
    ) -> None:
        """Queue a job. `computed()` blocks until the step that wrote its blocks is complete."""
        self._jobs.put(_Item(order, client, connection, computed, time.monotonic()))

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
            order = item.order
            report = SaveReport(order.job, (), bytes(len(order.blocks)))
            dropped = True
            try:
                # A job that waited too long behind others is dropped unasked: its blocks are held.
                if item.client is not None and not self._stopped and self._left_s(item) > 0:
                    item.computed()
                    report = self._store(item, item.client)
                    dropped = False
            except KvfoldError as error:
                logger.debug("kvfold: job %d dropped: %s", order.job, error)
            except Exception:
                logger.exception("kvfold: job %d failed", order.job)
            if dropped:
                self._recorder.add(STORE_JOBS_DROPPED)
            self._recorder.observe(STORE_SECONDS, time.monotonic() - item.started_s)
            self._reports.append(report)

    def _left_s(self, item: _Item) -> float:
        return item.started_s + self._deadline_s - time.monotonic()

    def _store(self, item: _Item, client: JobClient) -> SaveReport:
        source, order = self._source, item.order
        if len(order.blocks) and order.blocks.min() < 0:
            raise ValueError("a chunk without all its blocks was ordered to be stored")
        if self._offered is not None:
            for i, blocks in enumerate(order.blocks.tolist()):
                self._offered(order.group, order.keys[32 * i : 32 * i + 32], blocks)
        masks = source.writer_masks[order.group]
        rotations = np.frombuffer(order.keys, dtype=np.uint8)[::32] % len(masks)
        writers = masks[rotations]
        verdicts = client.ask(
            order.job,
            order.group,
            order.namespace,
            order.keys,
            (1 << source.world) - 1,
            writers,
            source.audit_records(order.group, order.blocks) if order.audit else b"",
            max(0.001, self._left_s(item)),
        )
        offsets = verdicts.offsets
        mine = (writers >> np.uint64(source.rank)) & np.uint64(1) == 1
        granted = offsets < np.uint64(REFUSED)
        self._write(item, client, np.flatnonzero(granted & mine), rotations, offsets)
        self._count(order.group, writers, offsets, granted)
        return SaveReport(
            order.job,
            tuple((order.group, fragment) for fragment in verdicts.conflicts.tolist()),
            (granted | (offsets == np.uint64(EXISTS))).tobytes(),
        )

    def _write(
        self,
        item: _Item,
        client: JobClient,
        chunks: NDArray[np.intp],
        rotations: NDArray[np.uint8],
        offsets: NDArray[np.uint64],
    ) -> None:
        """Copy this rank's part of `chunks` to their slots, and commit; all or an error."""
        source, order = self._source, item.order
        committed = nbytes = 0
        try:
            while committed < len(chunks):
                part = chunks[committed : committed + COMMIT_EVERY]
                for i in part.tolist():
                    nbytes += source.copy(
                        item.connection,
                        order.group,
                        int(rotations[i]),
                        order.blocks[i].tolist(),
                        int(offsets[i]),
                    )
                client.commit(order.job, part.astype(np.uint32), True)
                committed += len(part)
        finally:
            if committed < len(chunks):
                client.commit(order.job, chunks[committed:].astype(np.uint32), False)
            self._recorder.add(STORED_BYTES, nbytes, group=source.labels[order.group])

    def _count(
        self,
        group: int,
        writers: NDArray[np.uint64],
        offsets: NDArray[np.uint64],
        granted: NDArray[np.bool_],
    ) -> None:
        """Figures of chunks: the store told all workers the same, one of them counts."""
        source = self._source
        first = writers & (~writers + np.uint64(1)) == np.uint64(1 << source.rank)
        chunks = int(np.count_nonzero(granted & first))
        if chunks:
            label = source.labels[group]
            self._recorder.add(STORED_CHUNKS, chunks, group=label)
            self._recorder.add(
                STORED_AS_TP_COPIES_BYTES, chunks * source.copies_bytes[group], group=label
            )
        if source.rank == 0:
            self._recorder.add(CHUNKS_NO_ROOM, int(np.count_nonzero(offsets == np.uint64(NO_ROOM))))


def no_wait() -> None:
    """`computed` for devices whose step is complete when `wait_for_save` runs (CPU)."""
