"""Tells schedulers that asked which chunks of theirs have left every tier.

Once per turn of the store's loop, per namespace. A client that does not read holds nobody up: what
does not fit its backlog is dropped and counted, and when it reads again it is told that something
is missing. It then has to take everything as lost.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvfold.store.chunks import ChunkTable
from kvfold.store.core_clients import Client, Send
from kvfold.store.messages import KEY_BYTES, MAX_KEYS, Evicted

# Unsent bytes of a client's from which on it is told of no more: 262,144 chunks, which is as many
# as a connector remembers of a group, and far from where a connection is closed.
MAX_BACKLOG_BYTES = 8 << 20
SOME = bytes(KEY_BYTES)
"""The namespace of the `Evicted` without keys: some chunks were lost, nobody knows which."""


class Evictions:
    """Who wants to know, and what of it was dropped. `backlog(client)`: its unsent bytes."""

    def __init__(self, table: ChunkTable, send: Send, backlog: Callable[[int], int]) -> None:
        self._table, self._send, self._backlog = table, send, backlog
        self._incomplete: dict[Client, bool] = {}
        self.untold = 0

    def listen(self, client: Client) -> None:
        """Tell this client from now on."""
        self._incomplete[client] = False
        if self._table.gone is None:
            self._table.gone = []

    def leave(self, client: Client) -> None:
        self._incomplete.pop(client, None)
        if not self._incomplete:
            self._table.gone = None

    def tell(self) -> None:
        """Tell what has gone since the last call."""
        for client, incomplete in self._incomplete.items():
            if incomplete and self._reads(client):
                self._incomplete[client] = False
                self._send(client.number, Evicted(SOME, b""))
        if not self._table.gone:
            return
        gone, self._table.gone = self._table.gone, []
        numbers = np.concatenate([part for part, _ in gone])
        keys = np.concatenate([part for _, part in gone])
        for number in np.unique(numbers).tolist():
            namespace = self._table.namespaces[number]
            clients = [c for c in self._incomplete if namespace in c.engine.namespaces]
            if clients:
                self._tell(clients, namespace, keys[numbers == number].tobytes())

    def _reads(self, client: Client) -> bool:
        return self._backlog(client.number) < MAX_BACKLOG_BYTES

    def _tell(self, clients: list[Client], namespace: bytes, keys: bytes) -> None:
        for at in range(0, len(keys), MAX_KEYS * KEY_BYTES):
            part = keys[at : at + MAX_KEYS * KEY_BYTES]
            for client in clients:
                if self._reads(client):
                    self._send(client.number, Evicted(namespace, part))
                else:
                    self._incomplete[client] = True
                    self.untold += len(part) // KEY_BYTES
