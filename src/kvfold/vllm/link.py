"""The connection of one engine process to the store: always there, though sometimes empty.

A store that dies means misses, never a failed request: the link drops the dead client, tells
whoever waits, and connects again in the background with growing pauses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.store.client import Group, Role, StoreClient
from kvfold.store.settings import StoreSettings
from kvfold.vllm.threads import start_thread

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 10.0


@dataclass(frozen=True)
class Peer:
    """Who this process is, to the store."""

    role: Role
    engine: str
    rank: int
    world: int
    fingerprint: str
    groups: Sequence[Group]


class StoreLink:
    """Holds the present `StoreClient`, or None, and replaces it when its store is gone.

    Connections are numbered; a number is never used again.
    `on_ready(client, ticket, indices, offsets)`, `on_failed(client, ticket, index, reason)` and
    `on_gone(client)` run on the client's reader thread, as does `on_evicted(namespace, keys)` (see
    `StoreClient.connect`); `on_client(client, connection)` runs before a new client is used.
    """

    def __init__(
        self,
        settings: StoreSettings,
        peer: Peer,
        *,
        on_ready: Callable[[int, int, NDArray[np.uint32], NDArray[np.uint64]], None] | None = None,
        on_failed: Callable[[int, int, int, str], None] | None = None,
        on_gone: Callable[[int], None] | None = None,
        on_client: Callable[[StoreClient, int], None] | None = None,
        on_evicted: Callable[[bytes, bytes], None] | None = None,
    ) -> None:
        self._settings, self._peer, self._on_client = settings, peer, on_client
        self._on_ready, self._on_failed, self._on_gone = on_ready, on_failed, on_gone
        self._on_evicted = on_evicted
        self._generation = 0
        self._current: tuple[StoreClient, int] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Connect for the first time. Raises `StoreError`: a store that cannot start is a start-up
        error.
        """
        self._connect()

    @property
    def current(self) -> tuple[StoreClient, int] | None:
        """The live client and the number of its connection, or None while there is no store."""
        return self._current

    def close(self) -> None:
        """Say goodbye. The caller no longer touches the arena."""
        self._closed.set()
        with self._lock:
            current, self._current = self._current, None
        if current is not None:
            current[0].close()
        if self._thread is not None:
            self._thread.join(timeout=LAST_PAUSE_S)

    def _connect(self) -> None:
        self._generation += 1
        number = self._generation
        peer = self._peer

        def ready(ticket: int, indices: NDArray[np.uint32], offsets: NDArray[np.uint64]) -> None:
            if self._on_ready is not None:
                self._on_ready(number, ticket, indices, offsets)

        def failed(ticket: int, index: int, reason: str) -> None:
            if self._on_failed is not None:
                self._on_failed(number, ticket, index, reason)

        client = StoreClient.connect(
            self._settings,
            role=peer.role,
            engine=peer.engine,
            rank=peer.rank,
            world=peer.world,
            fingerprint=peer.fingerprint,
            groups=peer.groups,
            on_ready=ready,
            on_failed=failed,
            on_gone=lambda: self._lost(number),
            on_evicted=self._on_evicted,
        )
        if self._on_client is not None:
            self._on_client(client, number)
        with self._lock:
            wanted = not self._closed.is_set()
            if wanted:
                self._current = (client, number)
        if not wanted:
            client.close()
            return
        if not client.alive:  # it died before anybody was told that it is the present one
            self._lost(number)

    def _lost(self, number: int) -> None:
        with self._lock:
            current = self._current
            if self._closed.is_set() or current is None or current[1] != number:
                return
            self._current = None
        if self._on_gone is not None:
            self._on_gone(number)
        current[0].close()  # whoever still knows the client must not keep the arena mapped
        logger.warning("kvfold: the store is gone; lookups miss until it is back")
        self._thread = start_thread("kvfold-link", self._reconnect)

    def _reconnect(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.wait(pause_s):
            try:
                self._connect()
            except Exception as error:
                logger.debug("kvfold: no store yet: %s", error)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            else:
                logger.info("kvfold: connected to the store again")
                return
