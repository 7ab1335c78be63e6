"""How long store jobs hold the blocks that they are copied from, in vLLM's real block pool."""

from __future__ import annotations

import pytest
from scheduler_bench import DRAFT, FULL, WINDOW, Bench, hybrid, index_of
from small_specs import group

from kvfold.mesh import Mesh


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def mixed():
    return hybrid()


def test_all_workers_must_report_across_steps():
    bench = Bench([group(0)], mesh=Mesh(tp=2))
    request = bench.compute(bench.arrive("a", 32))
    (order,) = bench.step((request, 32)).stores
    bench.done(order)
    assert bench.side.holds.jobs == 1
    bench.done(order)
    assert bench.side.holds.jobs == 0
    request = bench.compute(bench.arrive("b", 32, salt="b"))
    (order,) = bench.step((request, 32)).stores
    bench.done(order, workers=2)
    assert bench.side.holds.jobs == 0


def test_running_copies_delay_preemption_only_shortly(bench):
    assert not bench.side.holds.free_soon()
    request = bench.compute(bench.arrive("a", 48))
    (first,) = bench.step((request, 16)).stores
    bench.now += 0.9
    (second,) = bench.step((request, 16)).stores
    assert bench.side.holds.free_soon()
    bench.now += 0.2
    assert not bench.side.holds.free_soon(), "the oldest waits for too long"
    bench.done(first)
    assert bench.side.holds.free_soon()
    bench.done(second)
    assert not bench.side.holds.free_soon()


def test_a_block_of_two_jobs_is_free_after_both(mixed):
    request = mixed.compute(mixed.arrive("a", 64))
    orders = mixed.step((request, 64))
    full, draft = index_of(orders, FULL), index_of(orders, DRAFT)
    mixed.finish(request)
    assert mixed.side.holds.blocks == 2 + 4 + 4
    mixed.done(full)
    assert mixed.used == 2 + 4
    mixed.done(draft, index_of(orders, WINDOW))
    assert mixed.used == 0


def test_held_blocks_are_not_given_to_others(bench):
    request = bench.compute(bench.arrive("a", 64))
    (order,) = bench.step((request, 64)).stores
    bench.finish(request)
    held = set(order.blocks.ravel().tolist())
    taken = bench.pool.get_new_blocks(bench.pool.get_num_free_blocks())
    assert not held & {block.block_id for block in taken}
    bench.done(order)
    assert {block.block_id for block in bench.pool.get_new_blocks(4)} == held
