"""Store jobs: who gets which slot, when a chunk is complete, and when a slot is free again.

A job is (engine, number). Its first `Ask` decides for every key; all askers get that answer.
See docs/protocol.md, 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import FormatError
from kvfold.store.arena import PAGE_BYTES
from kvfold.store.chunks import ChunkTable, Ints
from kvfold.store.core_clients import Client, Engine, Quarantine, Send
from kvfold.store.core_room import room_for_writing
from kvfold.store.messages import (
    EXISTS,
    NO_FRAGMENT,
    NO_ROOM,
    REFUSED,
    Ask,
    Commit,
    Keys64,
    Verdicts,
    as_audit,
    as_indices,
    as_keys,
    as_words,
)

MAX_JOBS = 4096

# Fate of each key of a decided job.
SETTLED, OPEN, ABORTED = range(3)


class Job:
    """One job. `left` holds, per key, the ranks that must commit (open) or let go (aborted)."""

    def __init__(self, ask: Ask, client: Client, deadline_s: float) -> None:
        self.group, self.cls = client.group(ask.group)
        self.engine = client.engine
        self.ask = ask
        self.keys: Keys64 = as_keys(ask.keys)
        count = len(self.keys)
        self.writers = as_words(ask.writers, count)
        if count and int(np.bitwise_or.reduce(self.writers)) & ~ask.askers:
            raise FormatError("a writer that does not ask")
        self.left: NDArray[np.uint64] = np.zeros(count, np.uint64)
        self.fate = np.zeros(count, np.uint8)
        self.slots: Ints = np.full(count, -1, np.int64)
        self.entries: Ints = np.full(count, -1, np.int64)
        self.offsets: NDArray[np.uint64] = np.full(count, EXISTS, np.uint64)
        self.conflicts = b""
        self.asked = 0
        self.told = 0
        self.gone = 0
        self.decided = False
        self.expired = False
        self.deadline_s = deadline_s
        self.audits: list[NDArray[np.void]] = []
        self.waiting: list[tuple[Client, int]] = []

    def same(self, ask: Ask) -> bool:
        """Whether another rank's `Ask` is for the same thing."""
        mine = self.ask
        return (
            (ask.group, ask.askers) == (mine.group, mine.askers)
            and ask.namespace == mine.namespace
            and ask.keys == mine.keys
            and ask.writers == mine.writers
            and (bool(mine.audit) or not ask.audit)
        )

    @property
    def all_asked(self) -> bool:
        return not self.ask.askers & ~(self.asked | self.gone)

    @property
    def over(self) -> bool:
        everybody = not self.ask.askers & ~self.asked or self.expired
        return self.decided and everybody and not self.left.any()


