"""What tests of real engines share: a store of a test's own, asking, and what each rank held.

With the setting `digest_dir`, every rank writes a line per chunk that it stores or has loaded, with
a digest of all bytes that it holds of the chunk in its pages. A `Ledger` reads them.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.errors import StoreGone
from kvfold.store.client import StoreClient
from kvfold.testing import drain
from kvfold.testing.engines import Engine, counters, generate
from kvfold.vllm.requests import Geometry
from kvfold.vllm.settings import ConnectorSettings

SLOW_S = 240.0
"""For anything that ends by itself; only a hang takes as long."""
BEST = 5
"""Logprobs of so many tokens are compared at every place."""

Settings = Mapping[str, Any]


def eventually(holds: Callable[[], Any], what: str) -> Any:
    """Wait until `holds()` is true, and return it; fail if it does not become so."""
    until_s = time.monotonic() + SLOW_S
    while not (result := holds()):
        assert time.monotonic() < until_s, what
        time.sleep(0.02)
    return result


# ---------------------------------------------------------------- the store


def tool(settings: Settings) -> StoreClient:
    """A client without a part in anything. Raises `StoreGone` if there is no store."""
    return StoreClient.connect_tool(ConnectorSettings.parse(settings).store().runtime_path())


def status(settings: Settings) -> dict[str, Any]:
    """The store's figures; empty while there is none."""
    with suppress(StoreGone):
        client = tool(settings)
        try:
            return client.status()
        finally:
            client.close()
    return {}


def stop(settings: Settings) -> dict[str, Any]:
    """Write everything to disk and stop the store; return its last figures, empty without one."""
    try:
        client = tool(settings)
    except StoreGone:
        return {}
    client.flush(SLOW_S)
    last = client.status()
    client.stop(True)
    client.close()
    return last


def stored_all(settings: Settings) -> dict[str, Any]:
    """Wait until nobody stores or loads anything; return the store's figures."""

    def idle() -> dict[str, Any] | None:
        now = status(settings)
        return None if now["jobs_open"] or now["tickets_open"] else now

    figures: dict[str, Any] = eventually(idle, "storing never ended")
    return figures


def restart_store(settings: Settings, processes: int) -> None:
    """Stop the store under a living engine, and wait until all its processes found the next one."""
    pid = stop(settings)["pid"]

    def back() -> bool:
        now = status(settings)
        if not now or now["pid"] == pid or now["scanning"]:
            return False
        return len(now["clients"]) == processes + 1  # and this tool

    eventually(back, "the engine found no store again")


# ---------------------------------------------------------------- what ranks held


@dataclass(frozen=True)
class Chunk:
    """A chunk of which a rank had loaded its part: (rank, group, key), and its bytes' digest."""

    rank: int
    group: int
    key: str
    digest: str


class Ledger:
    """All digests so far: of each stored chunk the first, as later ones are not written."""

    def __init__(self, settings: Settings) -> None:
        self._folder = Path(settings["digest_dir"])
        self._read: dict[Path, int] = defaultdict(int)
        self.stored: dict[tuple[int, int, str], str] = {}

    def loads(self) -> list[Chunk]:
        """What was loaded since the last call."""
        found = []
        for path in sorted(self._folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
            lines = path.read_text().splitlines()
            for line in lines[self._read[path] :]:
                entry = json.loads(line)
                chunk = Chunk(entry["rank"], entry["group"], entry["key"], entry["digest"])
                if entry["event"] == "load":
                    found.append(chunk)
                else:
                    self.stored.setdefault((chunk.rank, chunk.group, chunk.key), chunk.digest)
            self._read[path] = len(lines)
        return found

    def wrong(self, loads: list[Chunk]) -> set[int]:
        """The groups of which anything else was loaded than the rank had stored."""
        return {c.group for c in loads if self.stored.get((c.rank, c.group, c.key)) != c.digest}

    def stored_chunks(self, groups: int, rank: int = 0) -> list[int]:
        """How many different chunks a rank had a part of in each group."""
        return counts([group for of, group, _ in self.stored if of == rank], groups)


def counts(groups: list[int], length: int) -> list[int]:
    """How often each number below `length` is in `groups`."""
    return [groups.count(group) for group in range(length)]


# ---------------------------------------------------------------- asking


@dataclass(frozen=True)
class Answer:
    """What an engine said, and where the tokens before it came from."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    hit: int
    """Tokens that were loaded."""
    disk: int
    """Of these, from disk."""
    loads: list[Chunk]

    def chunks(self, groups: int, rank: int = 0) -> list[int]:
        """How many chunks a rank loaded of each group."""
        return counts([chunk.group for chunk in self.loads if chunk.rank == rank], groups)


class Asker:
    """Asks engines, each time after their own caches are emptied."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.ledger = settings, Ledger(settings)
        self._last: dict[int, Mapping[str, int]] = {}
        """Of engine processes, by id: their counters after the last answer."""

    def ask(self, engine: Any, ids: list[int], tokens: int = 8) -> Answer:
        """Ask an engine in this process (`vllm.LLM`) or another (`Engine`)."""
        options: dict[str, Any] = {"max_tokens": tokens, "logprobs": BEST}
        self._reset(engine)
        if isinstance(engine, Engine):
            before = self._last.get(engine.pid, {})
            result = engine.generate([ids], timeout_s=SLOW_S, **options)
            self._last[engine.pid] = result["counters"]
        else:
            before = counters(engine)
            result = generate(engine, [ids], **options)
            drain(engine)
        stored_all(self.settings)
        (output,) = result["outputs"]
        assert output["finish_reason"] == "length"
        name = "kvfold_hit_tokens/"
        host, disk = (
            result["counters"][name + tier] - before.get(name + tier, 0)
            for tier in ("host", "disk")
        )
        assert output["cached_tokens"] == host + disk, "hits are kvfold's alone"
        logprobs = [dict(place) for place in output["logprobs"]]
        return Answer(output["tokens"], logprobs, host + disk, disk, self.ledger.loads())

    def _reset(self, engine: Any) -> None:
        """Empty the engine's own cache; that needs all blocks back that were being stored."""
        if isinstance(engine, Engine):
            reset = {"op": "reset_prefix_cache"}
            eventually(lambda: engine.do(reset, SLOW_S)["ok"], "blocks are held for ever")
        else:
            drain(engine)
            assert engine.reset_prefix_cache()


def gap(ours: list[dict[int, float]], theirs: list[dict[int, float]]) -> float:
    """The largest difference between two answers' logprobs; infinite if their best tokens differ.

    Of tokens that only one of them has among its best, nothing is known.
    """
    widest = 0.0
    for left, right in zip(ours, theirs, strict=True):
        if max(left, key=left.__getitem__) != max(right, key=right.__getitem__):
            return math.inf
        widest = max(widest, *(abs(left[token] - right[token]) for token in left.keys() & right))
    return widest


def geometry(llm: Any) -> Geometry:
    """What the scheduler's side of an engine in this process knows of its groups."""
    known: Geometry = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.geometry
    return known


def labels(llm: Any) -> list[str]:
    """The stored groups of an engine in this process, in the store's order."""
    return [group.label for group in geometry(llm).groups]
