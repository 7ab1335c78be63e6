"""What the tests of real store processes share: bytes, settings, and clients to drive."""

from __future__ import annotations

import hashlib
import json
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvfold.store.client import REFUSED, Group, StoreClient
from kvfold.store.settings import StoreSettings

SLOT = 64 << 10
PAYLOAD = SLOT - 1000
SPACE = hashlib.sha256(b"space").digest()
GROUP = Group(SLOT, PAYLOAD, SPACE, '{"model": "test"}')


def key(number: int) -> bytes:
    return hashlib.sha256(b"chunk %d" % number).digest()


def join(numbers: Sequence[int]) -> bytes:
    return b"".join(map(key, numbers))


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(PAYLOAD)


def settings(folder: Path, **changes: Any) -> StoreSettings:
    """A small store below `folder`, with a disk unless `disk_path=None`."""
    values = {
        "host_bytes": 4 << 20,
        "disk_path": str(folder / "disk"),
        "disk_bytes": 64 << 20,
        "runtime_dir": str(folder / "run"),
        "linger_s": 1.0,
    }
    values |= changes
    if values["disk_path"] is None:
        values["disk_bytes"] = 0
    return StoreSettings(**values)


class Peer:
    """A client in this process that stores and loads whole chunks."""

    def __init__(self, told: StoreSettings, role: Any = "worker", rank: int = 0, **more: Any):
        self.ready: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()
        self.gone = 0
        given = {"engine": "engine", "world": 2, "fingerprint": "plan", "groups": [GROUP]}
        self.client = StoreClient.connect(
            told,
            role=role,
            rank=rank,
            on_ready=self._on_ready,
            on_failed=lambda *failed: self.failed.put(failed),
            on_gone=self._on_gone,
            **(given | more),
        )

    def _on_ready(self, ticket: int, indices: Any, offsets: Any) -> None:
        for index, offset in zip(indices.tolist(), offsets.tolist(), strict=True):
            self.ready.put((ticket, index, offset))

    def _on_gone(self) -> None:
        self.gone += 1

    def tiers(self, numbers: Sequence[int]) -> list[int]:
        return list(self.client.lookup(join(numbers), 10))

    def store(self, job: int, numbers: Sequence[int]) -> list[int]:
        """Store chunks alone; return the numbers that got a slot."""
        masks = np.full(len(numbers), 1, np.uint64)
        offsets = self.client.ask(job, 0, SPACE, join(numbers), 1, masks).offsets.tolist()
        given = [i for i, offset in enumerate(offsets) if offset < REFUSED]
        for i in given:
            self.write(offsets[i], numbers[i])
        self.client.commit(job, np.array(given, np.uint32), True)
        return [numbers[i] for i in given]

    def write(self, offset: int, number: int) -> None:
        assert self.client.arena is not None
        self.client.arena[offset : offset + PAYLOAD] = content(number)

    def load(self, ticket: int, numbers: Sequence[int]) -> bool:
        """Receive, compare and acknowledge every chunk of a ticket opened elsewhere."""
        assert self.client.arena is not None
        for _ in numbers:
            _, index, offset = self.ready.get(timeout=20)
            seen = bytes(self.client.arena[offset : offset + PAYLOAD])
            assert seen == content(numbers[index]), "wrong bytes"
            self.client.ack(ticket, np.array([index], np.uint32))
        return self.done(ticket)

    def done(self, ticket: int) -> bool:
        held: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.client.done(ticket, held.put)
        return held.get(timeout=10)


class Child:
    """A worker in a process of its own (store_child.py)."""

    def __init__(self, told: StoreSettings, rank: int = 1) -> None:
        script = Path(__file__).with_name("store_child.py")
        command = [sys.executable, str(script), told.to_json(), str(rank)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.store_pid = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, do: str, **more: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def eventually(holds: Callable[[], bool], within_s: float = 15.0) -> None:
    """Wait until something is true; fail if it does not become so."""
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, "it never became true"
        time.sleep(0.02)
