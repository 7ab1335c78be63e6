"""A virtual store: chunks of virtual pages by key, with every failure that a store can have.

Nothing runs by itself. What the scheduler side tells it waits in `VirtualIo` until somebody runs
it; workers copy when they are asked to.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvfold.errors import KvfoldError, StoreGone
from kvfold.testing.virtual_pages import Page

KEY_BYTES = 32
HOST, DISK = 2, 1
Key = tuple[int, bytes]
"""A group's number in the store, and a chunk's key."""
Chunk = list[list[Page | None]]
"""A chunk's content: per rank, per block."""


def split(keys: bytes) -> list[bytes]:
    """Joined keys, one by one."""
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


class VirtualIo:
    """The scheduler side's I/O thread, whose tasks run when the test wants."""

    def __init__(self) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self.closed = False

    def put(self, task: Callable[[], None]) -> None:
        """Queue a task, as for the thread."""
        self._tasks.append(task)

    def close(self) -> None:
        """Nothing more will be run."""
        self.closed = True

    def run(self, count: int | None = None) -> None:
        """Run the first `count` tasks, or all."""
        while self._tasks and (count is None or count > 0):
            task = self._tasks.popleft()
            count = None if count is None else count - 1
            with suppress(KvfoldError):  # as the thread does; anything else fails the test
                task()

    @property
    def waiting(self) -> int:
        """Tasks that have not run."""
        return len(self._tasks)


@dataclass
class Ticket:
    """A load that was opened: what it pinned, and the first chunk that it could not have."""

    group: int
    chunks: list[Chunk]
    failed_at: int | None
    readers: int
    """A mask of the ranks that have not said that they are done."""


@dataclass
class Job:
    """A store job: which keys were granted, and which ranks have not ended it."""

    granted: dict[bytes, Chunk]
    left: int


@dataclass
class VirtualStore:
    """Chunks by group and key, least recently used first."""

    world: int
    capacity: int
    random: Random
    store_id: str = "store-0"
    chunks: OrderedDict[Key, Chunk] = field(default_factory=OrderedDict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    early: dict[int, int] = field(default_factory=dict)
    """Ranks that are done with tickets that are not open."""
    jobs: dict[int, Job] = field(default_factory=dict)
    fail_reads: float = 0.0
    """How likely it is that a chunk cannot be read when a ticket is opened."""
    generation: int = 0
    lookups: int = 0
    loaded: int = 0
    stored: int = 0
    told: list[tuple[str, Any]] = field(default_factory=list)

    # -- what the scheduler side asks for --------------------------------------------------------

    def lookup(self, keys: bytes, timeout_s: float) -> bytes:
        """The tier of each key, over all groups; 0 if it is absent."""
        del timeout_s
        self.lookups += 1
        there = {key for _, key in self.chunks}
        return bytes((HOST if key[0] & 1 else DISK) if key in there else 0 for key in split(keys))

    def open_ticket(
        self, ticket: int, group: int, namespace: bytes, keys: bytes, readers: int
    ) -> None:
        """Pin chunks up to the first that is not there or cannot be read."""
        del namespace
        if ticket in self.tickets:
            raise AssertionError(f"ticket {ticket} was opened twice")
        held: list[Chunk] = []
        failed_at = None
        for i, key in enumerate(split(keys)):
            chunk = self.chunks.get((group, key))
            if chunk is None or self.random.random() < self.fail_reads:
                failed_at = i
                break
            self.chunks.move_to_end((group, key))
            held.append(chunk)
        readers &= ~self.early.pop(ticket, 0)
        if readers:
            self.tickets[ticket] = Ticket(group, held, failed_at, readers)

    def tell(self, request: str, record: Any) -> None:
        """Keep how a request went, for those who ask why it missed."""
        self.told.append((request, record))

    # -- what workers ask for --------------------------------------------------------------------

    def done(self, ticket: int, rank: int) -> None:
        """A rank is done with a ticket."""
        opened = self.tickets.get(ticket)
        if opened is None:  # refused before it was opened
            self.early[ticket] = self.early.get(ticket, 0) | 1 << rank
        else:
            opened.readers &= ~(1 << rank)
            if not opened.readers:
                del self.tickets[ticket]

    def ask(self, job: int, group: int, keys: bytes) -> Job:
        """Decide once per job and key whether it is granted a slot."""
        decided = self.jobs.get(job)
        if decided is None:
            granted: dict[bytes, Chunk] = {}
            for key in split(keys):
                if (group, key) not in self.chunks and self.capacity > 0:
                    granted[key] = [[] for _ in range(self.world)]
            decided = self.jobs[job] = Job(granted, (1 << self.world) - 1)
        return decided

    def end(self, job: int, group: int, rank: int, ok: bool) -> None:
        """A rank ended a job; the last one's end publishes what is complete."""
        decided = self.jobs.get(job)
        if decided is None:
            return
        if not ok:
            decided.granted.clear()
        decided.left &= ~(1 << rank)
        if decided.left:
            return
        del self.jobs[job]
        for key, chunk in decided.granted.items():
            self.chunks[group, key] = chunk
            self.stored += 1
        while len(self.chunks) > self.capacity:
            self.chunks.popitem(last=False)

    # -- what goes wrong -------------------------------------------------------------------------

    def evict(self, count: int) -> None:
        """Lose some chunks, in no particular order."""
        for key in self.random.sample(list(self.chunks), min(count, len(self.chunks))):
            del self.chunks[key]

    def restart(self, keep: bool) -> None:
        """Another store comes in its place; `keep`: it finds the chunks on its disk."""
        self.generation += 1
        self.store_id = f"store-{self.generation}"
        if not keep:
            self.chunks.clear()
        self.tickets.clear()
        self.jobs.clear()


class Client:
    """What one connection to the store offers the scheduler side; ends with the store."""

    def __init__(self, store: VirtualStore) -> None:
        self._store, self.store_id = store, store.store_id
        self.alive = True

    def _live(self) -> VirtualStore:
        if not self.alive or self._store.store_id != self.store_id:
            raise StoreGone("the store is gone")
        return self._store

    def lookup(self, keys: bytes, timeout_s: float) -> bytes:
        """See `VirtualStore.lookup`."""
        return self._live().lookup(keys, timeout_s)

    def open_ticket(
        self, ticket: int, group: int, namespace: bytes, keys: bytes, readers: int
    ) -> None:
        """See `VirtualStore.open_ticket`."""
        self._live().open_ticket(ticket, group, namespace, keys, readers)

    def tell(self, request: str, record: Any) -> None:
        """See `VirtualStore.tell`."""
        self._live().tell(request, record)
