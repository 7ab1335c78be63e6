"""Hits of models with many cache groups, against an oracle that goes through every token.

Includes groups that no CPU runs: MLA with a draft of another kind, DeepSeek-V4's five groups in
their real sizes, and token-sharded caches. What a hit loads is checked where it is read.
"""

from __future__ import annotations

import logging
from random import Random

import pytest

pytest.importorskip("vllm", minversion="0.32")

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.testing.virtual_engine import VirtualEngine
from kvfold.testing.virtual_pages import STATE
from kvfold.testing.virtual_plan import agreed
from kvfold.testing.virtual_shapes import (
    SHAPES,
    Shape,
    VirtualConfig,
    deepseek_v4,
    virtual_config,
)
from kvfold.testing.virtual_store import VirtualStore

REAL_V4 = Shape("deepseek v4, real", lambda heads: deepseek_v4(), layout="BLNHC")
EVERY = pytest.mark.parametrize("shape", [*SHAPES.values(), REAL_V4], ids=repr)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.ERROR)


class World:
    """Engines one after another over one store. Every run's reads are checked as it goes."""

    def __init__(self, shape: Shape, blocks_per_chunk: int = 1, step_tokens: int = 64) -> None:
        real = shape is REAL_V4
        self.config: VirtualConfig = virtual_config(
            shape,
            4000 if real else 400,
            max_step_tokens=2048 if real else step_tokens,
            max_model_tokens=16384 if real else 4096,
        )
        self.blocks_per_chunk = blocks_per_chunk
        self.store = VirtualStore(shape.tp, 1 << 20, Random(0))
        self.planned = agreed(self.config, blocks_per_chunk)
        self.period = self.planned.period_tokens
        self.restart()

    def restart(self) -> None:
        self.engine = VirtualEngine(self.config, self.store)
        self.engine.serve(self.blocks_per_chunk)

    def ask(self, prompt: list[int], output: int = 2) -> tuple[list[int], int, int]:
        """Run a request to its end; all its tokens, the engine's own hit and what was loaded."""
        name = self.engine.submit(prompt, output)
        run = self.engine.runs[name]
        self.engine.drain()
        self.engine.check_idle()
        local, loaded = self.engine.connector.accepted.get(name, (0, 0))
        return run.everything, local, loaded

    def keys(self, prompt: list[int]) -> list[list[bytes]]:
        """Per group, the keys of a prompt's chunks, found by looking at what it asks for."""
        side = self.engine.side
        assert side is not None
        self.engine.submit(prompt, 1)
        request = next(reversed(self.engine.scheduler.requests.values()))
        hashes = request.block_hashes
        per = self.period // self.config.hash_tokens
        found = []
        for namespace in side.namespaces:
            mask = int.from_bytes(namespace, "little")
            found.append(
                [
                    (int.from_bytes(value, "little") ^ mask).to_bytes(32, "little")
                    for value in hashes[per - 1 :: per]
                ]
            )
        self.engine.abort(request.request_id)
        self.engine.drain()
        return found

    def best(self, prompt: list[int]) -> int:
        """The longest hit that the store's chunks allow, token by token."""
        keys = self.keys(prompt)
        covered = []
        for number, group in enumerate(self.planned.plan.stored):
            positions = set()
            for i, key in enumerate(keys[number]):
                if (number, key) in self.store.chunks:
                    end = (i + 1) * self.period
                    width = group.blocks_per_chunk * group.tokens_per_block
                    positions |= set(range(end - min(width, self.period), end))
            covered.append(positions)
        # The engine recomputes such windows, and ignores hits that are no longer.
        replayed = max((s.window_tokens for s in self.engine.strands if s.replayed), default=0)
        for end in range((len(prompt) - 1) // self.period * self.period, 0, -self.period):
            if all(
                self._has(strand.number, keys, end)
                if strand.kind == STATE
                else set(range(strand.reads(end), end)) <= covered[strand.number]
                for strand in self.engine.strands[: len(covered)]
                if not strand.draft
            ):
                return end if end > replayed else 0
        return 0

    def _has(self, number: int, keys: list[list[bytes]], end: int) -> bool:
        return (number, keys[number][end // self.period - 1]) in self.store.chunks


def tokens(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(1000) for _ in range(count)]


def longest(world: World, prompt: list[int]) -> int:
    return (len(prompt) - 1) // world.period * world.period


@EVERY
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_prompt_is_found_again_by_another_engine(shape: Shape, blocks_per_chunk: int) -> None:
    world = World(shape, blocks_per_chunk)
    prompt = tokens(1, world.period * 5 + 3)
    said, _, loaded = world.ask(prompt)
    assert loaded == 0
    world.restart()
    expected = world.best(prompt)
    again, local, loaded = world.ask(prompt)
    assert again == said
    assert (local, loaded) == (0, expected)
    assert loaded == longest(world, prompt)


@EVERY
def test_a_prompt_of_whole_chunks_keeps_a_token_to_compute(shape: Shape) -> None:
    """The second time at the latest: states are only kept where the engine's own hits can end."""
    world = World(shape)
    prompt = tokens(2, world.period * 4)
    world.ask(prompt)
    for _ in range(2):
        world.restart()
        expected = world.best(prompt)
        _, _, loaded = world.ask(prompt)
        assert loaded == expected
    assert loaded == world.period * 3


@EVERY
def test_a_conversation_goes_on_in_another_engine(shape: Shape) -> None:
    """What was answered is part of the next prompt, and found as well."""
    world = World(shape)
    said, _, _ = world.ask(tokens(3, world.period * 2 + 5), output=world.period * 2)
    world.restart()
    prompt = said + tokens(4, 7)
    expected = world.best(prompt)
    again, _, loaded = world.ask(prompt, output=3)
    assert loaded == expected
    # With sparse retention the engine itself keeps no states of what is generated.
    assert loaded >= world.period * (2 if shape.retention_interval == 0 else 3)
    world.restart()
    assert world.ask(prompt, output=3)[0] == again


@EVERY
def test_a_shared_prefix_is_found_at_the_latest_the_third_time(shape: Shape) -> None:
    """Windows and states inside a prompt are stored once others are seen to share it."""
    world = World(shape)
    prefix = tokens(5, world.period * 4)
    for seed in (6, 7):
        world.ask(prefix + tokens(seed, world.period + 9))
        world.restart()
    prompt = prefix + tokens(8, world.period + 9)
    expected = world.best(prompt)
    _, _, loaded = world.ask(prompt)
    assert loaded == expected == world.period * 4


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape) for shape in (*SHAPES.values(), REAL_V4)],
    ids=repr,
)
def test_a_missing_chunk_shortens_the_hit_as_far_as_it_must(shape: Shape) -> None:
    world = World(shape)
    prompt = tokens(9, world.period * 6 + 1)
    world.ask(prompt)
    keys = list(world.store.chunks)
    for key in Random(0).sample(keys, min(len(keys), 12)):
        lost = world.store.chunks.pop(key)
        world.restart()
        expected = world.best(prompt)
        stored = dict(world.store.chunks)
        _, _, loaded = world.ask(prompt)
        assert loaded == expected
        world.store.chunks.clear()
        world.store.chunks.update(stored)
        world.store.chunks[key] = lost


