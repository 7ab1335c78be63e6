"""Virtual workers: they execute the connector's orders on virtual pages, piece by piece.

Each piece checks what it touches: a store that its source block still holds what it held when the
store was ordered, and that this is what the key promises; a load that its target block belongs to
the waiting request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from kvfold.testing.virtual_pages import Page, Pages, Strand, WrongBlock
from kvfold.testing.virtual_store import KEY_BYTES, Client, VirtualStore
from kvfold.vllm.messages import LoadFailure, LoadOrder, StepOrders, StepResults, StoreOrder

if TYPE_CHECKING:
    from kvfold.vllm.messages import LoadPart

OwnsBlock = Callable[[str, int, int], bool]
"""Whether a request alone holds a block of an engine group."""
CheckChunk = Callable[[Strand, bytes, bytes, Sequence[Page | None]], None]
"""Raises `WrongBlock` if a chunk is not what its key promises (strand, namespace, key, pages)."""


@dataclass
class _Load:
    order: LoadOrder
    started_s: float
    progress_s: float
    copied: list[int] = field(default_factory=list)
    """Per part, how many of its chunks are in place."""
    ended: list[bool] = field(default_factory=list)
    failures: list[LoadFailure] = field(default_factory=list)


@dataclass
class _Store:
    order: StoreOrder
    store_id: str | None
    started_s: float
    snapshot: list[list[Page | None]]
    copied: int = 0


class VirtualWorker:
    """One rank."""

    def __init__(
        self,
        rank: int,
        pages: Pages,
        strands: Sequence[Strand],
        store: VirtualStore,
        *,
        owns: OwnsBlock,
        check: CheckChunk,
        load_deadline_s: float,
        store_deadline_s: float,
    ) -> None:
        self.rank, self.pages, self._strands, self._store = rank, pages, strands, store
        self._owns, self._check = owns, check
        self._load_deadline_s, self._store_deadline_s = load_deadline_s, store_deadline_s
        self._loads: list[_Load] = []
        self._stores: list[_Store] = []
        self._finished: set[str] = set()
        self._results = StepResults()

    @property
    def busy(self) -> bool:
        """Whether anything is unfinished, or unreported."""
        return bool(self._loads or self._stores or self._finished or self._results.jobs)

    # -- orders ----------------------------------------------------------------------------------

    def begin(self, orders: StepOrders, client: Client | None, now_s: float) -> None:
        """Take the orders of a step, after it was computed."""
        if orders.reset:
            for load in list(self._loads):
                self._fail(load, 0, 0, "the cache was reset")
        for order in orders.loads:
            load = _Load(order, now_s, now_s)
            load.copied = [0] * len(order.parts)
            load.ended = [len(part.blocks) == 0 for part in order.parts]
            self._loads.append(load)
            if not order.parts or client is None or client.store_id != order.store:
                self._fail(load, 0, 0, "the store is gone")
        for stores in orders.stores:
            self._begin_store(stores, None if client is None else client.store_id, now_s)

    def _begin_store(self, order: StoreOrder, store_id: str | None, now_s: float) -> None:
        strand = self._strands[order.group]
        if (order.blocks <= 0).any():
            raise WrongBlock(f"a chunk without all its blocks was ordered to be stored: {order}")
        snapshot = [
            [_copy(self.pages.peek(strand, block)) for block in row]
            for row in order.blocks.tolist()
        ]
        for i, pages in enumerate(snapshot):
            key = order.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            self._check(strand, order.namespace, key, pages)
        self._stores.append(_Store(order, store_id, now_s, snapshot))

    # -- progress --------------------------------------------------------------------------------

    def advance(self, random: Random | None, client: Client | None, now_s: float) -> None:
        """Copy a random number of chunks, in any order of loads and stores; None: all."""
        self.expire(client, now_s)
        for load in list(self._loads):
            if random is None or random.random() < 0.7:
                self._advance_load(load, random, now_s)
        while self._stores:  # one after another, as the worker's thread does
            job = self._stores[0]
            there = client is not None and client.store_id == job.store_id
            if there and now_s - job.started_s < self._store_deadline_s:
                if random is not None and random.random() < 0.4:
                    break
                if not self._advance_store(job, random):
                    break
                self._store.end(job.order.job, job.order.group, self.rank, ok=True)
            elif there:
                self._store.end(job.order.job, job.order.group, self.rank, ok=False)
            self._stores.pop(0)
            self._results.jobs[job.order.job] = 1

    def expire(self, client: Client | None, now_s: float) -> None:
        """Give up loads whose store is gone or that make no progress."""
        for load in list(self._loads):
            if client is None or client.store_id != load.order.store:
                self._fail(load, 0, 0, "the store is gone")
            elif now_s - load.progress_s >= self._load_deadline_s:
                self._expire(load)

    def _advance_store(self, job: _Store, random: Random | None) -> bool:
        """Copy some chunks of a job; whether it is complete."""
        order = job.order
        strand = self._strands[order.group]
        decided = self._store.ask(order.job, order.group, order.keys)
        rows = order.blocks.tolist()
        while job.copied < len(rows):
            if random is not None and random.random() < 0.2:
                return False
            i = job.copied
            held = [self.pages.peek(strand, block) for block in rows[i]]
            if held != job.snapshot[i]:
                raise WrongBlock(
                    f"rank {self.rank}, job {order.job}: a block of {rows[i]} was overwritten "
                    f"while it was read: {job.snapshot[i]} became {held}"
                )
            chunk = decided.granted.get(order.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])
            if chunk is not None:
                chunk[self.rank] = [_copy(page) for page in held]
            job.copied += 1
        return True

    def _advance_load(self, load: _Load, random: Random | None, now_s: float) -> None:
        parts = list(range(len(load.order.parts)))
        if random is not None:
            random.shuffle(parts)
        for place in parts:
            if not load.ended[place] and load in self._loads:
                self._advance_part(load, place, random, now_s)
        if load in self._loads and all(load.ended):
            self._finish(load)

    def _advance_part(self, load: _Load, place: int, random: Random | None, now_s: float) -> None:
        part = load.order.parts[place]
        ticket = self._store.tickets.get(part.ticket)
        if ticket is None:
            return  # the scheduler's thread has not opened it yet
        while load.copied[place] < len(part.blocks):
            i = load.copied[place]
            if ticket.failed_at == i:
                self._miss(load, place, "neither in host memory nor on disk")
                return
            if random is not None and random.random() < 0.2:
                return
            self._copy_in(load, part, i, ticket.chunks[i][self.rank])
            load.copied[place] += 1
            load.progress_s = now_s
        load.ended[place] = True
        self._store.done(part.ticket, self.rank)

    def _copy_in(
        self, load: _Load, part: LoadPart, index: int, chunk: Sequence[Page | None]
    ) -> None:
        strand = self._strands[part.group]
        for block, page in zip(part.blocks[index].tolist(), chunk, strict=True):
            if block < 0:
                continue
            if not self._owns(load.order.req_id, strand.group, block):
                raise WrongBlock(
                    f"rank {self.rank}: block {block} is loaded into, but does not belong to "
                    f"{load.order.req_id} alone"
                )
            target = self.pages.page(strand, block)
            target[:] = page if page is not None else [0] * len(target)
        self._store.loaded += 1

    # -- ends ------------------------------------------------------------------------------------

    def _expire(self, load: _Load) -> None:
        for place, ended in enumerate(load.ended):
            if not ended and load in self._loads:
                self._miss(load, place, "no progress for too long")

    def _miss(self, load: _Load, place: int, reason: str) -> None:
        """A part cannot be had: its load fails, or goes on without a draft."""
        if not load.order.parts[place].optional:
            self._fail(load, place, load.copied[place], reason)
            return
        load.ended[place] = True
        self._results.without_draft.append(load.order.req_id)
        self._store.done(load.order.parts[place].ticket, self.rank)
        if all(load.ended):
            self._finish(load)

    def _fail(self, load: _Load, place: int, index: int, reason: str) -> None:
        load.failures.append(LoadFailure(load.order.load, place, index, reason))
        self._finish(load)

    def _finish(self, load: _Load) -> None:
        for part in load.order.parts:
            self._store.done(part.ticket, self.rank)
        self._loads.remove(load)
        self._finished.add(load.order.req_id)
        if load.failures:
            self._results.failures[load.order.req_id] = load.failures

    def take(self) -> tuple[set[str], set[str], StepResults | None]:
        """Finished and failed requests and results since the last call, as a worker reports."""
        finished, self._finished = self._finished, set()
        results, self._results = self._results, StepResults()
        failed = set(results.failures)
        told = results if results != StepResults() else None
        return finished, failed, told


def _copy(page: Page | None) -> Page | None:
    return None if page is None else list(page)
