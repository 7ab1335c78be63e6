"""What the scheduler side and the workers tell each other, inside vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

NO_BLOCK = -1
"""In a block table: this block of the chunk is not to be filled."""


@dataclass(frozen=True)
class LoadPart:
    """One group's chunks of a load.

    `group` is the group's number in the store (its place in `OffloadPlan.stored`). `blocks` has
    shape (chunks, blocks per chunk of the group); row i belongs to key i of the ticket. An
    `optional` part (a draft's) may fail without failing the load.
    """

    ticket: int
    group: int
    keys: bytes
    blocks: NDArray[np.int32]
    optional: bool = False


@dataclass(frozen=True)
class LoadOrder:
    """Fill a request's blocks, of all groups or of none.

    `store` is the store that the tickets were opened on ("" if there was none: the load fails at
    once). `load` numbers the load; a load without parts fails at once, too.
    """

    load: int
    req_id: str
    store: str
    parts: tuple[LoadPart, ...]


@dataclass(frozen=True)
class StoreOrder:
    """Offer one group's chunks to the store: key i belongs to row i of `blocks` (chunks, blocks per
    chunk of the group)."""

    job: int
    group: int
    namespace: bytes
    keys: bytes
    blocks: NDArray[np.int32]
    audit: bool


@dataclass
class StepOrders(KVConnectorMetadata):
    """All orders of one engine step, for every worker alike."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    pause_s: float = 0.0
    """This step computes nothing, the engine only waits for kvfold: a worker rests so long."""
    reset: bool = False
    """The epoch changed: loads begun before must not be served."""


@dataclass(frozen=True)
class LoadFailure:
    """A load that failed: chunk `index` of part `part` is the first that could not be had."""

    load: int
    part: int
    index: int
    reason: str


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """What workers finished since the last step.

    `jobs`: how many workers ended each job. `failures`: per request, those of all workers.
    `conflicts`: (group, fragment) pairs whose replicas differed. `without_draft`: requests whose
    load ended without an optional part. `stored`: if anybody wants to
    know, per job one byte per chunk, 1 if these workers did all they had to do for it.
    """

    jobs: dict[int, int] = field(default_factory=dict)
    failures: dict[str, list[LoadFailure]] = field(default_factory=dict)
    conflicts: list[tuple[int, int]] = field(default_factory=list)
    stored: dict[int, bytes] = field(default_factory=dict)
    without_draft: list[str] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        """Merge another worker's results of the same step."""
        assert isinstance(other, StepResults)
        for job, count in other.jobs.items():
            self.jobs[job] = self.jobs.get(job, 0) + count
        for req_id, failures in other.failures.items():
            self.failures.setdefault(req_id, []).extend(failures)
        self.without_draft += other.without_draft
        self.conflicts = sorted({*self.conflicts, *other.conflicts})
        for job, theirs in other.stored.items():
            both = np.frombuffer(self.stored.get(job, theirs), "u1") & np.frombuffer(theirs, "u1")
            self.stored[job] = both.tobytes()
        return self


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """A worker's stage record (canonical JSON) and the fingerprint of the plan it built."""

    record: str
    fingerprint: str
