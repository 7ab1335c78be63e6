"""What the kill tests share: prompts with known answers, moments to kill at, what must hold after.

A *phase* is what an engine does for a step: storing the chunks of prompts that nobody has seen, or
loading them. It is over in a fraction of a second, so a killer waits until the store sees the phase
begin, and then for a random part of the time that such a phase took when it was measured.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvfold.errors import StoreGone
from kvfold.store.client import StoreClient
from kvfold.store.launch import running_stores
from kvfold.testing import leaks
from kvfold.testing.checkpoints import prompt
from kvfold.testing.engines import Engine, generate, local_engine

Phase = Literal["storing", "loading"]
Status = dict[str, Any]
Batch = list[list[int]]

BLOCK = 32
CHUNKS = 24
"""Chunks of a prompt."""
PROMPTS = 6
"""Prompts of a batch, answered in one step."""
ALL_CHUNKS = PROMPTS * CHUNKS
ENGINE_ARGS = {"block_size": BLOCK, "max_num_batched_tokens": BLOCK, "max_num_seqs": 1}
"""One chunk a step, so that storing a batch takes long. And always the same one: the last bits of
what a step computes depend on how many tokens it computes, and a chunk that is computed again must
have the very bytes that it had before.
"""
ENGINE_ENV = {"OMP_NUM_THREADS": "1"}
"""Threads of so small a model would mostly wait for one another."""
MODEL = {"num_heads": 2, "layers": 16, "head_dim": 128, "hidden": 64, "intermediate": 64}
"""Much cache for little arithmetic: 512 KiB a chunk and KV head."""
TOKENS = 4
SHARE = 0.8
"""Of a phase's time as measured: the next may be faster, and a kill after it would prove little."""
SLOW_S = 240.0
"""For anything that ends by itself; only a hang takes as long."""


def batch(number: int) -> Batch:
    """The prompts of a batch; each is CHUNKS chunks and a short rest."""
    return [prompt(CHUNKS * BLOCK + 9, seed=1000 * number + i) for i in range(PROMPTS)]


def answers(model: Path, batches: Sequence[Batch]) -> list[list[list[int]]]:
    """What an engine without kvfold says to each batch, as token ids."""
    with local_engine(model, engine_args={"block_size": BLOCK}) as llm:
        return [tokens_of(generate(llm, ids, max_tokens=TOKENS)) for ids in batches]


def tokens_of(result: Mapping[str, Any]) -> list[list[int]]:
    assert all(output["finish_reason"] == "length" for output in result["outputs"])
    return [output["tokens"] for output in result["outputs"]]


def eventually(holds: Callable[[], Any], what: str, within_s: float = SLOW_S) -> Any:
    """Wait until `holds()` is true, and return it; fail if it does not become so."""
    until_s = time.monotonic() + within_s
    while not (result := holds()):
        assert time.monotonic() < until_s, what
        time.sleep(0.02)
    return result


