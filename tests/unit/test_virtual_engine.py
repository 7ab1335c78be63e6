"""The virtual engine finds what it is there to find, and what it found stays fixed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", minversion="0.32")

from kvfold.testing.virtual_engine import Deadlines, StuckRequest, VirtualEngine
from kvfold.testing.virtual_pages import WrongBlock
from kvfold.testing.virtual_shapes import SHAPES, least_blocks, virtual_config
from kvfold.testing.virtual_store import VirtualStore
from kvfold.vllm.messages import StepOrders

MIXED = "full+window"
STATES = "full+states"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.ERROR)


def engine(
    name: str = MIXED, store: VirtualStore | None = None, blocks: int = 200, **options: Any
) -> VirtualEngine:
    shape = SHAPES[name]
    made = VirtualEngine(
        virtual_config(shape, blocks, **options),
        store or VirtualStore(shape.tp, 1000, Random(0)),
        Deadlines(),
    )
    made.serve()
    return made


def tokens(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(1000) for _ in range(count)]


def stored(name: str, prompts: list[list[int]]) -> VirtualStore:
    """A store that knows some prompts from another engine."""
    other = engine(name)
    for prompt in prompts:
        other.submit(prompt, 1)
    other.drain()
    other.check_idle()
    return other.store


@pytest.mark.parametrize("name", SHAPES)
def test_an_engine_without_kvfold_runs_as_vllm_does(name: str) -> None:
    """So whatever is found with kvfold is kvfold's, or comes of what kvfold makes vLLM do."""
    shape = SHAPES[name]
    blocks = least_blocks(shape, 180, 64)
    made = VirtualEngine(virtual_config(shape, blocks), VirtualStore(shape.tp, 0, Random(0)))
    random = Random(1)
    base = tokens(0, 150)
    for _ in range(20):
        made.submit(base[: random.randrange(1, 150)] + tokens(random.randrange(1000), 9), 12)
        for _ in range(3):
            made.step(random)
    made.drain()
    made.check_idle()


@pytest.mark.parametrize("name", [MIXED, STATES])
def test_a_chunk_of_another_prefix_is_found_when_it_is_read(name: str) -> None:
    one, other = tokens(1, 100), tokens(2, 100)
    store = stored(name, [one, other])
    keys = list(store.chunks)
    half = len(keys) // 2
    for a, b in zip(keys[:half], keys[half:], strict=False):
        if a[0] == b[0]:
            store.chunks[a], store.chunks[b] = store.chunks[b], store.chunks[a]
    warm = engine(name, store)
    warm.submit(one, 1)
    warm.submit(other, 1)
    with pytest.raises(WrongBlock):
        warm.drain()


def test_a_chunk_whose_tokens_are_in_another_order_is_found_when_it_is_read() -> None:
    prompt = tokens(1, 100)
    store = stored("full+2 windows", [prompt])
    for key, chunk in store.chunks.items():
        store.chunks[key] = [[page and page[::-1] for page in rank] for rank in chunk]
    warm = engine("full+2 windows", store)
    warm.submit(prompt, 1)
    with pytest.raises(WrongBlock):
        warm.drain()


def test_a_block_that_is_not_held_while_it_is_read_is_found() -> None:
    made = engine(blocks=least_blocks(SHAPES[MIXED], 120, 64))
    side = made.side
    assert side is not None
    side.holds.hold = lambda job, blocks: None  # type: ignore[method-assign]

    def slowly() -> None:
        for seed in range(12):
            made.submit(tokens(seed, 100), 1)
            for _ in range(8):
                made.step(Random(seed), pace=0.1)
        made.drain()

    with pytest.raises(WrongBlock, match="overwritten"):
        slowly()


def test_wrong_content_is_found_when_it_is_stored() -> None:
    made = engine()
    side = made.side
    assert side is not None
    order = side.storing._order

    def shifted(state: Any, group: Any, chunks: Any, blocks: Any) -> None:
        order(state, group, chunks, blocks[::-1].copy())

    side.storing._order = shifted  # type: ignore[method-assign]
    made.submit(tokens(1, 100), 1)
    with pytest.raises(WrongBlock, match="wrong content"):
        made.drain()


