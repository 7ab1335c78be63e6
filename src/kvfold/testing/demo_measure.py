"""What the demo measures with: the store asked from outside, the disk's limit, and comparisons."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.errors import StoreError, StoreGone
from kvfold.store.client import StoreClient
from kvfold.store.launch import running_stores

GAP_ALLOWED = 1e-3
"""Two best log probabilities this close are a tie: rounding decides which one is taken."""

PATIENT = {
    "lookup_wait_ms": 5000,
    "store_deadline_s": 60,
    "load_deadline_s": 60,
    "linger_s": 120,
}
"""Connector settings under which a machine that is busy makes the demo slower, but no hit a miss.

A demo that is killed leaves a store for `linger_s`.
"""

_POLL_S = 0.05
_PAGE = 4096


# ---------------------------------------------------------------- stores


class Stores:
    """The stores below one runtime folder, asked and stopped from outside like `kvfold store`."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime

    def status(self) -> dict[str, Any]:
        """The figures of the one store that runs. Raises `StoreGone` if none does."""
        with self._client() as client:
            return client.status()

    def wait(
        self,
        what: str,
        good: Callable[[dict[str, Any]], bool],
        timeout_s: float = 60,
    ) -> dict[str, Any]:
        """Poll the status until it is `good`, through restarts. Raises `StoreError` when late."""
        deadline = time.monotonic() + timeout_s
        seen: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with suppress(StoreGone):
                seen = self.status()
                if good(seen):
                    return seen
            time.sleep(_POLL_S)
        raise StoreError(f"waited {timeout_s:.0f} s in vain until {what}; last status: {seen}")

    def stop(self, drain: bool = True) -> str | None:
        """Stop every store and wait until its process is gone; return the id of the last one.

        With `drain` everything is on disk first.
        """
        last = None
        for folder in running_stores(None, str(self.runtime)):
            with suppress(StoreGone):
                client = StoreClient.connect_tool(folder)
                try:
                    if drain:
                        client.flush(60)
                    last = client.store_id
                    client.stop(drain)
                finally:
                    client.close()
                _wait_for_exit(client.store_pid)
        return last

    @contextmanager
    def _client(self) -> Iterator[StoreClient]:
        folders = running_stores(None, str(self.runtime))
        if len(folders) != 1:
            raise StoreGone(f"{len(folders)} stores run in {self.runtime}")
        client = StoreClient.connect_tool(folders[0])
        try:
            yield client
        finally:
            client.close()


def serves(clients: int, other_than: str | None = None) -> Callable[[dict[str, Any]], bool]:
    """A condition for `Stores.wait`: a new store, its disk scanned, with so many engine clients."""

    def good(status: dict[str, Any]) -> bool:
        engines = [c for c in status["clients"] if c["role"] != "tool"]
        return status["store"] != other_than and not status["scanning"] and len(engines) == clients

    return good


def _wait_for_exit(pid: int, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


# ---------------------------------------------------------------- the disk's limit


class DiskLimit:
    """How fast the disk reads: two threads, direct reads of `piece_bytes`, no checksums.

    The file is written once and read again for every measurement, because a disk's speed drifts:
    measure close to what is compared with it.
    """

    THREADS = 2

    def __init__(self, path: Path, size_bytes: int, piece_bytes: int) -> None:
        self.path = path
        self.piece_bytes = -(-piece_bytes // _PAGE) * _PAGE
        self.pieces = max(1, size_bytes // self.piece_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        block = os.urandom(self.piece_bytes)
        with path.open("wb") as file:
            for number in range(self.pieces):
                file.write(number.to_bytes(8, "little") + block[8:])
            file.flush()
            os.fsync(file.fileno())
        self._buffers = [mmap.mmap(-1, self.piece_bytes) for _ in range(self.THREADS)]
        for buffer in self._buffers:
            buffer.write(block)  # touched, so that no read pays for its pages

    def measure(self) -> float:
        """Read the file once; bytes per second."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # no direct I/O here: then at least not from memory
            file = os.open(self.path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

        def read(thread: int) -> int:
            # A buffer of its own for each thread, as slots are.
            return sum(
                os.preadv(file, [self._buffers[thread]], number * self.piece_bytes)
                for number in range(thread, self.pieces, self.THREADS)
            )

        try:
            with ThreadPoolExecutor(self.THREADS) as pool:
                start = time.perf_counter()
                total = sum(pool.map(read, range(self.THREADS)))
                return total / (time.perf_counter() - start)
        finally:
            os.close(file)

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        for buffer in self._buffers:
            buffer.close()


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class Difference:
    """Where two answers part, and how close the two best tokens were there."""

    question: int
    position: int
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= GAP_ALLOWED


def difference(
    question: int, expected: Mapping[str, Any], actual: Mapping[str, Any]
) -> Difference | None:
    """Compare two outputs of a "generate" step with at least two logprobs; None if they agree."""
    tokens, others = expected["tokens"], actual["tokens"]
    pairs = enumerate(zip(tokens, others, strict=False))
    position = next((at for at, (one, other) in pairs if one != other), None)
    if position is None:
        if len(tokens) == len(others):
            return None
        return Difference(question, min(len(tokens), len(others)), float("inf"))
    best = expected["logprobs"][position]
    return Difference(question, position, abs(best[0][1] - best[1][1]))


# ---------------------------------------------------------------- bytes of every rank


@dataclass(frozen=True)
class Bytes:
    """What the connector's digests say about every rank's bytes."""

    ranks: int
    chunks: int
    """Chunks that were loaded by every rank."""
    kept: bool
    """Every rank's bytes after a load equal those before the store."""
    same_on_ranks: bool
    """All ranks hold the same bytes of every chunk."""
    distinct_on_ranks: bool
    """All ranks hold other bytes of every chunk."""
    trouble: str = ""


def compare_bytes(lines: Sequence[Mapping[str, Any]], ranks: int) -> Bytes:
    """Judge digest lines: event "store" or "load", rank, key, digest."""
    stored: dict[tuple[int, str], set[str]] = defaultdict(set)
    loaded: dict[tuple[int, str], set[str]] = defaultdict(set)
    for line in lines:
        events = stored if line["event"] == "store" else loaded
        events[line["rank"], line["key"]].add(line["digest"])
    trouble = ""
    for (rank, key), digests in sorted(loaded.items()):
        if len(digests) != 1 or digests != stored.get((rank, key)):
            trouble = f"rank {rank}, chunk {key[:12]}: loaded bytes are not those stored"
            break
    keys = {key for _, key in loaded}
    owners = {key: [loaded.get((rank, key)) for rank in range(ranks)] for key in keys}
    missing = sorted(key for key, held in owners.items() if None in held)
    if missing and not trouble:
        trouble = f"chunk {missing[0][:12]}: not loaded by every rank"
    different = {
        len({frozenset(digests) for digests in held if digests is not None})
        for held in owners.values()
    }
    return Bytes(
        ranks=ranks,
        chunks=len(keys) - len(missing),
        kept=bool(keys) and not trouble,
        same_on_ranks=different == {1},
        distinct_on_ranks=different == {ranks},
        trouble=trouble if keys else "no rank loaded anything",
    )


def read_digests(folder: Path) -> list[dict[str, Any]]:
    """Every line that the connector's workers wrote below `folder`."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
