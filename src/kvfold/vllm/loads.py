"""The worker's loads: copy announced slots into pages, acknowledge, and report once per request.

A load has a part, with a ticket of its own, per cache group. One thread owns all state; everything
else posts events to it. A load is reported failed only from this thread and after the store was
told that its tickets are done with, so never while a copy of its own runs; and complete only after
the store confirmed, for every part, that its pins held throughout.

    part: open -> copied, done said -> complete, once confirmed
              \\____________\\_________> dropped (optional: a draft's), or its load fails
    load: ordered -> parts end -> reported complete
                  \\_ a part fails: all parts are done with -> reported failed
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import StoreGone
from kvfold.vllm.messages import LoadFailure, LoadOrder, LoadPart
from kvfold.vllm.metrics import LOAD_SECONDS, LOADED_BYTES, LOADED_CHUNKS, Recorder
from kvfold.vllm.threads import start_thread

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

ACK_EVERY = 8
"""Chunks copied between two acknowledgements: frees windows early without a message per chunk."""
MAX_EARLY = 4096
"""Tickets announced before their order came; older ones are forgotten (their load then times out).
"""


class TicketClient(Protocol):
    """The part of the store's client that loads need."""

    store_id: str

    def ack(self, ticket: int, indices: NDArray[np.uint32]) -> None: ...
    def done(self, ticket: int, callback: Callable[[bool], None]) -> None: ...


class LoadTarget(Protocol):
    """How slots reach this rank's pages. Groups are numbered as in the store."""

    rank: int
    labels: Sequence[str]
    """Each group's name in metrics."""

    def copy_in(self, connection: int, group: int, blocks: Sequence[int], offset: int) -> int: ...
    def detach(self, connection: int) -> None: ...


@dataclass(frozen=True)
class LoadReport:
    """The end of one load, for the engine: without `failures` every byte is in place."""

    req_id: str
    failures: tuple[LoadFailure, ...] = ()
    without_draft: bool = False


@dataclass
class _Part:
    load: _Load
    place: int
    order: LoadPart
    copied: NDArray[np.bool_]
    left: int
    bytes: int = 0
    done_said: bool = False
    ended: bool = False
    complete: bool = False

    def first_missing(self) -> int:
        """The first chunk that is not in place; 0 if all are, but unconfirmed."""
        return int(np.argmin(self.copied))


@dataclass
class _Load:
    order: LoadOrder
    client: TicketClient
    connection: int
    started_s: float
    progress_s: float
    parts: list[_Part] = field(default_factory=list)
    failures: dict[int, LoadFailure] = field(default_factory=dict)
    """By part. With the first one everything stops."""
    without_draft: bool = False


