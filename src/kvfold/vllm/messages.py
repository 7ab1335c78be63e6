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
class LoadOrder:
    """Fill blocks from a ticket's chunks.

    `blocks` has shape (chunks, blocks per chunk); row i belongs to key i of the ticket.
    `store` is the store the ticket was opened on ("" if there was none: the load fails at once).
    """

    ticket: int
    req_id: str
    store: str
    keys: bytes
    blocks: NDArray[np.int32]


@dataclass(frozen=True)
class StoreOrder:
    """Offer chunks to the store: key i belongs to row i of `blocks` (chunks, blocks per chunk)."""

    job: int
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
    """A load that failed: chunk `index` of `ticket` is the first that could not be had."""

    ticket: int
    index: int
    reason: str


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """What workers finished since the last step: how many workers per job, failures by request."""

    jobs: dict[int, int] = field(default_factory=dict)
    failures: dict[str, LoadFailure] = field(default_factory=dict)
    conflicts: list[int] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        """Merge another worker's results of the same step; the earlier failure wins."""
        assert isinstance(other, StepResults)
        for job, count in other.jobs.items():
            self.jobs[job] = self.jobs.get(job, 0) + count
        for req_id, failure in other.failures.items():
            mine = self.failures.get(req_id)
            if mine is None or failure.index < mine.index:
                self.failures[req_id] = failure
        self.conflicts = sorted({*self.conflicts, *other.conflicts})
        return self


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """A worker's stage record (canonical JSON) and the fingerprint of the plan it built."""

    record: str
    fingerprint: str
