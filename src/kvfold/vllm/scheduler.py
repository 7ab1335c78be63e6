"""The scheduler's side: what a request may load, and when it is looked up and told.

Nothing here waits for the store and nothing loops over keys: lookups and tickets go to an I/O
thread as joined bytes. What steps store is decided in `storing`.

A request's life: arrived -> looked up -> offered -> loading (tickets) -> running, stored chunk by
chunk -> finished. After a failed load one more, shorter offer is made, then none.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold import identity
from kvfold.vllm import boundary, metrics, translate
from kvfold.vllm.events import Events
from kvfold.vllm.evictions import Evictions
from kvfold.vllm.holds import Holds
from kvfold.vllm.io_thread import IoThread
from kvfold.vllm.loading import disk_tokens, load_parts
from kvfold.vllm.lookups import LookupClient, Lookups
from kvfold.vllm.messages import LoadFailure, LoadOrder, LoadPart, StepOrders, StepResults
from kvfold.vllm.requests import NEVER, Geometry, Load, Lookup, RequestState
from kvfold.vllm.room import Room
from kvfold.vllm.storing import Storing
from kvfold.vllm.why import Told

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

IDLE_PAUSE_S = 0.001
"""Rest of a step without tokens. The engine makes those while it waits for a lookup, a load or the
last store; workers that spin from one to the next would keep the store and our threads from the
cores that they wait for."""
LOOKUP_FRESH_S = 0.5
"""A lookup that found less than everything is repeated if the request is asked again this much
later.
"""


class SchedulerSide:
    """Decides offers and stores of one engine. All public methods run in the engine's loop."""

    def __init__(
        self,
        geometry: Geometry,
        digests: Sequence[bytes],
        current: Callable[[], tuple[LookupClient, int] | None],
        *,
        engine: str = "",
        lookup_wait_s: float = 0.02,
        room_wait_s: float = 30.0,
        audit_chunks: int = 4,
        audit_every: int = 256,
        clock: Callable[[], float] = time.monotonic,
        io: IoThread | None = None,
        recorder: metrics.Recorder | None = None,
        events: Events | None = None,
        room: Room | None = None,
        evictions: Evictions | None = None,
    ) -> None:
        self.geometry, self._digests, self._current = geometry, tuple(digests), current
        self._engine, self._lookup_wait_s, self._clock = engine, lookup_wait_s, clock
        self._room_wait_s = room_wait_s
        self.recorder = recorder or metrics.Recorder()
        self.enabled = True
        self.epoch = b""
        self.holds = Holds(geometry.world, geometry.max_pinned_blocks, clock)
        self._orders = StepOrders()
        self.storing = Storing(
            geometry,
            self.holds,
            self.recorder,
            audit_chunks=audit_chunks,
            audit_every=audit_every,
            events=events,
        )
        self.events = self.storing.events
        self._evictions = evictions
        self._requests: dict[str, RequestState] = {}
        self.waiting_loads = 0
        self.room = room or Room((), geometry.num_blocks, geometry.max_step_tokens)
        # Numbers of tickets never repeat, also not after a restart of the engine or the store.
        self._tickets = itertools.count(time.time_ns())
        self._io = IoThread() if io is None else io
        self._lookups = Lookups(geometry, current, self._io, self.recorder, clock)
        self._set_namespaces()

    def _set_namespaces(self) -> None:
        self.namespaces = tuple(
            identity.namespace(digest, number, self.epoch)
            for number, digest in enumerate(self._digests)
        )
        self.storing.namespaces = self.namespaces

    @property
    def loaded_groups(self) -> tuple[int, ...]:
        """The engine's groups whose blocks a load fills."""
        return tuple(sorted({g.index for g in self.geometry.groups if not g.optional}))

    # -- lookups -------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Start the lookup of a request that arrived."""
        state = self._requests[request.request_id] = RequestState(request, self.geometry)
        if translate.adapter(request) is not None:
            state.mask = None  # until the I/O thread has seen its files
        if not self.enabled:
            self._tell(state, "disabled")
        elif request.skip_reading_prefix_cache:
            self._tell(state, "skipped")
            if state.mask is None:
                self._lookups.ask(
                    state, self.epoch, self.namespaces
                )  # for the mask: what it computes can still be stored
        else:
            self._lookups.ask(state, self.epoch, self.namespaces)

    def offer(self, request: Request, local: int) -> int | None:
        """Tokens that can be loaded beyond `local`; None: ask again in the next step."""
        state = self._requests.get(request.request_id)
        if state is None or not self.enabled or request.skip_reading_prefix_cache:
            return 0
        if self._stands_back(state):
            return None
        state.cached, state.draft_is_good = local, True
        now, lookup = self._clock(), state.lookup
        if lookup is None or lookup.epoch != self.epoch or self._is_stale(state, lookup, now):
            self._lookups.ask(state, self.epoch, self.namespaces)
            state.asked_s = None
            lookup = state.lookup
        assert lookup is not None
        if state.asked_s is None:
            state.asked_s = now
        if lookup.tiers is None:
            if now - state.asked_s < self._lookup_wait_s and self._current() is not None:
                return None
            self._tell(state, "late" if self._current() is not None else "no_store", local)
            return 0
        if lookup.local != local:
            self._evaluate(state, lookup, local)
        if state.junction > max(local, lookup.boundary):
            translate.mark_junction(request, state.junction)
        state.local = local
        if state.failures > 1 or lookup.boundary <= local:
            self._tell(state, self._why_nothing(state, local), local)
            return 0
        again = state.failures > 0
        if not self.room.has(request.request_id, request.num_tokens, lookup.boundary, again=again):
            state.full_s = now if state.full_s is None else state.full_s
            # Those whose loads failed would only wait for each other's reservations.
            if not again and not self.room.empty and now - state.full_s < self._room_wait_s:
                return None
            self._tell(state, "no_room", local)
            return 0
        state.full_s, state.retried = None, again
        return lookup.boundary - local

    def _stands_back(self, state: RequestState) -> bool:
        """Keep a request whose load failed from blocking the engine.

        The engine keeps it in front of all others that were loaded, with its former blocks still
        reserved. So it is asked again once, which files it among those that wait; and if the
        shorter offer does not fit beside that reservation it is withdrawn, as it never would.
        """
        if state.stand_back:
            state.stand_back = False
            return True
        if state.retried and state.load is None:
            state.failures += 1
        return False

    def _why_nothing(self, state: RequestState, local: int) -> str:
        if state.failures > 1:
            return "failed"
        if state.mask is None:
            return "adapter"
        period = self.geometry.period
        return "local" if (state.request.num_tokens - 1) // period * period <= local else "absent"

    def _evaluate(self, state: RequestState, lookup: Lookup, local: int) -> None:
        """Find the boundary of a lookup's answer, once for each hit of the engine's own."""
        g, tiers = self.geometry, lookup.tiers
        assert tiers is not None
        limit = state.request.num_tokens - 1  # the engine needs a token to compute
        lookup.local, lookup.boundary = local, boundary.longest(g, tiers, local, limit)
        if any(group.need != "all" for group in g.groups):
            whole = boundary.whole_prefix(g, tiers, local, limit)
            state.junction = whole if whole > lookup.boundary else 0
        for group in g.groups:
            row = tiers[group.number]
            found = int(np.count_nonzero(row))
            if group.need == "all":
                found = found if found == len(row) else int(np.argmin(row))
                # What the store has need not be offered to it again.
                state.next[group.number] = max(state.next[group.number], found)
            self.recorder.add(metrics.FOUND_TOKENS, found * g.period, group=group.label)

    def _is_stale(self, state: RequestState, lookup: Lookup, now: float) -> bool:
        """Whether the answer is old and found less than all: others may have stored since."""
        return (
            lookup.tiers is not None
            and state.failures == 0
            and now - lookup.looked_s > LOOKUP_FRESH_S
            and (state.mask is None or not lookup.tiers.all())
        )

    def hit_tiers(self, request_id: str) -> tuple[int, int]:
        """(host, disk) tokens of the load that was just ordered for a request."""
        state = self._requests.get(request_id)
        load = None if state is None else state.load
        return (0, 0) if state is None or load is None else (load.tokens - load.disk, load.disk)

    # -- loads ---------------------------------------------------------------------------------

    def start_load(
        self, request: Request, tables: Sequence[Sequence[KVCacheBlock]], tokens: int
    ) -> None:
        """The engine accepted an offer of `tokens`: open tickets and order the load.

        `tables` are the request's blocks by the engine's groups. The engine now waits for this
        load's end, so there is an order in any case: after an error one that every worker reports
        as failed at once.
        """
        number, state = next(self._tickets), self._requests.get(request.request_id)
        end = tokens if state is None else state.local + tokens
        load = Load(number, end, tokens, self._clock())
        parts: list[LoadPart] = []
        current = self._current()
        try:
            if state is not None and self.enabled:
                keys = partial(self.storing.keys, state)
                parts = load_parts(self.geometry, state, tables, load, self._tickets, keys)
        except Exception:
            logger.exception("kvfold: a load could not be ordered; its tokens are recomputed")
            load.parts, parts = [], []
        if state is not None:
            state.load = load
            self.waiting_loads += 1
            self.room.hold(request.request_id, request.num_tokens, end)
            self.storing.drafts.loaded(state, load.draft_blocks, load.draft_left_out)
        store = "" if current is None else current[0].store_id
        self._orders.loads.append(LoadOrder(number, request.request_id, store, tuple(parts)))
        if current is not None:
            for part in parts:
                self._io.put(partial(self._open, current[0], part, self.namespaces[part.group]))
        self.recorder.add(metrics.LOADS, 1)
        if state is not None and state.lookup is not None and state.lookup.tiers is not None:
            load.disk = disk_tokens(self.geometry, load, state.lookup.tiers)
        self.recorder.add(metrics.HIT_TOKENS, tokens - load.disk, tier=metrics.HOST)
        self.recorder.add(metrics.HIT_TOKENS, load.disk, tier=metrics.DISK)

    def _open(self, client: LookupClient, part: LoadPart, namespace: bytes) -> None:
        """On the I/O thread."""
        readers = (1 << self.geometry.world) - 1
        client.open_ticket(part.ticket, part.group, namespace, part.keys, readers)

    def _load_failed(self, state: RequestState, load: Load, failure: LoadFailure) -> None:
        """Shorten the next offer. Every worker reports the same load, maybe in other steps."""
        if state.failed_load != load.number:
            state.failed_load = load.number
            state.failures += 1
            state.stand_back, state.retried = True, False
        lookup = state.lookup
        chunk = 0
        if failure.part < len(load.parts):
            number, chunks = load.parts[failure.part]
            chunk = int(chunks[min(failure.index, len(chunks) - 1)])
            if lookup is not None and lookup.tiers is not None:
                lookup.tiers[number, chunk] = 0
        elif lookup is not None and lookup.tiers is not None:
            lookup.tiers[:] = 0
        if lookup is not None:
            lookup.local = -1
        # What was lost may be stored again when it has been recomputed.
        state.next = [min(known, chunk) for known in state.next]
        state.next_tokens = min(state.next_tokens, (chunk + 1) * self.geometry.period)

    # -- steps ---------------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """The orders of this step: loads begun in it and chunks that it completes."""
        if self.enabled:
            blocks = scheduler_output.kv_connector_block_state
            for req_id, handed in blocks.boundary_state_offloads.items():
                if (state := self._requests.get(req_id)) is not None:
                    self._guarded(state, self.storing.hand_over, state, handed)
            for req_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
                self.room.release(req_id)
                state = self._requests.get(req_id)
                if state is None:
                    continue
                computed = state.request.num_computed_tokens + new_tokens
                if computed >= state.next_tokens:
                    tables = partial(blocks.get_block_ids, req_id)
                    self._guarded(state, self._store, state, tables, computed)
        self._orders.stores = self.storing.take()
        orders, self._orders = self._orders, StepOrders()
        if not scheduler_output.num_scheduled_tokens:
            orders.pause_s = IDLE_PAUSE_S
        return orders

    def _store(self, state: RequestState, tables: Callable[[], Any], computed: int) -> None:
        self.storing.store(state, tables(), computed)

    def _guarded(self, state: RequestState, call: Callable[..., None], *args: Any) -> None:
        """After an error a request stores nothing more, and lives on."""
        try:
            call(*args)
        except Exception:
            logger.exception("kvfold: a store could not be ordered")
            state.blocked, state.next_tokens = True, NEVER

    def hand_over_at_end(self, request: Request, handed: Sequence[tuple[int, int, int]]) -> None:
        """States that a finished request leaves: (engine's group, block, boundary)."""
        state = self._requests.get(request.request_id)
        if state is not None and self.enabled:
            self.storing.hand_over(state, handed)

    def request_finished(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Order what could not be held before, as far as it can be now; forget the request."""
        state = self._requests.pop(request.request_id, None)
        self.room.release(request.request_id)
        if state is None:
            return
        if state.load is not None:  # aborted: nothing waits for it any more
            self.waiting_loads -= 1
            return
        if not self.enabled:
            return
        computed = min(
            request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1)
        )
        self.storing.store(state, tables, computed, finished=True)

    def update(self, results: StepResults | None, finished_recving: set[str]) -> None:
        """Take what the workers finished."""
        if results is not None:
            for req_id, failures in results.failures.items():
                state = self._requests.get(req_id)
                for failure in failures:
                    load = None if state is None else state.load
                    if state is not None and load is not None and load.number == failure.load:
                        if state.failed_load != load.number:
                            kind = metrics.failure_kind(failure.reason)
                            self.recorder.add(metrics.LOAD_FAILURES, 1, reason=kind)
                        self._load_failed(state, load, failure)
            for req_id in results.without_draft:
                state = self._requests.get(req_id)
                if state is not None and state.load is not None:
                    self.storing.drafts.spoil(state, state.load.draft_blocks)
            for job, count in results.jobs.items():
                if job in results.stored:
                    self.events.reported(job, results.stored[job])
                if self.holds.reported(job, count):
                    self.events.ended(job)
        for req_id in finished_recving:
            state = self._requests.get(req_id)
            if state is not None and state.load is not None:
                self._load_ended(state, state.load)

    def _load_ended(self, state: RequestState, load: Load) -> None:
        state.load = None
        self.waiting_loads -= 1
        self.recorder.observe(metrics.LOAD_WAIT_SECONDS, self._clock() - load.started_s)
        if state.failed_load == load.number:
            self.room.hold(state.request.request_id, state.request.num_tokens, 0)
            return
        state.loaded, state.retried, state.cached = load.end - state.local, False, load.end
        for group in self.geometry.groups:
            if not group.optional:
                known = max(state.next[group.number], load.end // self.geometry.period)
                state.next[group.number] = known
        self._tell(state, "loaded", state.local)

    def withdraw(self) -> None:
        """Take back the events of what the store has lost."""
        if self._evictions is None or not self._evictions.pending:
            return
        everything, lost = self._evictions.take()
        if everything:
            self.events.cleared()
        for namespace, keys in lost.items():
            if namespace in self.namespaces:  # else of an epoch that a reset has ended
                self.events.removed(self.namespaces.index(namespace), namespace, bytes(keys))

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call."""
        self.withdraw()
        return self.events.take()

    def take_stats(self) -> metrics.KvfoldStats | None:
        """What is new in this side's figures."""
        self.recorder.set(metrics.PINNED_BLOCKS, self.holds.blocks)
        self.recorder.set(metrics.WAITING_LOADS, self.waiting_loads)
        return self.recorder.take()

    # -- the end -------------------------------------------------------------------------------

    def _tell(self, state: RequestState, outcome: str, local: int = 0) -> None:
        """Count how a request went, and have the store remember why, once per outcome."""
        if state.told == outcome:
            return
        if not state.told and outcome in metrics.MISSES:
            self.recorder.add(metrics.MISSED_REQUESTS, 1, reason=outcome)
        state.told = outcome
        current = self._current()
        if current is None:
            return
        lookup = state.lookup if state.mask is not None else None  # without keys nothing to tell
        told = Told(
            self._engine,
            state.request.request_id,
            outcome,
            state.request.num_tokens,
            local,
            0 if lookup is None else lookup.boundary,
            state.loaded,
            bool(self.epoch),
            None if lookup is None or lookup.tiers is None else lookup.tiers.copy(),
        )
        keys = partial(self.storing.keys, state, namespaces=self.namespaces)
        self._io.put(partial(told.send, current[0], self.geometry, self.namespaces, keys))

    def reset(self) -> None:
        """Nothing stored before may be served from now on, in any tier, by this engine."""
        self.epoch = os.urandom(16)
        self._set_namespaces()
        self.events.cleared()
        self._orders.reset = True
        for state in self._requests.values():
            if state.request.num_computed_tokens > 0:
                state.blocked, state.next_tokens = True, NEVER  # it has blocks from before
            else:
                state.next = [0] * len(self.geometry.groups)
                state.next_tokens = self.geometry.period

    def disable(self) -> None:
        """Neither offer nor store anything any more (the audit found replicas that differ)."""
        self.enabled = False

    def close(self) -> None:
        """End the I/O thread."""
        self._io.close()
