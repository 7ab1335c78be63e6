"""The worker's loads: copy announced slots into pages, acknowledge, and report once per request.

One thread owns all state; everything else posts events to it. A load is reported failed only from
this thread, so never while a copy of its own runs, and complete only after the store confirmed that
its pins held throughout.

    ordered -> copying -> releasing -> reported complete
       \\________\\__________\\_________> reported failed (store gone, chunk lost, deadline, reset)
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvfold.vllm.messages import LoadFailure, LoadOrder
from kvfold.vllm.threads import start_thread

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

ACK_EVERY = 8
"""Chunks copied between two acknowledgements: frees windows early without a message per chunk."""
MAX_EARLY = 1024
"""Tickets announced before their order came; older ones are forgotten (their load then times out).
"""


class TicketClient(Protocol):
    """The part of the store's client that loads need."""

    store_id: str

    def ack(self, ticket: int, indices: NDArray[np.uint32]) -> None: ...
    def done(self, ticket: int, callback: Callable[[bool], None]) -> None: ...


@dataclass(frozen=True)
class LoadReport:
    """The end of one load, for the engine: `failure` is None if every byte is in place."""

    req_id: str
    failure: LoadFailure | None


@dataclass
class _Load:
    order: LoadOrder
    client: TicketClient
    connection: int
    left: int
    progress_s: float
    copied: NDArray[np.bool_]
    started_s: float
    releasing: bool = False


@dataclass
class LoadCounters:
    """Totals of this worker; they never go down."""

    chunks: int = 0
    bytes: int = 0
    requests: int = 0
    failed: int = 0
    copy_s: float = field(default=0.0)


Copy = Callable[[int, Sequence[int], int], int]
"""copy(connection, block ids of one chunk, slot offset) -> bytes copied"""


