"""Why a request hit what it hit: a record for the store, which answers `kvfold why`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvfold.vllm import boundary
from kvfold.vllm.requests import Geometry, GroupGeometry

REASONS = {
    "disabled": "this engine stores and loads nothing any more (see its log)",
    "skipped": "the request asks for no cached tokens",
    "late": "the store's answer did not come in time (lookup_wait_ms)",
    "no_store": "there is no store at the moment",
    "no_room": "the engine had no room for one more load",
    "failed": "loads of it failed twice",
    "adapter": "the files of its adapter are not known, or have changed while the engine runs",
    "local": "the engine's own cache has all of it",
}
NOT_STORED = {
    "all": "not stored",
    "window": "no window is stored for a hit there",
    "chunked": "no window is stored for a hit there",
    "state": "no state is stored for a hit there",
}


class WhyClient(Protocol):
    """The part of the store's client that takes records."""

    def tell(self, request: str, record: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Told:
    """What became of one request; `tiers` has shape (groups, chunks), None if it is not known."""

    engine: str
    request: str
    outcome: str
    tokens: int
    local: int
    boundary: int
    loaded: int
    epoch: bool
    tiers: NDArray[np.uint8] | None

    def send(
        self,
        client: WhyClient,
        geometry: Geometry,
        namespaces: Sequence[bytes],
        keys: Callable[[int, NDArray[np.int64]], bytes],
    ) -> None:
        """Make the record and send it. Runs on the I/O thread."""
        client.tell(self.request, self.record(geometry, namespaces, keys))

    def record(
        self,
        geometry: Geometry,
        namespaces: Sequence[bytes],
        keys: Callable[[int, NDArray[np.int64]], bytes],
    ) -> dict[str, Any]:
        """The record that `kvfold why` shows; docs/protocol.md lists its fields."""
        period = geometry.period
        reached = max(self.boundary, self.local) // period * period
        limit = min(self.tokens - 1, reached + period)  # what a hit of one more chunk lacks
        misses = []
        if self.tiers is not None:
            for group, chunk in boundary.missing(geometry, self.tiers, self.local, limit):
                key = keys(group.number, np.array([chunk]))
                misses.append(self._miss(geometry, group, chunk, key, namespaces[group.number]))
        outcome = self.outcome
        if outcome == "loaded" and misses:
            outcome = "partly"
        return {
            "request": self.request,
            "engine": self.engine,
            "time_s": time.time(),
            "epoch": self.epoch,
            "tokens": self.tokens,
            "local_tokens": self.local,
            "found_tokens": self.boundary,
            "offered_tokens": max(0, self.boundary - self.local),
            "loaded_tokens": self.loaded,
            "outcome": {
                "absent": "missed",
                "adapter": "missed",
                "no_room": "missed",
                "no_store": "no store",
            }.get(outcome, outcome),
            "reason": REASONS.get(self.outcome, misses[0]["reason"] if misses else ""),
            "misses": misses,
        }

    @staticmethod
    def _miss(
        geometry: Geometry, group: GroupGeometry, chunk: int, key: bytes, namespace: bytes
    ) -> dict[str, Any]:
        end = (chunk + 1) * geometry.period
        span = group.blocks_per_chunk * group.tokens_per_block
        return {
            "group": group.number,
            "group_name": group.label,
            "chunk": chunk,
            "first_token": max(0, end - span),
            "last_token": end,
            "key": key.hex(),
            "namespace": namespace.hex(),
            "reason": NOT_STORED[group.need],
        }