class Store:
    """The store of a runtime folder as a tool sees it, whichever process it is now."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._client: StoreClient | None = None

    def status(self) -> Status | None:
        """Its figures, or None while there is no store."""
        try:
            if self._client is None:
                folders = running_stores(None, str(self._runtime))
                if not folders:
                    return None
                (folder,) = folders
                self._client = StoreClient.connect_tool(folder)
            return self._client.status()
        except StoreGone:
            self.close()
            return None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def settled(self, clients: int, what: str) -> Status:
        """Wait until the store has so many clients and nothing to do, holds nothing for anybody,
        and has given back every slot that it lent.
        """
        last: list[Status | None] = [None]

        def settled() -> Status | None:
            last[0] = self.status()
            if last[0] is None or len(last[0]["clients"]) != clients + 1:  # and this tool
                return None
            return None if unsettled(last[0]) else last[0]

        try:
            status: Status = eventually(settled, what)
        except AssertionError:
            raise AssertionError(f"{what}: {json.dumps(last[0])}") from None
        return status

    def flush(self) -> None:
        """Have everything written to disk, if there is one."""
        assert self.status() is not None
        assert self._client is not None
        self._client.flush(SLOW_S)

    def stop(self) -> None:
        """Flush and stop the store."""
        self.flush()
        assert self._client is not None
        self._client.stop(True, SLOW_S)
        self.close()


def unsettled(status: Status) -> dict[str, Any]:
    """What a store still holds, lends or does: empty when it is at rest."""
    held = {
        name: status[name]
        for name in ("tickets_open", "jobs_open", "quarantined_slots", "departed_holders")
    }
    held |= {"scanning": status["scanning"], "pinned": status["host"]["pinned_chunks"]}
    for row in status["classes"]:
        held |= {"windows": row["windows"], "writing": row["writing"]}
    if status["disk"] is not None:
        held |= {name: status["disk"][name] for name in ("queued_reads", "queued_writes")}
    return {name: value for name, value in held.items() if value}


def progress(status: Status, phase: Phase) -> tuple[int, int]:
    """(chunks so far, tickets or jobs that are open) of a store."""
    if phase == "loading":
        return status["announced_chunks"], status["tickets_open"]
    return status["host"]["stored_chunks"], status["jobs_open"]


@dataclass
class Tally:
    """What a test's kills met."""

    kills: int = 0
    inside: int = 0
    """Kills while chunks were on their way, by the store's figures just before."""
    hits: list[int] = field(default_factory=list)
    """Chunks that the next ask after each kill loaded."""

    def report(self) -> str:
        """The figures. Fails if too few kills met anything."""
        assert 3 * self.inside >= self.kills
        return f"{self.kills} kills, {self.inside} of them in the middle; chunks hit {self.hits}"


class Killer:
    """Draws moments within phases and kills in them."""

    def __init__(self, store: Store, seed: int) -> None:
        print(f"moments are drawn with seed {seed}")
        self.store, self.tally, self.random = store, Tally(), random.Random(seed)
        self._storing_s = SLOW_S

    def measure(self, engine: User, batches: Sequence[Batch]) -> None:
        """See how long storing a batch takes; nobody has asked for these before."""
        self._storing_s = min(self._time(engine, ids, "storing") for ids in batches)

    def kill(
        self, engine: User, ids: Batch, phase: Phase, strike: Callable[[Status], None]
    ) -> None:
        """Start answering `ids`, and `strike` in the middle of the phase."""
        length_s = self._storing_s
        if phase == "loading":
            engine.fill(ids)
            length_s = self._time(engine, ids, "loading")
        self.store.settled(engine.clients, "something is still held")
        engine.reset()
        first, begun_s = self._begin(engine, ids, phase)
        moment_s = begun_s + self.random.uniform(0, SHARE * length_s)
        time.sleep(max(0.0, moment_s - time.monotonic()))
        status = self.store.status()
        assert status is not None
        strike(status)
        chunks, running = progress(status, phase)
        inside = running > 0 or chunks - first < ALL_CHUNKS
        self.tally.kills += 1
        self.tally.inside += inside
        print(
            f"kill {self.tally.kills}, {moment_s - begun_s:.3f} s after {phase} began: "
            f"{chunks - first} of {ALL_CHUNKS} chunks done, {running} tickets or jobs open"
        )
        if phase == "storing" and not inside:  # the machine is faster than when we measured
            self._storing_s *= 0.7

    def _time(self, engine: User, ids: Batch, phase: Phase) -> float:
        """Answer `ids`; how long the phase took."""
        first, begun_s = self._begin(engine, ids, phase)
        seen, last_s = (first, 1), begun_s
        # Chunks that find no room are not stored: then nothing happens any more.
        while (seen[0] - first < ALL_CHUNKS or seen[1]) and time.monotonic() - last_s < 2:
            status = self.store.status()
            assert status is not None
            if (now := progress(status, phase)) != seen:
                seen, last_s = now, time.monotonic()
        engine.finish()
        return last_s - begun_s

    def _begin(self, engine: User, ids: Batch, phase: Phase) -> tuple[int, float]:
        """Send a step and wait until its phase begins; the chunks before it, and the time."""
        before = self.store.status()
        assert before is not None
        first, _ = progress(before, phase)
        engine.send(ids)
        until_s = time.monotonic() + SLOW_S
        while True:
            status = self.store.status()
            assert status is not None, "the store is gone"
            chunks, running = progress(status, phase)
            if chunks > first or running:
                return first, time.monotonic()
            assert time.monotonic() < until_s, f"{phase} never began"
            time.sleep(0.001)