class Loads:
    """Runs the loads of one worker on a thread of its own."""

    def __init__(
        self,
        target: LoadTarget,
        deadline_s: float,
        *,
        recorder: Recorder | None = None,
        loaded: Callable[[int, bytes, Sequence[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target, self._deadline_s, self._clock, self._loaded = (
            target, deadline_s, clock, loaded,
        )  # fmt: skip
        self._recorder = recorder or Recorder()
        self._gone_to = -1
        self._refused: deque[tuple[str, int]] = deque(maxlen=MAX_EARLY)
        self._events: SimpleQueue[tuple[float, Callable[[], None]] | None] = SimpleQueue()
        """Each with the time it was posted."""
        self._due_s = inf
        """Before this no load is overdue."""
        self._loads: dict[int, _Load] = {}
        self._parts: dict[int, _Part] = {}
        """By ticket, until their load ends."""
        self._early: OrderedDict[tuple[int, int], list[Callable[[], None]]] = OrderedDict()
        self._reports: deque[LoadReport] = deque()
        self.optional_failures = 0
        self._thread = start_thread("kvfold-loads", self._run)

    # -- called by others ----------------------------------------------------------------------

    def start(self, order: LoadOrder, client: TicketClient | None, connection: int) -> None:
        """Begin a load; `client` is None while there is no store."""
        self._post(partial(self._start, order, client, connection))

    def ready(
        self, connection: int, ticket: int, indices: NDArray[np.uint32], offsets: NDArray[np.uint64]
    ) -> None:
        """The store announced slots."""
        self._post(partial(self._ready, connection, ticket, indices, offsets))

    def lost(self, connection: int, ticket: int, index: int, reason: str) -> None:
        """The store cannot deliver a chunk."""
        self._post(partial(self._lost, connection, ticket, index, reason))

    def gone(self, connection: int) -> None:
        """The store of this connection is gone."""
        self._post(partial(self._gone, connection))

    def connected(self, client: TicketClient) -> None:
        """There is a store again: tell it of tickets that this worker had to refuse."""
        self._post(partial(self._connected, client))

    def reset(self) -> None:
        """Everything begun before must not be served (the cache was reset)."""
        self._post(self._reset)

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

    def _post(self, event: Callable[[], None]) -> None:
        self._events.put((self._clock(), event))

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                item = self._events.get(timeout=self._patience_s())
            except Empty:
                item = self._clock(), lambda: None
            if item is None:
                break
            posted_s, event = item
            try:
                event()
                # What is announced already is progress to come: as much time has passed for loads
                # as for the events that are done with.
                self._expire(self._clock() if self._events.empty() else posted_s)
            except Exception:
                logger.exception("kvfold: a load event failed")
        for load in list(self._loads.values()):
            self._fail_open(load, "the engine is shutting down")
            self._end(load)

    def _patience_s(self) -> float | None:
        return None if self._due_s == inf else max(0.01, self._due_s - self._clock())

    def _expire(self, now_s: float) -> None:
        if now_s < self._due_s:
            return
        for load in list(self._loads.values()):
            if now_s - load.progress_s >= self._deadline_s:
                self._fail_open(load, f"no progress for {self._deadline_s:g} s")
        alive = [load.progress_s for load in self._loads.values() if not load.failures]
        self._due_s = min(alive) + self._deadline_s if alive else inf

    def _start(self, order: LoadOrder, client: TicketClient | None, connection: int) -> None:
        now = self._clock()
        early = [
            event
            for part in order.parts
            for event in self._early.pop((connection, part.ticket), ())
        ]
        there = client is not None and client.store_id == order.store
        if client is None or not there or connection <= self._gone_to or not order.parts:
            self._refuse(order, client if there else None)
            return
        load = _Load(order, client, connection, now, now)
        for place, part in enumerate(order.parts):
            n = len(part.blocks)
            ticket = _Part(load, place, part, np.zeros(n, dtype=bool), n)
            ticket.ended = ticket.complete = ticket.done_said = n == 0  # then nobody opened it
            load.parts.append(ticket)
            if n:
                self._parts[part.ticket] = ticket
        self._loads[order.load] = load
        self._due_s = min(self._due_s, now + self._deadline_s)
        for event in early:
            event()
        self._end_if_complete(load)

    def _refuse(self, order: LoadOrder, client: TicketClient | None) -> None:
        """Fail a load at once; `client` is its tickets' store, or None if it is not there."""
        for part in order.parts:
            if not len(part.blocks):
                continue
            if client is not None:
                self._say_done(client, part.ticket, _nothing)
            elif order.store:
                self._refused.append((order.store, part.ticket))
        reason = "the store is gone" if order.parts else "nothing was ordered"
        self._report(order, [LoadFailure(order.load, 0, 0, reason)])

    def _find(self, connection: int, ticket: int, event: Callable[[], None]) -> _Part | None:
        """The part an announcement belongs to; an announcement that beat its order is kept."""
        part = self._parts.get(ticket)
        if part is None:
            self._early.setdefault((connection, ticket), []).append(event)
            while len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return None
        return part if part.load.connection == connection else None

    def _ready(
        self, connection: int, ticket: int, indices: NDArray[np.uint32], offsets: NDArray[np.uint64]
    ) -> None:
        part = self._find(
            connection, ticket, partial(self._ready, connection, ticket, indices, offsets)
        )
        if part is None or part.done_said:
            return
        try:
            for at in range(0, len(indices), ACK_EVERY):
                self._copy(part, indices[at : at + ACK_EVERY], offsets[at : at + ACK_EVERY])
        except StoreGone as error:
            self._fail(part, part.first_missing(), str(error))
        except Exception as error:
            logger.exception("kvfold: a chunk could not be copied")
            self._fail(part, part.first_missing(), f"copying failed: {error}")
        else:
            if part.left == 0:
                part.done_said = True
                self._say_done(part.load.client, ticket, partial(self._confirm, part))

    def _copy(self, part: _Part, indices: NDArray[np.uint32], offsets: NDArray[np.uint64]) -> None:
        load, order = part.load, part.order
        for index, offset in zip(indices.tolist(), offsets.tolist(), strict=True):
            blocks = order.blocks[index].tolist()
            part.bytes += self._target.copy_in(load.connection, order.group, blocks, offset)
            if not part.copied[index]:
                part.copied[index] = True
                part.left -= 1
        load.client.ack(order.ticket, indices)
        load.progress_s = self._clock()

    def _confirm(self, part: _Part, held: bool) -> None:
        """On the client's thread: the store's answer to `done`."""
        self._post(partial(self._released, part, held))

    def _released(self, part: _Part, held: bool) -> None:
        load = part.load
        if part.ended:
            return
        if not held:
            self._fail(part, 0, "the store did not hold the pins to the end")
            return
        part.ended = part.complete = True
        load.progress_s = self._clock()
        self._end_if_complete(load)

    def _lost(self, connection: int, ticket: int, index: int, reason: str) -> None:
        part = self._find(
            connection, ticket, partial(self._lost, connection, ticket, index, reason)
        )
        if part is not None and part.left:
            self._fail(part, index, reason)

    def _gone(self, connection: int) -> None:
        for load in [load for load in self._loads.values() if load.connection == connection]:
            for part in load.parts:
                part.done_said = True  # there is nobody to say it to
            self._fail_open(load, "the store is gone", index=0)
        for key in [key for key in self._early if key[0] == connection]:
            del self._early[key]
        self._gone_to = max(self._gone_to, connection)
        self._target.detach(connection)

    def _connected(self, client: TicketClient) -> None:
        refused = [ticket for store, ticket in self._refused if store == client.store_id]
        self._refused.clear()
        for ticket in refused:
            self._say_done(client, ticket, _nothing)

    def _reset(self) -> None:
        for load in list(self._loads.values()):
            self._stop(load, LoadFailure(load.order.load, 0, 0, "the cache was reset"))

    # -- ends ----------------------------------------------------------------------------------

    def _fail_open(self, load: _Load, reason: str, *, index: int | None = None) -> None:
        """Fail all parts that have not ended, at `index` or their first chunk not in place."""
        if load.failures:
            return
        for part in load.parts:
            self._fail(part, part.first_missing() if index is None else index, reason)

    def _fail(self, part: _Part, index: int, reason: str) -> None:
        load = part.load
        if part.ended or (part.order.optional and load.failures):
            return
        if not part.order.optional:
            self._stop(load, LoadFailure(load.order.load, part.place, index, reason))
            return
        # A draft's proposals are checked by the target: whatever its blocks hold does no harm.
        self.optional_failures += 1
        logger.debug(
            "kvfold: load for %s goes on without its draft, which failed at chunk %d: %s",
            load.order.req_id, index, reason,
        )  # fmt: skip
        part.ended = load.without_draft = True
        self._let_go(part)
        self._end_if_complete(load)

    def _stop(self, load: _Load, failure: LoadFailure) -> None:
        """Copy no more for `load`. It ends after the events that wait already: what they say of
        its other parts belongs into the report, so that a shorter offer avoids all of it."""
        first = not load.failures
        known = load.failures.get(failure.part)
        if known is None or failure.index < known.index:
            load.failures[failure.part] = failure
        if first:
            for part in load.parts:
                self._let_go(part)
            self._post(partial(self._end, load))

    def _let_go(self, part: _Part) -> None:
        if not part.done_said:
            part.done_said = True
            self._say_done(part.load.client, part.order.ticket, _nothing)

    def _end_if_complete(self, load: _Load) -> None:
        if not load.failures and all(part.ended for part in load.parts):
            self._end(load)

    def _end(self, load: _Load) -> None:
        """Forget `load` and report it."""
        if self._loads.get(load.order.load) is not load:
            return
        del self._loads[load.order.load]
        for part in load.parts:
            if self._parts.get(part.order.ticket) is part:
                del self._parts[part.order.ticket]
        if not load.failures:
            self._record(load)
        failures = [failure for _, failure in sorted(load.failures.items())]
        self._report(load.order, failures, without_draft=load.without_draft)

    def _record(self, load: _Load) -> None:
        """Digests, figures and a line about a complete load."""
        took_s = self._clock() - load.started_s
        complete = [part for part in load.parts if part.complete]
        try:
            for part in complete:
                self._digests(part.order)
                group = self._target.labels[part.order.group]
                self._recorder.add(LOADED_BYTES, part.bytes, group=group)
                if self._target.rank == 0:  # all ranks are told of all chunks
                    self._recorder.add(LOADED_CHUNKS, len(part.copied), group=group)
            self._recorder.observe(LOAD_SECONDS, took_s)
        except Exception:
            logger.exception("kvfold: the figures of a load could not be recorded")
        logger.debug(
            "kvfold: loaded %d chunks for %s in %.1f ms",
            sum(len(part.copied) for part in complete), load.order.req_id, 1e3 * took_s,
        )  # fmt: skip

    def _digests(self, part: LoadPart) -> None:
        if self._loaded is not None:
            for i, blocks in enumerate(part.blocks.tolist()):
                self._loaded(part.group, part.keys[32 * i : 32 * i + 32], blocks)

    def _report(
        self, order: LoadOrder, failures: Sequence[LoadFailure], *, without_draft: bool = False
    ) -> None:
        if failures:
            told = (f"part {f.part} at chunk {f.index}: {f.reason}" for f in failures)
            logger.info("kvfold: load for %s failed, %s", order.req_id, "; ".join(told))
        self._reports.append(LoadReport(order.req_id, tuple(failures), without_draft))

    @staticmethod
    def _say_done(client: TicketClient, ticket: int, callback: Callable[[bool], None]) -> None:
        """Tell the store that this worker touches no slot of `ticket` any more."""
        try:
            client.done(ticket, callback)
        except Exception:
            logger.exception("kvfold: the store could not be told of an ended load")
            callback(False)


def _nothing(held: bool) -> None:
    """For tickets that are done with anyway."""
