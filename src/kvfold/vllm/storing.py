"""What a step stores: the chunks that it completes and that can ever serve a hit.

Their blocks are held by reference counts from the order on (see `holds`), so the engine may free
them at once. Windows and states go first when few blocks may be held: they are gone a step later,
while the blocks of full attention stay as long as their request.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvfold import identity
from kvfold.vllm import boundary, metrics
from kvfold.vllm.drafts import Drafts
from kvfold.vllm.events import Events
from kvfold.vllm.holds import Holds
from kvfold.vllm.messages import StoreOrder
from kvfold.vllm.requests import NEVER, Geometry, GroupGeometry, RequestState

MAX_CHUNKS = 65_536
"""Chunks of one job at most."""


class Storing:
    """Makes the store orders of one engine."""

    def __init__(
        self,
        geometry: Geometry,
        holds: Holds,
        recorder: metrics.Recorder,
        *,
        audit_chunks: int,
        audit_every: int,
        events: Events | None = None,
    ) -> None:
        self._geometry, self._holds, self._recorder = geometry, holds, recorder
        self.events = events or Events((), 1, 32, enabled=False, recorder=recorder)
        self._audit_left = [audit_chunks] * len(geometry.groups)
        self._audit_every = audit_every
        self.namespaces: Sequence[bytes] = ()
        self.drafts = Drafts()
        # Numbers of jobs never repeat, also not after a restart of the engine or the store.
        self._numbers = itertools.count(time.time_ns())
        self._made = 0
        self._orders: list[StoreOrder] = []
        self._positional = [g for g in geometry.groups if not g.handed_over]
        self._positional.sort(key=lambda group: group.need == "all")

    def take(self) -> list[StoreOrder]:
        """Orders made since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def keys(
        self,
        state: RequestState,
        group: int,
        chunks: NDArray[np.int64],
        namespaces: Sequence[bytes] = (),
    ) -> bytes:
        """Keys of `chunks` of a request, in the present namespaces unless others are given.

        Raises ValueError while its adapter is not known.
        """
        g, mask = self._geometry, state.mask
        if mask is None:
            raise ValueError("the keys of this adapter are not known")
        hashes, per = state.request.block_hashes, g.hashes_per_chunk
        first, last = int(chunks[0]), int(chunks[-1])
        if last - first + 1 == len(chunks):
            joined = b"".join(hashes[first * per + per - 1 : last * per + per : per])
        else:
            joined = b"".join([hashes[i * per + per - 1] for i in chunks.tolist()])
        namespace = masked((namespaces or self.namespaces)[group], mask)
        return identity.chunk_keys(namespace, joined, g.hash_bytes)

    def store(
        self,
        state: RequestState,
        tables: Sequence[Sequence[int]] | None,
        computed: int,
        *,
        finished: bool = False,
    ) -> None:
        """Order what a request has complete once `computed` tokens are, and has not ordered.

        `tables` are its block ids by the engine's groups; 0 is a hole.
        """
        if tables is None or state.blocked or state.mask is None:
            return
        g, request = self._geometry, state.request
        known = min(computed, request.num_tokens)
        hashed = len(request.block_hashes) // g.hashes_per_chunk
        next_tokens = NEVER
        for group in self._positional:
            lag = g.draft_lag if group.optional and not finished else 0
            last = min((known - lag) // g.period, hashed)
            first = state.next[group.number]
            if (
                first < last
                and group.optional
                and not self._draft_is_good(state, group, tables, last)
            ):
                state.next[group.number] = first = last
            if first < last:
                self._store_group(state, group, tables[group.index], first, last)
                if finished:
                    left = last - state.next[group.number]
                    self._recorder.add(metrics.CHUNKS_DROPPED, left)
            next_tokens = min(next_tokens, (state.next[group.number] + 1) * g.period + lag)
        state.next_tokens = next_tokens

    def _draft_is_good(
        self,
        state: RequestState,
        group: GroupGeometry,
        tables: Sequence[Sequence[int]],
        last: int,
    ) -> bool:
        """Whether a draft's chunks before chunk `last` may be stored."""
        span = group.tokens_per_block
        table = tables[group.index][: last * self._geometry.period // span]
        return self.drafts.are_good(state, table, state.cached // span)

    def _store_group(
        self, state: RequestState, group: GroupGeometry, table: Sequence[int], first: int, last: int
    ) -> None:
        g, width = self._geometry, group.blocks_per_chunk
        per = g.period // group.tokens_per_block
        last = min(last, len(table) // per, first + MAX_CHUNKS)
        chunks = np.arange(first, last)
        blocks: NDArray[np.int32]
        if group.need == "all":
            blocks = np.array(table[first * per : last * per], np.int32).reshape(-1, width)
            whole = blocks.all(axis=1)
        else:
            junctions = (state.junction, state.request.shared_prefix_boundary)
            good = boundary.wanted(g, group, chunks, state.request.num_prompt_tokens, junctions)
            chunks = chunks[good]
            held = np.array(table[first * per : last * per], np.int32)
            places = (chunks - first + 1)[:, None] * per + np.arange(-width, 0)
            blocks = held[places]
            whole = blocks.all(axis=1)
        chunks, blocks = chunks[whole], blocks[whole]
        room = self._holds.room // width
        if len(chunks) > room:
            last = int(chunks[room])  # later, if their blocks are still there then
            chunks, blocks = chunks[:room], blocks[:room]
        if len(chunks):
            self._order(state, group, chunks, blocks)
        state.next[group.number] = max(first, last)

    def hand_over(self, state: RequestState, handed: Sequence[tuple[int, int, int]]) -> None:
        """Order states that the engine hands over: (engine's group, block, boundary in tokens)."""
        g, request = self._geometry, state.request
        if state.blocked or state.mask is None:
            return
        known = min(request.num_tokens, len(request.block_hashes) * g.tokens_per_hash)
        for index, block, tokens in handed:
            if block == 0 or tokens % g.period or not 0 < tokens <= known:
                continue
            for group in g.groups:
                if group.index != index or not group.handed_over:
                    continue
                if self._holds.room < 1:
                    self._recorder.add(metrics.CHUNKS_DROPPED, 1)
                    continue
                chunk = np.array([tokens // g.period - 1])
                self._order(state, group, chunk, np.array([[block]], dtype=np.int32))

    def _order(
        self,
        state: RequestState,
        group: GroupGeometry,
        chunks: NDArray[np.int64],
        blocks: NDArray[np.int32],
    ) -> None:
        job, number = next(self._numbers), group.number
        self._made += 1
        audit = self._audit_left[number] > 0 or (
            self._audit_every > 0 and self._made % self._audit_every == 0
        )
        keys = self.keys(state, number, chunks)
        order = StoreOrder(job, number, self.namespaces[number], keys, blocks, audit)
        # From here on the blocks are held: nothing below can fail before the job is on its way.
        self._holds.hold(job, blocks.ravel().tolist())
        self._orders.append(order)
        ends = ((chunks + 1) * self._geometry.period).tolist() if self.events.enabled else ()
        self.events.ordered(order, state.request, ends)
        self._audit_left[number] -= len(chunks)


def masked(namespace: bytes, mask: bytes) -> bytes:
    """The namespace that an adapter's keys are made with."""
    if not mask:
        return namespace
    mixed = int.from_bytes(namespace, "little") ^ int.from_bytes(mask, "little")
    return mixed.to_bytes(len(namespace), "little")