class User:
    """Asks an engine, and knows how many chunks each answer loaded."""

    def __init__(self, engine: Engine, store: Store, clients: int) -> None:
        self.engine, self.store, self.clients = engine, store, clients
        self._hits = 0

    def send(self, ids: Batch) -> None:
        self.engine.send({"op": "generate", "prompts": ids, "max_tokens": TOKENS})

    def finish(self) -> tuple[list[list[int]], int]:
        """The answer to what was sent: its tokens, and the chunks that it loaded."""
        result = self.engine.answer(SLOW_S)
        hits = result["counters"].get("external_prefix_cache_hits", 0)
        before, self._hits = self._hits, hits
        return tokens_of(result), (hits - before) // BLOCK

    def ask(self, ids: Batch) -> tuple[list[list[int]], int]:
        """Ask anew: the engine's own cache is emptied first."""
        self.reset()
        self.send(ids)
        return self.finish()

    def reset(self) -> None:
        """Empty the engine's own cache; that needs every store's blocks back."""

        def reset() -> bool:
            if self.engine.do({"op": "reset_prefix_cache"}, SLOW_S)["ok"]:
                return True
            # An engine within its process takes results only when it is asked something.
            self.engine.generate([prompt(8)], max_tokens=1, timeout_s=SLOW_S)
            return False

        eventually(reset, "blocks are held for ever")

    def fill(self, ids: Batch) -> None:
        """Ask until all chunks are stored, on disk too, and settled."""
        for _ in range(5):
            self.store.settled(self.clients, "storing never ended")
            self.store.flush()
            if self.ask(ids)[1] == ALL_CHUNKS:
                self.store.settled(self.clients, "loading never ended")
                self.reset()
                return
        raise AssertionError("a batch cannot be stored")


# ---------------------------------------------------------------- processes and memory


def arenas(pid: int) -> set[str]:
    """The stores' arenas that a process maps or holds open."""
    return {line for line in leaks.traces() if line.endswith(f" of process {pid}")}


def wait_gone(pid: int) -> None:
    """Wait until a process has exited (a zombie holds nothing)."""

    def gone() -> bool:
        with suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    eventually(gone, f"process {pid} lives")


@contextmanager
def engines_own_memory_removed(group: int) -> Iterator[None]:
    """Remove the shared memory that the processes of a group, killed within, leave behind.

    It is vLLM's own (psm_*): a quarter of a gigabyte for each killed engine.
    """
    found: set[str] = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group:
                for line in (entry / "maps").read_text().splitlines():
                    if "/dev/shm/psm_" in line:
                        found.add(line.split(maxsplit=5)[5])
    yield
    for path in found:
        Path(path).unlink(missing_ok=True)


# ---------------------------------------------------------------- bytes


def check_bytes(folder: Path) -> str:
    """Compare what every rank held of each chunk when it was stored and when it was loaded.

    Fails if a rank loaded anything but what a rank of its number had stored under that key, or if
    one key was stored with different bytes. Returns the figures.
    """
    stored: dict[tuple[int, str], set[str]] = defaultdict(set)
    loaded: dict[tuple[int, str], set[str]] = defaultdict(set)
    lines = {"store": 0, "load": 0}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):  # its writer was killed within it
                continue
            entry = json.loads(line)
            lines[entry["event"]] += 1
            into = stored if entry["event"] == "store" else loaded
            into[entry["rank"], entry["key"]].add(entry["digest"])
    wrong = [at for at, digests in loaded.items() if not digests <= stored[at]]
    assert not wrong, f"wrong bytes were loaded: {wrong}"
    unequal = [at for at, digests in stored.items() if len(digests) != 1]
    assert not unequal, f"{len(unequal)} of {len(stored)} chunks have several contents"
    assert lines["load"] > 0
    return (
        f"{lines['load']} chunks loaded and verified ({len(loaded)} different ones), "
        f"{lines['store']} chunks stored ({len(stored)} different ones)"
    )
