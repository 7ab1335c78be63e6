"""The scheduler side in any order of events, inside vLLM's own scheduler, against virtual pages.

Requests arrive, share prefixes, are preempted, finish and are aborted; chunks are evicted or cannot
be read; the store is slow, dies and comes back, with or without its disk; the cache is reset; time
passes; the engine is restarted. Whatever attention reads, a store copies or a load overwrites is
checked by the virtual engine in every step (see `kvfold.testing.virtual_pages`).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from random import Random

import pytest

pytest.importorskip("vllm", minversion="0.32")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvfold.testing.virtual_engine import Deadlines, VirtualEngine
from kvfold.testing.virtual_shapes import SHAPES, least_blocks, virtual_config
from kvfold.testing.virtual_store import VirtualStore

FULL = bool(os.environ.get("KVFOLD_TEST_FULL"))
EXAMPLES = 40_000 if FULL else int(os.environ.get("EX", "2000"))
STEPS = 25
MAX_PROMPT, MAX_OUTPUT = 144, 16
seeds = st.integers(0, 2**32 - 1)
seen: Counter[str] = Counter()
"""Loaded chunks by shape: a machine in which nothing is ever loaded proves nothing."""


class SchedulerMachine(RuleBasedStateMachine):
    """One engine at a time, and the store that outlives it."""

    @initialize(
        shape=st.sampled_from(list(SHAPES)),
        spare_blocks=st.sampled_from([0, 0, 3, 8, 25, 120]),
        step_tokens=st.sampled_from([16, 32, 64]),
        blocks_per_chunk=st.sampled_from([1, 1, 2]),
        capacity=st.sampled_from([200, 200, 20, 3, 0]),
        seed=seeds,
    )
    def begin(
        self,
        shape: str,
        spare_blocks: int,
        step_tokens: int,
        blocks_per_chunk: int,
        capacity: int,
        seed: int,
    ) -> None:
        logging.getLogger("vllm").setLevel(logging.ERROR)
        self.shape = SHAPES[shape]
        blocks = least_blocks(self.shape, MAX_PROMPT + MAX_OUTPUT, step_tokens) + spare_blocks
        self.config = virtual_config(
            self.shape, blocks, max_step_tokens=step_tokens, max_requests=6
        )
        self.blocks_per_chunk = blocks_per_chunk
        self.store = VirtualStore(self.shape.tp, capacity, Random(seed))
        self.random = Random(seed)
        self.told: list[list[int]] = [self._tokens(MAX_PROMPT) for _ in range(2)]
        self._start()

    def _start(self) -> None:
        self.engine = VirtualEngine(self.config, self.store, Deadlines())
        self.side = self.engine.serve(self.blocks_per_chunk)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(count)]

    # -- requests --------------------------------------------------------------------------------

    @rule(
        told=st.integers(0, 30),
        shared=st.sampled_from([MAX_PROMPT, 96, 64, 33, 16, 7, 0]),
        fresh=st.integers(0, 40),
        output=st.integers(1, MAX_OUTPUT),
        salt=st.sampled_from([None, None, None, "salt"]),
        skip=st.sampled_from([False, False, False, True]),
    )
    def arrive(
        self, told: int, shared: int, fresh: int, output: int, salt: str | None, skip: bool
    ) -> None:
        """A prompt that begins as another one did, maybe with what was answered to it."""
        begin = self.told[told % len(self.told)][:shared]
        prompt = (begin + self._tokens(fresh))[:MAX_PROMPT] or [1]
        name = self.engine.submit(prompt, output, salt=salt, skip_reading=skip)
        self.told.append(self.engine.runs[name].everything)

    @rule(requests=st.sampled_from([4, 3, 2, 1, 6]), seed=seeds)
    def crowd(self, requests: int, seed: int) -> None:
        """Several requests one after another, with steps between."""
        random = Random(seed)
        for _ in range(requests):
            self.arrive(
                random.randrange(31),
                random.randrange(MAX_PROMPT + 1),
                random.randrange(41),
                random.randrange(1, MAX_OUTPUT + 1),
                random.choice((None, None, None, "salt")),
                random.random() < 0.1,
            )
            pace = random.choice((1.0, 1.0, 0.5, 0.0))
            for _ in range(random.randrange(12)):
                self.engine.step(random, pace=pace)

    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        if names := self.engine.unfinished():
            self.engine.abort(names[which % len(names)])

    # -- time ------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 12), seed=seeds, pace=st.sampled_from([1.0, 0.5, 0.0]))
    def step(self, count: int, seed: int, pace: float) -> None:
        random = Random(seed)
        for _ in range(count):
            self.engine.step(random, pace=pace)

    @rule(count=st.integers(1, 20))
    def step_swiftly(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(seconds=st.sampled_from([0.01, 0.03, 0.6, 6.0, 11.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.engine.pass_time(seconds)

    # -- what goes wrong -------------------------------------------------------------------------

    @rule(count=st.sampled_from([1, 3, 10, 30]), likely=st.sampled_from([None, 0.0, 0.1, 0.5]))
    def lose_chunks(self, count: int, likely: float | None) -> None:
        """Some are evicted, or, from now on, `likely` cannot be read."""
        if likely is None:
            self.store.evict(count)
        else:
            self.store.fail_reads = likely

    @precondition(lambda self: self.engine.client is not None)
    @rule(sure=st.sampled_from([False, False, True]))
    def lose_store(self, sure: bool) -> None:
        if sure:
            self.engine.lose_store()

    @precondition(lambda self: self.engine.client is None)
    @rule(keep=st.booleans())
    def find_store(self, keep: bool) -> None:
        self.engine.find_store(keep=keep)

    @rule(running=st.booleans(), connector=st.sampled_from([False, False, True]))
    def reset(self, running: bool, connector: bool) -> None:
        """`connector`: as after an update of the weights, everything computed before is wrong."""
        if not running or self.engine.can_reset_running():
            self.engine.reset(running=running, connector=connector)

    @rule()
    def restart_engine(self) -> None:
        """The engine is killed; its store gives up what it held for it."""
        now_s, client = self.engine.now_s, self.engine.client
        self.engine.close()
        self._start()
        self.engine.now_s = now_s
        if client is None:
            self.engine.lose_store()

    def teardown(self) -> None:
        """Whatever happened: once nothing goes wrong any more, everything ends."""
        if not hasattr(self, "engine") or self.engine.broken:
            return
        self.store.fail_reads = 0.0
        if self.engine.client is None:
            self.engine.find_store(keep=True)
        self.engine.drain()
        self.engine.check_idle()
        seen[self.shape.name] += self.store.loaded


SchedulerMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(3 * 3600 if FULL else 1800)
class TestSchedulerMachine(SchedulerMachine.TestCase):
    """The machine as a test."""


def test_the_machine_loaded_something() -> None:
    """How much each shape gets is up to chance; that it is never wrong counts only for loads."""
    if not seen:
        pytest.skip("the machine did not run here")
    assert sum(seen.values()) > 500, seen
    assert sum(seen[name] > 0 for name in SHAPES) > len(SHAPES) / 2, seen