def test_a_load_into_foreign_blocks_is_found() -> None:
    prompt = tokens(1, 100)
    warm = engine(store=stored(MIXED, [prompt]))
    (worker,) = warm.workers
    begin = worker.begin

    def elsewhere(orders: StepOrders, *args: Any) -> None:
        for order in orders.loads:
            for part in order.parts:
                part.blocks[part.blocks >= 0] += 100
        begin(orders, *args)

    worker.begin = elsewhere  # type: ignore[method-assign]
    warm.submit(prompt, 1)
    with pytest.raises(WrongBlock, match="does not belong"):
        warm.drain()


def test_what_was_stored_before_a_reset_is_found_when_it_is_read() -> None:
    made = engine()
    side = made.side
    assert side is not None
    side.reset = lambda: None  # type: ignore[method-assign]
    made.submit(tokens(1, 100), 1)
    made.drain()
    assert made.reset(running=False, connector=True)
    made.submit(tokens(1, 100), 1)
    with pytest.raises(WrongBlock):
        made.drain()


def test_a_request_that_waits_for_its_lookup_too_long_is_found() -> None:
    made = engine()
    side = made.side
    assert side is not None
    side._lookup_wait_s = 10.0
    made.submit(tokens(1, 100), 1)

    def wait() -> None:
        for _ in range(100):
            made.step(Random(0), pace=0.0)

    with pytest.raises(StuckRequest):
        wait()


@pytest.mark.parametrize(
    "broken",
    [
        lambda made: setattr(made.side.holds, "reported", lambda job, workers: None),
        lambda made: setattr(made.side, "request_finished", lambda request, tables: None),
    ],
)
def test_what_is_left_at_the_end_is_found(broken: Callable[[VirtualEngine], None]) -> None:
    made = engine()
    broken(made)
    made.submit(tokens(1, 100), 1)

    def end() -> None:
        made.drain()
        made.check_idle()

    with pytest.raises(AssertionError):
        end()


def test_errors_that_kvfold_survives_are_found() -> None:
    made = engine()
    side = made.side
    assert side is not None

    def fails(*args: Any) -> None:
        raise ZeroDivisionError

    side.storing.store = fails  # type: ignore[method-assign]
    made.submit(tokens(1, 100), 1)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        made.drain()


# -- found by the machine --------------------------------------------------------------------------


def test_a_prompt_over_half_the_pool_goes_on_after_its_load_failed() -> None:
    """vLLM reserves blocks for a request whose load failed: a second load of it must fit beside."""
    prompt = tokens(1, 150)
    store = stored("window", [prompt])
    made = engine("window", store, blocks=least_blocks(SHAPES["window"], 160, 64))
    made.submit(prompt, 2)
    store.fail_reads = 1.0
    while made.side is not None and not made.store.told and made.store.lookups < 1:
        made.step()
    for _ in range(4):
        made.step()
    store.fail_reads = 0.0
    made.drain()
    made.check_idle()


@pytest.mark.parametrize("name", ["full+window", "full+2 windows", "deepseek v4"])
def test_loads_do_not_wait_for_each_others_blocks(name: str) -> None:
    """vLLM reserves too few blocks for a loaded request that has windows: two of them may both
    hold blocks that the other one needs."""
    prefix = tokens(1, 96)
    store = stored(name, [prefix + tokens(2, 2)])
    for spare in range(24):
        made = engine(name, store, blocks=least_blocks(SHAPES[name], 160, 64) + spare)
        for seed in range(4):
            made.submit(prefix + tokens(seed, 55), 2)
        made.drain()
        made.check_idle()


def test_a_draft_that_was_not_loaded_is_not_stored() -> None:
    prompt = tokens(1, 100)
    store = stored("full+window+draft", [prompt])
    for key in [key for key in store.chunks if key[0] == 2]:
        del store.chunks[key]
    made = engine("full+window+draft", store)
    made.submit(prompt, 30)
    made.drain()
    assert made.execution.draft_misses
    made.check_idle()