@pytest.mark.parametrize("name", ["mla+draft", "full+window+draft"])
def test_a_draft_never_shortens_a_hit(name: str) -> None:
    world = World(SHAPES[name])
    drafts = {strand.number for strand in world.engine.strands if strand.draft}
    assert drafts
    prompt = tokens(10, world.period * 5 + 3)
    world.ask(prompt)
    stored = [key for key in world.store.chunks if key[0] in drafts]
    assert stored, "the draft's chunks are stored too"
    world.restart()
    world.ask(prompt)
    assert world.engine.execution.draft_misses == 0, "and loaded"
    for key in stored:
        world.store.chunks.pop(key, None)
    world.restart()
    _, _, loaded = world.ask(prompt)
    assert loaded == longest(world, prompt)
    assert world.engine.execution.draft_misses > 0


def test_deepseek_v4_stores_no_chunk_per_four_tokens() -> None:
    """Compressor states and windows cost a chunk per boundary at which a hit is likely."""
    world = World(REAL_V4)
    prompt = tokens(11, 256 * 32 + 5)
    world.ask(prompt)
    groups = world.planned.plan.stored
    assert [g.chunk_bytes // g.blocks_per_chunk for g in groups if g.tokens_per_block == 256] == [
        985_664
    ]
    count = [sum(key[0] == number for key in world.store.chunks) for number in range(len(groups))]
    by_span = {(g.tokens_per_block, n) for g, n in zip(groups, count, strict=True)}
    assert (256, 32) in by_span
    assert all(chunks <= 32 for span, chunks in by_span if span < 256)
    stored = sum(n * g.chunk_bytes for n, g in zip(count, groups, strict=True))
    whole = next(
        n * g.chunk_bytes for n, g in zip(count, groups, strict=True) if g.tokens_per_block == 256
    )
    assert stored < 2.5 * whole, "windows take no more than what stores every token"


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(list(SHAPES)),
    blocks_per_chunk=st.sampled_from([1, 2]),
    step_tokens=st.sampled_from([32, 64]),
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 90)), min_size=1, max_size=5),
    lost=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_hits_are_as_long_as_the_store_allows(
    name: str,
    blocks_per_chunk: int,
    step_tokens: int,
    lengths: list[tuple[int, int]],
    lost: int,
    seed: int,
) -> None:
    """Prompts that share prefixes, each in an engine of its own; some chunks are lost between."""
    world = World(SHAPES[name], blocks_per_chunk, step_tokens)
    before = tokens(seed, 160)
    for shared, fresh in lengths:
        prompt = before[:shared] + tokens(seed + shared + 7 * fresh, fresh)
        expected = world.best(prompt)
        said, local, loaded = world.ask(prompt)
        assert (local, loaded) == (0, expected)
        before = said
        world.store.evict(lost)
        world.restart()
