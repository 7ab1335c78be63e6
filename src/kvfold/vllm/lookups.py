"""Lookups: which chunks of a request the store has, of all groups in one question.

The engine's loop only joins hashes and hands them over; keys are made, adapters' files read and the
store asked on the I/O thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvfold import identity
from kvfold.vllm import metrics, translate
from kvfold.vllm.adapters import Adapters
from kvfold.vllm.io_thread import IoThread
from kvfold.vllm.requests import Geometry, Lookup, RequestState
from kvfold.vllm.storing import masked

LOOKUP_DEADLINE_S = 5.0
"""The I/O thread gives up on a lookup after this; the request has long gone on without."""
MAX_CHUNKS = 65_536
"""Chunks of one request that are looked up; a longer prefix is offered up to here."""


class LookupClient(Protocol):
    """The part of the store's client that the scheduler needs."""

    store_id: str

    def lookup(self, keys: bytes, timeout_s: float) -> bytes: ...
    def open_ticket(
        self, ticket: int, group: int, namespace: bytes, keys: bytes, readers: int
    ) -> None: ...
    def tell(self, request: str, record: Mapping[str, Any]) -> None: ...


class Lookups:
    """Asks the store for requests of one engine."""

    def __init__(
        self,
        geometry: Geometry,
        current: Callable[[], tuple[LookupClient, int] | None],
        io: IoThread,
        recorder: metrics.Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._geometry, self._current, self._io = geometry, current, io
        self._recorder, self._clock = recorder, clock
        self._adapters = Adapters()

    def ask(self, state: RequestState, epoch: bytes, namespaces: Sequence[bytes]) -> None:
        """Begin a lookup of a request: `state.lookup`, whose `tiers` are None until it is over."""
        g = self._geometry
        lookup = state.lookup = Lookup(epoch, self._clock())
        per = g.hashes_per_chunk
        hashes = state.request.block_hashes[per - 1 : MAX_CHUNKS * per : per]
        if not hashes:
            lookup.tiers = np.zeros((len(g.groups), 0), dtype=np.uint8)
            lookup.looked_s = lookup.asked_s
            return
        self._recorder.add(metrics.LOOKUP_TOKENS, len(hashes) * g.period)
        self._io.put(partial(self._ask, state, lookup, b"".join(hashes), namespaces))

    def _ask(
        self, state: RequestState, lookup: Lookup, hashes: bytes, namespaces: Sequence[bytes]
    ) -> None:
        """On the I/O thread."""
        groups, hash_bytes = len(namespaces), self._geometry.hash_bytes
        tiers = np.zeros((groups, len(hashes) // hash_bytes), dtype=np.uint8)
        current = self._current()
        wanted = state.lookup is lookup and self._clock() - lookup.asked_s < LOOKUP_DEADLINE_S
        try:
            adapter = translate.adapter(state.request)
            if adapter is not None:
                state.mask = self._adapters.mask(*adapter)
            mask = state.mask
            if current is not None and wanted and mask is not None:
                keys = b"".join(
                    identity.chunk_keys(masked(namespace, mask), hashes, hash_bytes)
                    for namespace in namespaces
                )
                answer = current[0].lookup(keys, LOOKUP_DEADLINE_S)
                tiers = np.frombuffer(bytearray(answer), dtype=np.uint8).reshape(groups, -1)
        finally:
            lookup.looked_s = self._clock()
            self._recorder.observe(metrics.LOOKUP_SECONDS, lookup.looked_s - lookup.asked_s)
            lookup.tiers = tiers