class JobBook:
    """All jobs of all engines."""

    def __init__(
        self,
        table: ChunkTable,
        quarantine: Quarantine,
        send: Send,
        published: Callable[[Ints], None],
        job_deadline_s: float,
    ) -> None:
        self._table = table
        self._quarantine = quarantine
        self._send = send
        self._published = published
        self._job_deadline_s = job_deadline_s
        self._deadlines: deque[tuple[float, Job]] = deque()
        self.accepting = True
        self.conflicts = 0
        self.no_room = 0
        self.declined = 0  # chunks whose writer gave them up, as commits say
        self.abandoned = 0  # chunks whose writer is gone or was silent for too long

    def ask(self, client: Client, ask: Ask, now_s: float) -> None:
        """Answer an `Ask`, now or (audited) when everybody has asked. Raises `FormatError`."""
        if not ask.askers & client.bit:
            raise FormatError(f"rank {client.rank} is not among the askers of job {ask.job}")
        jobs = client.engine.jobs
        job = jobs.get(ask.job)
        if job is None:
            job = Job(ask, client, now_s + self._job_deadline_s)
            if not self.accepting or len(jobs) >= MAX_JOBS:
                offsets = np.full(len(job.keys), NO_ROOM, np.uint64)
                self._send(client.number, Verdicts(ask.rid, offsets.tobytes(), b""))
                return
            jobs[ask.job] = job
            self._deadlines.append((job.deadline_s, job))
            job.gone = ask.askers & ~client.engine.connected
        elif not job.same(ask):
            raise FormatError(f"job {ask.job}: ranks ask for different things")
        records = as_audit(ask.audit)
        repeated = bool(job.asked & client.bit)
        job.asked |= client.bit
        if job.decided or not job.ask.audit:
            if not job.decided:
                self._decide(job)
            self._answer(job, client, ask.rid, repeated)
        else:
            job.audits.append(records)
            job.waiting.append((client, ask.rid))
            if job.all_asked:
                self._finish_audit(job)
        self._forget_if_over(job)

    def commit(self, client: Client, commit: Commit) -> None:
        """Take a writer's word for some keys of a job. Raises `FormatError`."""
        job = client.engine.jobs.get(commit.job)
        if job is None or not job.told & client.bit:
            return
        indices = as_indices(commit.indices, len(job.keys))
        bit = np.uint64(client.bit)
        mine = indices[(job.left[indices] & bit) != 0]
        job.left[mine] &= ~bit
        opened = mine[job.fate[mine] == OPEN]
        self._quarantine.release(job.slots[mine[job.fate[mine] == ABORTED]])
        if commit.ok:
            self._publish(job, opened[job.left[opened] == 0])
        else:
            self.declined += len(opened)
            self._abort(job, opened)
        self._forget_if_over(job)

    def leave(self, client: Client, *, process_gone: bool) -> None:
        """A worker is gone: abort what waits for it; what it was told of stays with it."""
        bit = np.uint64(client.bit)
        for job in list(client.engine.jobs.values()):
            job.gone |= client.bit & job.ask.askers
            job.waiting = [(c, rid) for c, rid in job.waiting if c is not client]
            mine = np.flatnonzero(job.left & bit)
            opened = mine[job.fate[mine] == OPEN]
            self.abandoned += len(opened)
            self._abort(job, opened)
            mine = mine[(job.left[mine] & bit) != 0]  # those it was told of
            job.left[mine] &= ~bit
            if process_gone:
                self._quarantine.release(job.slots[mine])
            else:
                client.held_slots.extend(job.slots[mine].tolist())
            if not job.decided and job.all_asked:
                self._finish_audit(job)
            self._forget_if_over(job)

    def tick(self, now_s: float) -> float | None:
        """Abort what is overdue; return when the next job will be."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, job = self._deadlines.popleft()
            if job.engine.jobs.get(job.ask.job) is not job:
                continue
            if not job.decided:
                self._finish_audit(job)
                self._deadlines.append((now_s + self._job_deadline_s, job))
            else:
                job.expired = True
                late = np.flatnonzero(job.fate == OPEN)
                self.abandoned += len(late)
                self._abort(job, late)
            self._forget_if_over(job)
        return self._deadlines[0][0] if self._deadlines else None

    # ---- steps ------------------------------------------------------------------------------

    def _decide(self, job: Job) -> None:
        """Fix the verdict of every key."""
        table, cls = self._table, job.cls
        job.decided = True
        found = table.find(job.keys)
        table.touch(found[found >= 0])
        wanting = _first_of_each(job.keys, np.flatnonzero(found < 0))
        connected = np.uint64(job.engine.connected)
        masks = job.writers[wanting]
        possible = (masks != 0) & ((masks & ~connected) == 0)
        job.offsets[wanting] = NO_ROOM
        wanting = wanting[possible]
        slots = table.take_host(cls, min(len(wanting), room_for_writing(table, cls)))
        self.no_room += len(wanting) - len(slots)
        given = wanting[: len(slots)]
        if not len(given):
            return
        namespace = table.namespace_number(job.ask.namespace)
        job.entries[given] = table.begin_write(
            job.keys[given], slots, cls, namespace, job.group.payload_bytes, job.group.durable
        )
        job.slots[given] = slots
        job.offsets[given] = (slots * PAGE_BYTES).astype(np.uint64)
        job.left[given] = job.writers[given]
        job.fate[given] = OPEN

    def _answer(self, job: Job, client: Client, rid: int, repeated: bool) -> None:
        """Tell a rank the verdicts. One that asks again was told elsewhere, and gets no slot."""
        offsets = job.offsets
        closed = job.slots >= 0 if repeated else job.fate == ABORTED
        if closed.any():
            offsets = np.where(closed, np.uint64(NO_ROOM), offsets)
        if not repeated:
            job.told |= client.bit
        self._send(client.number, Verdicts(rid, offsets.tobytes(), job.conflicts))

    def _finish_audit(self, job: Job) -> None:
        """Compare what the owners said, decide, and answer everybody who waits."""
        conflicts = _conflicts(job.audits)
        job.audits = []
        if len(conflicts):
            self.conflicts += 1
            job.decided = True
            job.offsets[:] = REFUSED
            job.conflicts = conflicts.astype("<u4").tobytes()
        elif job.waiting:
            self._decide(job)
        else:  # nobody is left to write
            job.decided = job.expired = True
            job.offsets[:] = NO_ROOM
        waiting, job.waiting = job.waiting, []
        for client, rid in waiting:
            self._answer(job, client, rid, repeated=bool(job.told & client.bit))

    def _publish(self, job: Job, indices: Ints) -> None:
        if len(indices):
            job.fate[indices] = SETTLED
            self._table.publish(job.entries[indices])
            self._published(job.entries[indices])

    def _abort(self, job: Job, indices: Ints) -> None:
        """Publish nothing; keep each slot from use until the ranks told of it have let go."""
        if not len(indices):
            return
        slots = self._table.abort_write(job.entries[indices])
        job.fate[indices] = ABORTED
        job.left[indices] &= np.uint64(job.told)
        for slot, left in zip(slots.tolist(), job.left[indices].tolist(), strict=True):
            self._quarantine.hold(slot, left.bit_count(), job.cls)

    def _forget_if_over(self, job: Job) -> None:
        if job.over and job.engine.jobs.get(job.ask.job) is job:
            del job.engine.jobs[job.ask.job]

    def drop_engine(self, engine: Engine) -> None:
        """Forget the jobs of an engine without clients; all of them were aborted."""
        engine.jobs.clear()


def _first_of_each(keys: Keys64, rows: Ints) -> Ints:
    """The rows whose key no earlier row has."""
    if len(np.unique(keys[rows, 0])) == len(rows):
        return rows
    first: dict[bytes, int] = {}
    for row in rows.tolist():
        first.setdefault(keys[row].tobytes(), row)
    return np.array(list(first.values()), np.int64)


def _conflicts(audits: list[NDArray[np.void]]) -> NDArray[np.uint32]:
    """Fragments that two records give different checksums for."""
    if not audits:
        return np.zeros(0, np.uint32)
    records = np.concatenate(audits)
    records = records[records["fragment"] != NO_FRAGMENT]
    fragment, checksum = records["fragment"], records["checksum"]
    order = np.lexsort((checksum, fragment))
    fragment, checksum = fragment[order], checksum[order]
    differ = (fragment[1:] == fragment[:-1]) & (checksum[1:] != checksum[:-1])
    return np.unique(fragment[1:][differ]).astype(np.uint32)
