"""The scheduler's side: what a request may load, what a step should store, and whose blocks are
held.

Nothing here waits for the store and nothing loops over keys: lookups and tickets go to an I/O
thread as joined bytes.

A request's life: arrived -> looked up -> offered -> loading (ticket) -> running, stored chunk by
chunk -> finished. After a failed load one more, shorter offer is made, then none.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvfold import identity
from kvfold.errors import KvfoldError
from kvfold.vllm.holds import Holds
from kvfold.vllm.messages import (
    NO_BLOCK,
    LoadFailure,
    LoadOrder,
    StepOrders,
    StepResults,
    StoreOrder,
)
from kvfold.vllm.requests import Geometry, Lookup, RequestState, SchedulerCounters
from kvfold.vllm.threads import start_thread

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

LOOKUP_DEADLINE_S = 5.0
"""The I/O thread gives up on a lookup after this; the request has long gone on without."""
IDLE_PAUSE_S = 0.001
"""Rest of a step without tokens. The engine makes those while it waits for a lookup, a load or the
last store; workers that spin from one to the next would keep the store and our threads from the
cores that they wait for."""
MAX_CHUNKS = 65_536
"""Chunks of one ticket or job at most; a longer prefix is offered up to here."""
LOOKUP_FRESH_S = 0.5
"""A lookup that found less than everything is repeated if the request is asked again this much
later.
"""
NEVER = 1 << 60
"""More tokens than any request will have."""


class LookupClient(Protocol):
    """The part of the store's client that the scheduler needs."""

    store_id: str

    def lookup(self, keys: bytes, timeout_s: float) -> bytes: ...
    def open_ticket(
        self, ticket: int, group: int, namespace: bytes, keys: bytes, readers: int
    ) -> None: ...


