"""The demo's first part: the same questions without kvfold, cold, and warm from either tier."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.testing.demo_measure import PATIENT, Difference, DiskLimit, Stores, difference, serves
from kvfold.testing.demo_show import Progress
from kvfold.testing.demo_text import ANSWER_TOKENS, SPAN, Prompts
from kvfold.testing.engines import Engine

_SETTLE_S = 1.0
"""A new store touches its memory in the background meanwhile, as it would between requests."""

CLIENTS = 2
"""The engine's scheduler and its worker."""

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Asked:
    """One question and its answer."""

    question: int
    ttft_s: float
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    """Tokens that were not computed, by the tier that had them; vLLM's own counters."""
    external_hit_tokens: int
    """Tokens that a connector loaded; a counter of its own in vLLM."""
    output: Mapping[str, Any]

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - sum(self.hit_tokens.values())


@dataclass
class Pass:
    """Questions asked under one condition."""

    name: str
    title: str
    asked: list[Asked] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Median time to first token."""
        return statistics.median(asked.ttft_s for asked in self.asked)

    def differences(self, expected: Pass) -> list[Difference]:
        """Where answers differ from those of another pass."""
        wanted = {asked.question: asked.output for asked in expected.asked}
        found = [difference(a.question, wanted[a.question], a.output) for a in self.asked]
        return [one for one in found if one is not None]


@dataclass
class Asking:
    """Everything the first part found."""

    prompts: Prompts
    cold: Pass
    own: Pass
    first: Pass
    again: Pass
    host: Pass
    disk: Pass
    stored: dict[str, Any] = field(default_factory=dict)
    """The store's status after the first question, everything written to disk."""
    read_limits: list[float] = field(default_factory=list)
    """Bytes per second, one measurement beside each question from disk."""

    @property
    def passes(self) -> list[Pass]:
        return [self.cold, self.own, self.first, self.again, self.host, self.disk]


def new_asking(prompts: Prompts) -> Asking:
    """Return the passes, nothing asked yet."""
    return Asking(
        prompts,
        cold=Pass("cold", "without kvfold, nothing cached"),
        own=Pass("own", "without kvfold, engine's own cache"),
        first=Pass("first", "kvfold: computes and stores"),
        again=Pass("again", "kvfold: same engine, own cache emptied"),
        host=Pass("host", "kvfold: engine restarted"),
        disk=Pass("disk", "kvfold: engine and store restarted"),
    )


class Room:
    """One engine after the other, on the same model, store settings and questions."""

    def __init__(self, model: Path, prompts: Prompts, work: Path, progress: Progress) -> None:
        self.model, self.prompts, self.work, self.progress = model, prompts, work, progress
        self.stores = Stores(work / "run")
        self.connector = {
            "host": "512MiB",
            "disk": "1GiB",
            "disk_path": str(work / "disk"),
            "runtime_dir": str(self.stores.runtime),
            **PATIENT,
        }
        self._counters: Mapping[str, int] = {}

    @contextmanager
    def engine(self, label: str, connector: Mapping[str, Any] | None = None) -> Iterator[Engine]:
        """Start an engine and let it answer one unrelated request."""
        with self.progress.step(label):
            engine = Engine(
                self.model,
                log=self.work / "engine.log",
                connector=connector,
                engine_args={"block_size": SPAN},
                start_timeout_s=300,
            )
        with engine:
            self.warm_up(engine)
            yield engine
            with self.progress.step("engine stopped"):
                engine.close()

    def warm_up(self, engine: Engine) -> None:
        """Ask something unrelated."""
        result = engine.generate([self.prompts.warm_up], max_tokens=8, logprobs=2)
        self._counters = result["counters"]

    def empty_cache(self, engine: Engine) -> None:
        """Empty the engine's own prefix cache, once its stores let go of its blocks."""
        deadline = time.monotonic() + 60
        while not engine.do({"op": "reset_prefix_cache"})["ok"]:
            if time.monotonic() > deadline:
                raise KvfoldError("the engine's blocks are still in use after 60 s")
            time.sleep(0.1)
            self.warm_up(engine)

    def ask(self, engine: Engine, into: Pass, question: int) -> Asked:
        """Ask one question and count what it hit."""
        ids = self.prompts.prompts[question]
        result = engine.generate([ids], max_tokens=ANSWER_TOKENS, logprobs=2, timeout_s=300)
        before, after = self._counters, result["counters"]
        self._counters = after

        def grown(name: str) -> int:
            return int(after.get(name, 0) - before.get(name, 0))

        asked = Asked(
            question=question,
            ttft_s=result["outputs"][0]["ttft_s"],
            prompt_tokens=len(ids),
            hit_tokens={tier: grown(f"prompt_tokens_cached_by_source/{tier}") for tier in TIERS},
            external_hit_tokens=grown("external_prefix_cache_hits"),
            output=result["outputs"][0],
        )
        into.asked.append(asked)
        hits = ", ".join(f"{n} from {tier}" for tier, n in asked.hit_tokens.items() if n)
        self.progress.note(
            f"question {question + 1}: first token after {1e3 * asked.ttft_s:,.0f} ms, "
            f"{asked.computed_tokens} tokens computed" + (f", {hits}" if hits else "")
        )
        return asked


def run_asking(model: Path, prompts: Prompts, work: Path, progress: Progress) -> Asking:
    """Ask all questions in all four conditions. Everything is below `work`; stores are stopped."""
    room = Room(model, prompts, work, progress)
    found = new_asking(prompts)
    try:
        _without(room, found)
        _cold(room, found)
        _from_host(room, found)
        _from_disk(room, found)
    finally:
        room.stores.stop(drain=False)
    return found


def _without(room: Room, found: Asking) -> None:
    with room.engine("engine without kvfold") as engine:
        for question in _all(room):
            room.empty_cache(engine)
            room.ask(engine, found.cold, question)
            room.ask(engine, found.own, question)


def _cold(room: Room, found: Asking) -> None:
    with room.engine("engine with kvfold, empty store", room.connector) as engine:
        room.ask(engine, found.first, 0)
        chunks = room.prompts.hit_tokens // SPAN
        room.stores.wait(
            f"{chunks} chunks are on disk", lambda status: status["disk"]["chunks"] >= chunks
        )
        found.stored = room.stores.status()
        for question in _all(room)[1:]:
            room.empty_cache(engine)
            room.ask(engine, found.again, question)


def _from_host(room: Room, found: Asking) -> None:
    with room.engine("engine restarted", room.connector) as engine:
        for question in _all(room):
            if question:
                room.empty_cache(engine)
            room.ask(engine, found.host, question)


def _from_disk(room: Room, found: Asking) -> None:
    """Every question finds a store that was just started, so that nothing is in host memory."""
    stored = found.stored["disk"]
    limit = DiskLimit(
        room.work / "limit", stored["payload_bytes"], stored["payload_bytes"] // stored["chunks"]
    )
    room.stores.stop()
    try:
        with room.engine("engine and store restarted", room.connector) as engine:
            last = None
            for question in _all(room):
                if question:
                    last = room.stores.stop()
                    room.empty_cache(engine)
                room.stores.wait("the engine has a new store", serves(CLIENTS, last))
                time.sleep(_SETTLE_S)
                room.ask(engine, found.disk, question)
                found.read_limits.append(limit.measure())
    finally:
        limit.close()


def _all(room: Room) -> Sequence[int]:
    return range(len(room.prompts.questions))
