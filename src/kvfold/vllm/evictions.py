"""What the store has lost, on its way from the client's thread to the engine's loop."""

from __future__ import annotations

import threading

from kvfold.store.settings import StoreSettings
from kvfold.vllm.link import Peer, StoreLink

MAX_BYTES = 8 << 20
"""Keys that wait at most, 262,144: an engine without requests takes none."""


class Evictions:
    """Keys of lost chunks by namespace, until they are taken. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[bytes, bytearray] = {}
        self._bytes = 0
        self._all = False
        self.pending = False
        """Whether there is anything to take; needs no lock."""

    def add(self, namespace: bytes, keys: bytes) -> None:
        """The store has lost these chunks; without keys: some, nobody knows which."""
        with self._lock:
            if not keys or self._bytes + len(keys) > MAX_BYTES:
                self._lose_all()
            else:
                self._keys.setdefault(namespace, bytearray()).extend(keys)
                self._bytes += len(keys)
                self.pending = True

    def lose_all(self) -> None:
        """Nothing that was known of the store before holds any more."""
        with self._lock:
            self._lose_all()

    def _lose_all(self) -> None:
        self._keys, self._bytes, self._all, self.pending = {}, 0, True, True

    def take(self) -> tuple[bool, dict[bytes, bytearray]]:
        """Whether all is lost, and what was lost after that; each once."""
        with self._lock:
            taken = self._all, self._keys
            self._keys, self._bytes, self._all, self.pending = {}, 0, False, False
        return taken


def listening_link(settings: StoreSettings, peer: Peer, evictions: Evictions | None) -> StoreLink:
    """The scheduler side's link; the engine has KV events if there are `evictions`.

    When the store is gone all that was announced is withdrawn, although the next store may find
    part of it on its disk: which part, nobody says. A router that believes in chunks that are not
    there sends requests to the wrong engine; one that knows of too few only loses a preference.
    When the next store is there all is withdrawn again, because of what was announced while nobody
    listened to what it lost.
    """
    if evictions is None:
        return StoreLink(settings, peer)
    return StoreLink(
        settings,
        peer,
        on_gone=lambda _: evictions.lose_all(),
        on_client=lambda *_: evictions.lose_all(),
        on_evicted=evictions.add,
    )
