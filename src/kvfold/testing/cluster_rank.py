"""One rank of a virtual cluster in a process of its own: steps in on a pipe, answers out.

It has its own pages, plan, copies and connection to the store, and does only what
`cluster_process.ProcessCluster` orders. The end of the pipe ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import KvfoldError, StoreError
from kvfold.mesh import Mesh
from kvfold.plan import PlanOptions
from kvfold.spec import GroupSpec
from kvfold.store.client import StoreClient, StoreSettings
from kvfold.testing.cluster import Cluster, Difference
from kvfold.testing.cluster_copy import (
    Copies,
    Membership,
    Misplaced,
    misplaced,
    records,
    writers,
)
from kvfold.testing.cluster_store import ANSWER_S


class Setup(NamedTuple):
    """What makes a cluster, and which of its ranks this is."""

    groups: Sequence[GroupSpec]
    mesh: Mesh
    options: PlanOptions | None
    layout: str
    blocks: int
    seed: int
    unlike: Collection[str]
    rank: int


class Failed(NamedTuple):
    """The answer of a step that could not be done."""

    why: str


class Written(NamedTuple):
    """The answer of `write`: the store's verdicts, this rank's audit and its copies."""

    offsets: list[int]
    checksums: dict[int, int]
    nbytes: int
    copy_s: float


class Read(NamedTuple):
    """The answer of `read`."""

    failure: str | None
    nbytes: int
    copy_s: float


class Rank:
    """The steps of one rank. Every public method is one step."""

    def __init__(self, setup: Setup) -> None:
        self._rank = setup.rank
        self._cluster = Cluster(*setup[:-1], ranks=(setup.rank,))
        self._member = Membership.of(self._cluster)
        self._client: StoreClient | None = None
        self._copies: Copies | None = None
        self._granted: list[int] = []
        self._news: SimpleQueue[tuple[int, list[int], list[int], str | None]] = SimpleQueue()

    def fill(self) -> None:
        self._cluster.fill()

    def wipe(self) -> None:
        self._cluster.wipe()

    def compare(self, only: Collection[int] | None, limit: int) -> list[Difference]:
        return self._cluster.differences(only, limit)

    def join(self, settings: StoreSettings) -> None:
        """Connect to the store, which runs."""
        engine, fingerprint, groups = self._member
        self._client = StoreClient.connect(
            settings,
            role="worker",
            engine=engine,
            rank=self._rank,
            world=self._cluster.mesh.world_size,
            fingerprint=fingerprint,
            groups=groups,
            start=False,
            on_ready=self._ready,
            on_failed=self._failed,
        )
        if self._client.arena is None:
            raise StoreError("the store gave no memory")
        self._copies = Copies(self._cluster, self._rank, self._client.arena)

    def write(self, number: int, job: int) -> Written:
        """Audit a group, ask where its chunks go, and copy this rank's part there."""
        client, copies = self._joined()
        cluster, group = self._cluster, self._cluster.groups[number]
        keys, everyone = self._member.keys(cluster, number), (1 << cluster.mesh.world_size) - 1
        (checksums,) = cluster.audit(number, cluster.chunks())
        masks, space = np.array(writers(group, keys), np.uint64), self._member.groups[number]
        verdicts = client.ask(
            job, number, space.namespace, keys, everyone, masks, records(checksums), ANSWER_S
        )
        offsets = verdicts.offsets.tolist()
        self._granted = copies.write(number, keys, offsets)
        return Written(offsets, checksums, copies.nbytes, copies.copy_s)

    def judge(self, number: int, offsets: Sequence[int]) -> list[Misplaced]:
        """Compare the slots of a group, written by all ranks, with the format."""
        client, _ = self._joined()
        assert client.arena is not None
        return list(misplaced(self._cluster, number, client.arena, offsets))

    def commit(self, job: int) -> None:
        client, _ = self._joined()
        client.commit(job, np.array(self._granted, np.uint32), True)

    def read(self, number: int, ticket: int) -> Read:
        """Copy every chunk of a group as the store announces it, then let go of them."""
        client, copies = self._joined()
        left, failure = len(self._cluster.chunks()), None
        while left and failure is None:
            try:
                announced, indices, offsets, failure = self._news.get(timeout=ANSWER_S)
            except Empty:
                failure = f"the store announced nothing for {ANSWER_S:.0f} s"
                break
            if announced != ticket:  # of a load that failed
                failure = None
                continue
            for index, offset in zip(indices, offsets, strict=True):
                copies.read(number, index, offset)
            client.ack(ticket, np.array(indices, np.uint32))
            left -= len(indices)
        held: SimpleQueue[bool] = SimpleQueue()
        client.done(ticket, held.put)
        if not held.get(timeout=ANSWER_S) and failure is None:
            failure = "the store did not hold the chunks to the end"
        return Read(failure, copies.nbytes, copies.copy_s)

    def leave(self) -> None:
        """Let go of the store."""
        self._copies = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def _joined(self) -> tuple[StoreClient, Copies]:
        assert self._client is not None, "join comes first"
        assert self._copies is not None
        return self._client, self._copies

    def _ready(self, ticket: int, indices: NDArray[np.uint32], offsets: NDArray[np.uint64]) -> None:
        self._news.put((ticket, indices.tolist(), offsets.tolist(), None))

    def _failed(self, ticket: int, index: int, reason: str) -> None:
        self._news.put((ticket, [], [], f"chunk {index}: {reason}"))


def serve(fd: int) -> None:
    """Do the steps that come in on the pipe `fd` until it ends."""
    with Connection(fd) as line:
        _serve(line)


def _serve(line: Connection) -> None:
    rank: Rank | None = None
    try:
        while True:
            step, arguments = line.recv()
            answer: Any = None
            try:
                if rank is None:
                    rank = Rank(Setup(*arguments))
                else:
                    answer = getattr(rank, step)(*arguments)
            except (KvfoldError, Empty) as error:
                answer = Failed(str(error) or "the store did not answer")
            line.send(answer)
    except (EOFError, ConnectionError):
        return  # whoever ordered is gone or wants no more
    finally:
        if rank is not None:
            rank.leave()