class SchedulerSide:
    """Decides offers and stores of one engine. All public methods run in the engine's loop."""

    def __init__(
        self,
        geometry: Geometry,
        digest: bytes,
        current: Callable[[], tuple[LookupClient, int] | None],
        *,
        lookup_wait_s: float,
        audit_chunks: int,
        audit_every: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.geometry, self._digest, self._current, self._clock = geometry, digest, current, clock
        self._lookup_wait_s = lookup_wait_s
        self._audit_left, self._audit_every = audit_chunks, audit_every
        self.epoch = b""
        self.namespace = identity.namespace(digest, 0, self.epoch)
        self.enabled = True
        self.holds = Holds(geometry.world, geometry.max_pinned_blocks, clock)
        self.counters = SchedulerCounters()
        self._requests: dict[str, RequestState] = {}
        self._orders = StepOrders()
        # Numbers of tickets and jobs never repeat, also not after a restart of the engine or the
        # store.
        self._tickets = itertools.count(time.time_ns())
        self._job_numbers = itertools.count(time.time_ns())
        self._jobs_made = 0
        self._io: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = start_thread("kvfold-lookups", self._run_io)

    # -- lookups -------------------------------------------------------------------------------

    def _run_io(self) -> None:
        while (task := self._io.get()) is not None:
            try:
                task()
            except KvfoldError as error:
                logger.debug("kvfold: %s", error)
            except Exception:
                logger.exception("kvfold: a lookup failed")

    def _keys(self, hashes: Sequence[bytes], namespace: bytes) -> bytes:
        return identity.chunk_keys(namespace, b"".join(hashes), self.geometry.hash_bytes)

    def _chunk_hashes(
        self, request: Request, first: int = 0, last: int | None = None
    ) -> list[bytes]:
        """The last block hash of each full chunk in [first, last): covers all tokens before it."""
        per = self.geometry.hashes_per_chunk
        stop = len(request.block_hashes) if last is None else last * per
        return list(request.block_hashes[first * per + per - 1 : stop : per])

    def _look_up(self, state: RequestState) -> None:
        lookup = state.lookup = Lookup(self.epoch)
        hashes, namespace = self._chunk_hashes(state.request, 0, MAX_CHUNKS), self.namespace
        asked_s = self._clock()
        if not hashes:
            lookup.tiers, lookup.looked_s = b"", asked_s
            return

        def task() -> None:
            tiers = b""
            current = self._current()
            wanted = state.lookup is lookup and self._clock() - asked_s < LOOKUP_DEADLINE_S
            try:
                if current is not None and wanted:
                    tiers = current[0].lookup(self._keys(hashes, namespace), LOOKUP_DEADLINE_S)
            finally:
                lookup.looked_s = self._clock()
                lookup.tiers = tiers

        self.counters.lookups += 1
        self._io.put(task)

    def on_new_request(self, request: Request) -> None:
        """Start the lookup of a request that arrived."""
        state = RequestState(request, self.geometry.tokens_per_chunk)
        self._requests[request.request_id] = state
        if self.enabled and not request.skip_reading_prefix_cache:
            self._look_up(state)

    def offer(self, request: Request, local_tokens: int) -> int | None:
        """Tokens that can be loaded beyond `local_tokens`; None: ask again in the next step."""
        state = self._requests.get(request.request_id)
        if state is None or not self.enabled or request.skip_reading_prefix_cache:
            return 0
        now = self._clock()
        lookup = state.lookup
        if lookup is None or lookup.epoch != self.epoch or self._is_stale(state, lookup, now):
            self._look_up(state)
            state.asked_s = None
        if state.asked_s is None:
            state.asked_s = now
        assert state.lookup is not None
        tiers = state.lookup.tiers
        if tiers is None:
            if now - state.asked_s < self._lookup_wait_s and self._current() is not None:
                return None
            self.counters.lookups_late += 1
            return 0
        span = self.geometry.tokens_per_chunk
        found = len(tiers) - len(tiers.lstrip(b"\x01\x02"))
        # The engine needs a token to compute, and its own cache stops at whole blocks too.
        chunks = min(found, int(request.num_tokens - 1) // span)
        if state.limit is not None:
            chunks = min(chunks, state.limit)
        state.next_chunk = max(state.next_chunk, chunks)
        state.local_tokens = local_tokens
        tokens = max(0, chunks * span - local_tokens)
        self.counters.offers += tokens > 0
        return tokens

    def _is_stale(self, state: RequestState, lookup: Lookup, now: float) -> bool:
        """Whether the answer is old and found less than all: others may have stored since."""
        chunks = len(state.request.block_hashes) // self.geometry.hashes_per_chunk
        return (
            lookup.tiers is not None
            and state.limit is None
            and now - lookup.looked_s > LOOKUP_FRESH_S
            and (len(lookup.tiers) < min(chunks, MAX_CHUNKS) or 0 in lookup.tiers)
        )

    def hit_tiers(self, request_id: str, tokens: int) -> tuple[int, int]:
        """(host, disk) tokens of an offer of `tokens` that was accepted."""
        state = self._requests.get(request_id)
        tiers = None if state is None or state.lookup is None else state.lookup.tiers
        if state is None or not tiers:
            return tokens, 0
        span = self.geometry.tokens_per_chunk
        first = state.local_tokens // span
        disk = tiers[first : first + -(-tokens // span)].count(1) * span
        disk = min(disk, tokens)
        return tokens - disk, disk

    # -- loads ---------------------------------------------------------------------------------

    def start_load(self, request: Request, blocks: Sequence[KVCacheBlock], tokens: int) -> None:
        """The engine accepted an offer of `tokens`: open a ticket and order the load.

        The engine now waits for this load's end, so there is an order in any case: after an error
        one that every worker reports as failed at once.
        """
        try:
            self._start_load(request, blocks, tokens)
        except Exception:
            logger.exception("kvfold: a load could not be ordered; its tokens are recomputed")
            ticket, width = next(self._tickets), self.geometry.blocks_per_chunk
            nothing = np.empty((0, width), dtype=np.int32)
            self._orders.loads.append(LoadOrder(ticket, request.request_id, "", b"", nothing))
            state = self._requests.get(request.request_id)
            if state is not None:
                state.ticket, state.failures, state.limit = ticket, 1, 0

    def _start_load(self, request: Request, blocks: Sequence[KVCacheBlock], tokens: int) -> None:
        g, state = self.geometry, self._requests[request.request_id]
        local, end = state.local_tokens, state.local_tokens + tokens
        first, last = local // g.tokens_per_chunk, -(-end // g.tokens_per_chunk)
        table = np.full((last - first) * g.blocks_per_chunk, NO_BLOCK, dtype=np.int32)
        skipped = first * g.blocks_per_chunk
        for i in range(-(-local // g.tokens_per_block), -(-end // g.tokens_per_block)):
            if not blocks[i].is_null:
                table[i - skipped] = blocks[i].block_id
        ticket = next(self._tickets)
        keys = self._keys(self._chunk_hashes(request, first, last), self.namespace)
        current = self._current()
        state.ticket, state.ticket_first = ticket, first
        self._orders.loads.append(
            LoadOrder(
                ticket,
                request.request_id,
                "" if current is None else current[0].store_id,
                keys,
                table.reshape(-1, g.blocks_per_chunk),
            )
        )
        if current is not None:
            self._io.put(
                partial(current[0].open_ticket, ticket, 0, self.namespace, keys, (1 << g.world) - 1)
            )
        self.counters.loads += 1
        self.counters.tokens_offered += tokens

    # -- stores --------------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """The orders of this step: loads begun in it and chunks that it completes."""
        if self.enabled:
            tables = scheduler_output.kv_connector_block_state
            for req_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
                state = self._requests.get(req_id)
                if state is None:
                    continue
                computed = state.request.num_computed_tokens + new_tokens
                if computed >= state.next_tokens:
                    self._store_guarded(state, partial(tables.get_block_ids, req_id), computed)
        orders, self._orders = self._orders, StepOrders()
        if not scheduler_output.num_scheduled_tokens:
            orders.pause_s = IDLE_PAUSE_S
        return orders

    def _store_guarded(self, state: RequestState, table: Callable[[], Any], computed: int) -> None:
        """Store what a request has; after an error it stores nothing more, and lives on."""
        try:
            block_ids = table()
            if block_ids is not None:
                self._store(state, block_ids[0], computed)
        except Exception:
            logger.exception("kvfold: a store could not be ordered")
            state.next_tokens = NEVER

    def _store(self, state: RequestState, block_ids: Sequence[int], computed: int) -> None:
        """Order the store of the full chunks of a request that are not ordered yet."""
        g, request = self.geometry, state.request
        known = min(computed, request.num_tokens, len(request.block_hashes) * g.tokens_per_hash)
        last = min(known // g.tokens_per_chunk, len(block_ids) // g.blocks_per_chunk)
        room = self.holds.room // g.blocks_per_chunk
        first, last = state.next_chunk, min(last, state.next_chunk + min(room, MAX_CHUNKS))
        if first < last:
            self._order(state, first, last, block_ids)
            state.next_chunk = last
        state.next_tokens = (state.next_chunk + 1) * g.tokens_per_chunk

    def _order(self, state: RequestState, first: int, last: int, block_ids: Sequence[int]) -> None:
        g = self.geometry
        ids: NDArray[np.int32] = np.array(
            block_ids[first * g.blocks_per_chunk : last * g.blocks_per_chunk], dtype=np.int32
        )
        if (ids == 0).any():  # a hole: this request does not hold all of its blocks
            return
        job = next(self._job_numbers)
        self._jobs_made += 1
        audit = self._audit_left > 0 or (
            self._audit_every > 0 and self._jobs_made % self._audit_every == 0
        )
        keys = self._keys(self._chunk_hashes(state.request, first, last), self.namespace)
        order = StoreOrder(job, self.namespace, keys, ids.reshape(-1, g.blocks_per_chunk), audit)
        # From here on the blocks are held: nothing below can fail before the job is on its way.
        self.holds.hold(job, ids.tolist())
        self._orders.stores.append(order)
        self._audit_left -= last - first
        self.counters.chunks_scheduled += last - first

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """Order what could not be held before, as far as it can be now; forget the request."""
        state = self._requests.pop(request.request_id, None)
        if state is None or state.ticket is not None or not self.enabled:
            return
        computed = min(
            request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1)
        )
        if computed >= state.next_tokens:
            self._store(state, block_ids, computed)
            span = self.geometry.tokens_per_chunk
            self.counters.chunks_dropped += max(0, computed // span - state.next_chunk)

    def update(self, results: StepResults | None, finished_recving: set[str]) -> None:
        """Take what the workers finished."""
        if results is not None:
            for req_id, failure in results.failures.items():
                state = self._requests.get(req_id)
                self.counters.load_failures += 1
                if state is not None and state.ticket == failure.ticket:
                    self._load_failed(state, failure)
            for job, count in results.jobs.items():
                self.holds.reported(job, count)
        for req_id in finished_recving:
            state = self._requests.get(req_id)
            if state is not None:
                state.ticket = None

    def _load_failed(self, state: RequestState, failure: LoadFailure) -> None:
        """Shorten the next offer. Every worker reports the same ticket, maybe in other steps."""
        first_lost = state.ticket_first + failure.index
        if state.failed_ticket != failure.ticket:
            state.failed_ticket = failure.ticket
            state.failures += 1
            state.limit = first_lost
        if state.failures > 1:
            state.limit = 0
        state.limit = min(first_lost, first_lost if state.limit is None else state.limit)
        # What was lost may be stored again when it has been recomputed.
        state.next_chunk = min(state.next_chunk, first_lost)
        state.next_tokens = (state.next_chunk + 1) * self.geometry.tokens_per_chunk

    def take_stores(self) -> list[StoreOrder]:
        """Orders for which no step came (an in-process engine is not stepped when it is idle)."""
        stores, self._orders.stores = self._orders.stores, []
        return stores

    # -- invalidation --------------------------------------------------------------------------

    def reset(self) -> None:
        """Nothing stored before may be served from now on, in any tier, by this engine."""
        self.epoch = os.urandom(16)
        self.namespace = identity.namespace(self._digest, 0, self.epoch)
        self._orders.reset = True
        for state in self._requests.values():
            if state.request.num_computed_tokens > 0:
                state.next_tokens = NEVER  # it has blocks from before
            else:
                state.next_chunk, state.next_tokens = 0, self.geometry.tokens_per_chunk

    def disable(self) -> None:
        """Neither offer nor store anything any more (the audit found replicas that differ)."""
        self.enabled = False

    def close(self) -> None:
        """End the I/O thread."""
        self._io.put(None)
        self._thread.join(timeout=LOOKUP_DEADLINE_S + 1)