class Loads:
    """Runs the loads of one worker on a thread of its own."""

    def __init__(
        self,
        copy: Copy,
        deadline_s: float,
        *,
        loaded: Callable[[bytes, Sequence[int]], None] | None = None,
        detach: Callable[[int], None] = lambda connection: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copy, self._deadline_s, self._clock, self._loaded = copy, deadline_s, clock, loaded
        self._detach = detach
        self._gone_to = -1
        self._refused: deque[tuple[str, int]] = deque(maxlen=MAX_EARLY)
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loads: dict[int, _Load] = {}
        self._early: OrderedDict[tuple[int, int], list[Callable[[], None]]] = OrderedDict()
        self._reports: deque[LoadReport] = deque()
        self.counters = LoadCounters()
        self._thread = start_thread("kvfold-loads", self._run)

    # -- called by others ----------------------------------------------------------------------

    def start(self, order: LoadOrder, client: TicketClient | None, connection: int) -> None:
        """Begin a load; `client` is None while there is no store."""
        self._events.put(partial(self._start, order, client, connection))

    def ready(
        self, connection: int, ticket: int, indices: NDArray[np.uint32], offsets: NDArray[np.uint64]
    ) -> None:
        """The store announced slots."""
        self._events.put(partial(self._ready, connection, ticket, indices, offsets))

    def lost(self, connection: int, ticket: int, index: int, reason: str) -> None:
        """The store cannot deliver chunk `index`."""
        self._events.put(partial(self._lost, connection, ticket, index, reason))

    def gone(self, connection: int) -> None:
        """The store of this connection is gone."""
        self._events.put(partial(self._gone, connection))

    def connected(self, client: TicketClient) -> None:
        """There is a store again: tell it of tickets that this worker had to refuse."""
        self._events.put(partial(self._connected, client))

    def reset(self) -> None:
        """Everything begun before must not be served (the cache was reset)."""
        self._events.put(self._reset)

    def take_reports(self) -> list[LoadReport]:
        """Ends of loads since the last call, each exactly once."""
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def close(self) -> bool:
        """Stop copying and end the thread; unfinished loads are reported failed.

        Returns False if a copy still runs.
        """
        self._events.put(None)
        self._thread.join(timeout=30)
        return not self._thread.is_alive()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._patience_s())
            except Empty:
                event = self._expire
            if event is None:
                break
            try:
                event()
                if self._events.empty():  # what is announced already is progress to come
                    self._expire()
            except Exception:
                logger.exception("kvfold: a load event failed")
        for load in list(self._loads.values()):
            self._fail(load, "the engine is shutting down")

    def _patience_s(self) -> float | None:
        if not self._loads:
            return None
        first = min(load.progress_s for load in self._loads.values())
        return max(0.01, first + self._deadline_s - self._clock())

    def _expire(self) -> None:
        now = self._clock()
        for load in list(self._loads.values()):
            if now - load.progress_s >= self._deadline_s:
                self._fail(load, f"no progress for {self._deadline_s:g} s")

    def _start(self, order: LoadOrder, client: TicketClient | None, connection: int) -> None:
        now = self._clock()
        n = len(order.blocks)
        early = self._early.pop((connection, order.ticket), [])
        if client is None or client.store_id != order.store or connection <= self._gone_to:
            self._report(order, LoadFailure(order.ticket, 0, "the store is gone"))
            if client is not None and client.store_id == order.store:
                self._say_done(client, order.ticket)
            elif client is None and order.store:
                self._refused.append((order.store, order.ticket))
            return
        load = _Load(order, client, connection, n, now, np.zeros(n, dtype=bool), now)
        self._loads[order.ticket] = load
        for event in early:
            event()

    def _find(self, connection: int, ticket: int, event: Callable[[], None]) -> _Load | None:
        """The load an announcement belongs to; an announcement that beat its order is kept."""
        load = self._loads.get(ticket)
        if load is None:
            self._early.setdefault((connection, ticket), []).append(event)
            while len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return None
        return load if load.connection == connection else None

    def _ready(
        self, connection: int, ticket: int, indices: NDArray[np.uint32], offsets: NDArray[np.uint64]
    ) -> None:
        load = self._find(
            connection, ticket, partial(self._ready, connection, ticket, indices, offsets)
        )
        if load is None or load.releasing:
            return
        started = self._clock()
        for at in range(0, len(indices), ACK_EVERY):
            part = indices[at : at + ACK_EVERY]
            for index, offset in zip(
                part.tolist(), offsets[at : at + ACK_EVERY].tolist(), strict=True
            ):
                blocks = load.order.blocks[index].tolist()
                self.counters.bytes += self._copy(connection, blocks, offset)
                if not load.copied[index]:
                    load.copied[index] = True
                    load.left -= 1
            load.client.ack(ticket, part)
            self.counters.chunks += len(part)
            load.progress_s = self._clock()
        self.counters.copy_s += load.progress_s - started
        if load.left == 0:
            load.releasing = True
            load.client.done(
                ticket, lambda held: self._events.put(partial(self._released, load, held))
            )

    def _released(self, load: _Load, held: bool) -> None:
        if self._loads.get(load.order.ticket) is not load:
            return
        if not held:
            self._fail(load, "the store did not hold the pins to the end", told=True)
            return
        del self._loads[load.order.ticket]
        if self._loaded is not None:
            try:
                for i, blocks in enumerate(load.order.blocks.tolist()):
                    self._loaded(load.order.keys[32 * i : 32 * i + 32], blocks)
            except Exception:
                logger.exception("kvfold: the digests of a load could not be recorded")
        logger.debug(
            "kvfold: loaded %d chunks for %s in %.1f ms",
            len(load.copied), load.order.req_id, 1e3 * (self._clock() - load.started_s),
        )  # fmt: skip
        self._report(load.order, None)

    def _lost(self, connection: int, ticket: int, index: int, reason: str) -> None:
        load = self._find(
            connection, ticket, partial(self._lost, connection, ticket, index, reason)
        )
        if load is not None and not load.releasing:
            self._fail(load, reason, index=index)

    def _gone(self, connection: int) -> None:
        for load in list(self._loads.values()):
            if load.connection == connection:
                self._fail(load, "the store is gone", index=0, told=True)
        for key in [key for key in self._early if key[0] == connection]:
            del self._early[key]
        self._gone_to = max(self._gone_to, connection)
        self._detach(connection)

    def _connected(self, client: TicketClient) -> None:
        refused = [ticket for store, ticket in self._refused if store == client.store_id]
        self._refused.clear()
        for ticket in refused:
            self._say_done(client, ticket)

    def _reset(self) -> None:
        for load in list(self._loads.values()):
            self._fail(load, "the cache was reset", index=0)

    def _fail(
        self, load: _Load, reason: str, *, index: int | None = None, told: bool = False
    ) -> None:
        """Report `load` as failed at `index` (default: its first chunk that is not in place)."""
        del self._loads[load.order.ticket]
        if index is None:
            index = 0 if load.left == 0 else int(np.argmin(load.copied))
        logger.info("kvfold: load for %s failed at chunk %d: %s", load.order.req_id, index, reason)
        self._report(load.order, LoadFailure(load.order.ticket, index, reason))
        if not told and not load.releasing:
            self._say_done(load.client, load.order.ticket)

    def _report(self, order: LoadOrder, failure: LoadFailure | None) -> None:
        if failure is None:
            self.counters.requests += 1
        else:
            self.counters.failed += 1
        self._reports.append(LoadReport(order.req_id, failure))

    @staticmethod
    def _say_done(client: TicketClient, ticket: int) -> None:
        """Tell the store that this worker touches no slot of `ticket` any more."""
        try:
            client.done(ticket, lambda held: None)
        except Exception:
            logger.exception("kvfold: the store could not be told of an ended load")
