"""The scheduler's side against vLLM's real block pool: offers, orders, holds and invalidation."""

from __future__ import annotations

import hashlib
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from kvfold import identity
from kvfold.errors import StoreGone
from kvfold.vllm.messages import NO_BLOCK, LoadFailure, StepResults
from kvfold.vllm.requests import Geometry
from kvfold.vllm.scheduler import SchedulerSide

SPAN, DIGEST = 16, bytes(range(32))


class Store:
    """A client that knows some keys, by tier."""

    def __init__(self):
        self.store_id, self.tiers, self.tickets, self.fail, self.delay_s = "s", {}, [], False, 0.0

    def lookup(self, keys, timeout_s):
        time.sleep(self.delay_s)
        if self.fail:
            raise StoreGone("gone")
        return bytes(self.tiers.get(keys[i : i + 32], 0) for i in range(0, len(keys), 32))

    def open_ticket(self, *args):
        self.tickets.append(args)


class Bench:
    """One scheduler side with its pool; `request` and `step` stand for the engine."""

    def __init__(self, num_blocks=200, bpc=1, world=1, max_step_tokens=2048, **settings):
        self.store, self.now = Store(), 100.0
        self.geometry = Geometry(SPAN, SPAN, bpc, 32, world, num_blocks, max_step_tokens)
        options = {"lookup_wait_s": 0.02, "audit_chunks": 2, "audit_every": 0} | settings
        self.side = SchedulerSide(
            self.geometry, DIGEST, lambda: (self.store, 1), clock=lambda: self.now, **options
        )
        self.pool = self.side.holds.pool = BlockPool(num_blocks, True, SPAN)
        self.tables = {}

    def close(self):
        self.side.close()

    def request(self, name, tokens, salt="", blocks=True):
        hashes = [hashlib.sha256(f"{salt}{i}".encode()).digest() for i in range(tokens // SPAN)]
        request = SimpleNamespace(
            request_id=name, block_hashes=hashes, num_tokens=tokens, num_prompt_tokens=tokens,
            num_computed_tokens=0, skip_reading_prefix_cache=False,
        )  # fmt: skip
        if blocks:
            self.tables[name] = self.pool.get_new_blocks(-(-tokens // SPAN))
        return request

    def ids(self, name):
        return [b.block_id for b in self.tables[name]]

    def step(self, scheduled):
        output = SimpleNamespace(
            num_scheduled_tokens={r.request_id: n for r, n in scheduled},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (self.ids(name),)),
        )
        orders = self.side.build_orders(output)
        for r, n in scheduled:
            r.num_computed_tokens += n
        return orders

    def key(self, request, chunk, namespace=None):
        bpc = self.geometry.blocks_per_chunk
        block_hash = request.block_hashes[(chunk + 1) * bpc - 1]
        return identity.chunk_keys(namespace or self.side.namespace, block_hash, 32)

    def know(self, request, chunks, tier=2):
        for c in chunks:
            self.store.tiers[self.key(request, c)] = tier

    def offer(self, request, local=0):
        """Ask until there is an answer, as the engine does from step to step."""
        deadline = time.monotonic() + 5
        while (tokens := self.side.offer(request, local)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return tokens

    def arrive(self, name, tokens, know=0, **kw):
        request = self.request(name, tokens, **kw)
        self.know(request, range(know))
        self.side.on_new_request(request)
        return request


@pytest.fixture
def bench():
    b = Bench()
    yield b
    b.close()


def used(pool):
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def test_the_leading_chunks_are_offered_and_one_token_stays(bench):
    request = bench.request("a", 64)
    bench.know(request, [0, 1, 3])
    bench.side.on_new_request(request)
    assert bench.offer(request) == 2 * SPAN
    full = bench.arrive("b", 64, know=4)
    assert bench.offer(full) == 3 * SPAN, "a prompt of whole chunks keeps its last chunk to compute"
    assert bench.offer(full, local=2 * SPAN) == SPAN
    assert bench.offer(full, local=3 * SPAN) == 0


def test_a_late_lookup_asks_again_then_gives_up(bench):
    bench.store.delay_s = 0.3
    request = bench.arrive("a", 64, know=4)
    assert bench.side.offer(request, 0) is None
    bench.now += 0.019
    assert bench.side.offer(request, 0) is None
    bench.now += 0.002
    assert bench.side.offer(request, 0) == 0
    assert bench.side.counters.lookups_late == 1


def test_a_dead_store_is_a_miss(bench):
    bench.store.fail = True
    assert bench.offer(bench.arrive("a", 64)) == 0


def test_a_request_that_must_not_read_is_not_looked_up(bench):
    request = bench.request("a", 64)
    request.skip_reading_prefix_cache = True
    bench.side.on_new_request(request)
    assert bench.side.offer(request, 0) == 0
    assert bench.side.counters.lookups == 0


def test_an_old_partial_answer_is_refreshed(bench):
    request = bench.arrive("a", 64)
    assert bench.offer(request) == 0
    bench.know(request, range(3))
    assert bench.offer(request) == 0, "within half a second the answer stands"
    bench.now += 1
    assert bench.offer(request) == 3 * SPAN


def test_a_load_orders_the_blocks_beyond_the_local_hit(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request, local=SPAN) == 3 * SPAN
    bench.side.start_load(request, bench.tables["a"], 3 * SPAN)
    (order,) = bench.step([]).loads
    assert order.blocks.tolist() == [[b] for b in bench.ids("a")[1:4]]
    assert order.keys == b"".join(bench.key(request, c) for c in (1, 2, 3))
    deadline = time.monotonic() + 5
    while not bench.store.tickets:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert bench.store.tickets == [(order.ticket, 0, bench.side.namespace, order.keys, 1)]
    assert bench.side.hit_tiers("a", 3 * SPAN) == (3 * SPAN, 0)


def test_a_local_hit_inside_a_chunk_skips_its_blocks():
    bench = Bench(bpc=2)
    try:
        request = bench.arrive("a", 5 * SPAN, know=2)
        assert bench.offer(request, local=SPAN) == 3 * SPAN
        bench.side.start_load(request, bench.tables["a"], 3 * SPAN)
        ids = bench.ids("a")
        assert bench.step([]).loads[0].blocks.tolist() == [[NO_BLOCK, ids[1]], [ids[2], ids[3]]]
    finally:
        bench.close()


def test_tokens_by_tier(bench):
    request = bench.request("a", 80)
    bench.know(request, [0, 3], tier=1)
    bench.know(request, [1, 2], tier=2)
    bench.side.on_new_request(request)
    assert bench.offer(request, local=SPAN) == 3 * SPAN
    assert bench.side.hit_tiers("a", 3 * SPAN) == (2 * SPAN, SPAN)


def test_a_prompt_is_stored_in_the_step_that_computes_it_and_held(bench):
    request = bench.arrive("a", 70)
    assert bench.offer(request) == 0
    (order,) = bench.step([(request, 40)]).stores
    assert order.blocks.tolist() == [[b] for b in bench.ids("a")[:2]]
    assert order.keys == bench.key(request, 0) + bench.key(request, 1)
    assert order.audit
    (second,) = bench.step([(request, 30)]).stores
    assert second.blocks.tolist() == [[b] for b in bench.ids("a")[2:4]]
    assert not second.audit, "the first two chunks were audited"
    bench.side.request_finished(request, bench.ids("a"))
    bench.pool.free_blocks(reversed(bench.tables["a"]))
    assert used(bench.pool) == 4, "jobs hold their sources after the request is gone"
    bench.side.update(StepResults(jobs={order.job: 1}), set())
    assert used(bench.pool) == 2
    bench.side.update(StepResults(jobs={second.job: 1, 999: 1}), set())
    assert used(bench.pool) == 0
    assert bench.side.holds.jobs == 0


def test_all_workers_must_report_across_steps():
    bench = Bench(world=2)
    try:
        request = bench.arrive("a", 32)
        (order,) = bench.step([(request, 32)]).stores
        bench.side.update(StepResults(jobs={order.job: 1}), set())
        assert bench.side.holds.jobs == 1
        bench.side.update(StepResults(jobs={order.job: 1}), set())
        assert bench.side.holds.jobs == 0
    finally:
        bench.close()


def test_what_the_store_has_is_not_offered_to_it_again(bench):
    request = bench.arrive("a", 80, know=3)
    assert bench.offer(request) == 3 * SPAN
    request.num_computed_tokens = 3 * SPAN
    (order,) = bench.step([(request, 32)]).stores
    assert order.keys == bench.key(request, 3) + bench.key(request, 4)


def test_decoding_stores_when_a_chunk_is_full(bench):
    request = bench.arrive("a", 15)
    request.block_hashes = []
    bench.tables["a"] += bench.pool.get_new_blocks(1)
    assert not bench.step([(request, 15)]).stores
    request.num_tokens += 1
    request.block_hashes = [b"h" * 32]
    assert len(bench.step([(request, 1)]).stores) == 1
    request.num_tokens += 1
    assert not bench.step([(request, 1)]).stores


def test_holds_are_bounded_and_the_rest_follows_later():
    bench = Bench(num_blocks=100, max_step_tokens=SPAN)
    try:
        assert bench.geometry.max_pinned_blocks == 5
        request = bench.arrive("a", 8 * SPAN)
        (first,) = bench.step([(request, 8 * SPAN)]).stores
        assert len(first.blocks) == 5
        request.num_tokens += 1
        assert not bench.step([(request, 1)]).stores
        bench.side.update(StepResults(jobs={first.job: 1}), set())
        request.num_tokens += 1
        (rest,) = bench.step([(request, 1)]).stores
        assert rest.blocks.tolist() == [[b] for b in bench.ids("a")[5:8]]
    finally:
        bench.close()


def test_the_rest_is_stored_at_the_end_as_far_as_it_can_be_held():
    bench = Bench(num_blocks=100, max_step_tokens=SPAN)
    try:
        request = bench.arrive("a", 12 * SPAN)
        (first,) = bench.step([(request, 12 * SPAN)]).stores
        bench.side.update(StepResults(jobs={first.job: 1}), set())
        bench.side.request_finished(request, bench.ids("a"))
        (rest,) = bench.step([]).stores
        assert len(rest.blocks) == 5
        assert bench.side.counters.chunks_dropped == 2
    finally:
        bench.close()


def test_an_aborted_load_stores_nothing(bench):
    request = bench.arrive("a", 80, know=3)
    assert bench.offer(request) == 3 * SPAN
    bench.side.start_load(request, bench.tables["a"], 3 * SPAN)
    bench.step([])
    request.num_computed_tokens = 64
    bench.side.request_finished(request, bench.ids("a"))
    assert not bench.step([]).stores


def fail_load(bench, request, tokens, index):
    bench.side.start_load(request, bench.tables[request.request_id], tokens)
    (order,) = bench.step([]).loads
    failure = LoadFailure(order.ticket, index, "lost")
    bench.side.update(StepResults(failures={request.request_id: failure}), {request.request_id})
    return order


def test_after_a_failure_one_shorter_offer_then_none(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    fail_load(bench, request, 4 * SPAN, index=2)
    assert bench.offer(request) == 2 * SPAN
    order = fail_load(bench, request, 2 * SPAN, index=1)
    assert order.keys == bench.key(request, 0) + bench.key(request, 1)
    assert bench.offer(request) == 0
    orders = bench.step([(request, 80)])
    assert len(orders.stores[0].blocks) == 4, "what was lost is stored again, from chunk 1 on"


def test_each_worker_reports_the_same_failure_in_its_own_step():
    bench = Bench(world=2)
    try:
        request = bench.arrive("a", 80, know=4)
        assert bench.offer(request) == 4 * SPAN
        bench.side.start_load(request, bench.tables["a"], 4 * SPAN)
        (order,) = bench.step([]).loads
        for index in (2, 3):
            failure = LoadFailure(order.ticket, index, "lost")
            bench.side.update(StepResults(failures={"a": failure}), set())
        bench.side.update(None, {"a"})
        assert bench.offer(request) == 2 * SPAN, "one failure, at the earlier chunk"
    finally:
        bench.close()


def test_a_load_that_cannot_be_ordered_is_ordered_to_fail(bench, caplog):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    bench.side.start_load(request, bench.tables["a"][:2], 4 * SPAN)  # too few blocks: an error
    (order,) = bench.step([]).loads
    assert (order.req_id, order.store, len(order.blocks)) == ("a", "", 0)
    failure = LoadFailure(order.ticket, 0, "the store is gone")
    bench.side.update(StepResults(failures={"a": failure}), {"a"})
    assert bench.offer(request) == 0
    assert "could not be ordered" in caplog.text


def test_a_store_that_cannot_be_ordered_holds_nothing(bench, caplog):
    request = bench.arrive("a", 32)
    request.block_hashes = [b"far too long to be a hash of a block" for _ in range(2)]
    assert not bench.step([(request, 32)]).stores
    assert bench.side.holds.jobs == 0
    assert used(bench.pool) == 2, "only the request's own"
    assert "could not be ordered" in caplog.text


def test_a_lookup_of_an_older_epoch_answers_nothing(bench):
    bench.store.delay_s = 0.2
    request = bench.arrive("a", 80, know=4)
    time.sleep(0.05)  # the first lookup is on its way
    bench.side.reset()
    bench.know(request, range(2))
    assert bench.side.offer(request, 0) is None
    time.sleep(0.2)
    assert bench.side.offer(request, 0) in (None, 2 * SPAN)


def test_blocks_computed_before_a_reset_are_not_stored_after_it(bench):
    request = bench.arrive("a", 80)
    bench.step([(request, 40)])
    bench.side.reset()
    assert not bench.step([(request, 40)]).stores


def test_a_failure_counts_from_the_first_chunk_of_its_ticket(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request, local=SPAN) == 3 * SPAN
    fail_load(bench, request, 3 * SPAN, index=1)
    assert bench.offer(request, local=SPAN) == SPAN


def test_a_reset_makes_everything_stored_before_unservable(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    before = bench.side.namespace
    bench.side.reset()
    assert bench.offer(request) == 0
    orders = bench.step([(request, 80)])
    assert orders.reset
    assert orders.stores[0].namespace == bench.side.namespace != before
    assert orders.stores[0].keys[:32] == bench.key(request, 0) != bench.key(request, 0, before)
    assert not bench.step([]).reset
    bench.side.reset()
    assert bench.side.namespace not in (before, orders.stores[0].namespace)


def test_a_failed_audit_ends_offers_and_stores(bench):
    request = bench.arrive("a", 80, know=4)
    bench.side.disable()
    assert bench.side.offer(request, 0) == 0
    assert not bench.step([(request, 80)]).stores


def test_running_copies_delay_preemption_only_shortly(bench):
    assert not bench.side.holds.free_soon()
    request = bench.arrive("a", 32)
    bench.step([(request, 32)])
    assert bench.side.holds.free_soon()
    bench.now += 1.1
    assert not bench.side.holds.free_soon()


def test_only_steps_that_compute_nothing_are_slowed_down(bench):
    request = bench.arrive("a", 64)
    assert bench.step([(request, 64)]).pause_s == 0
    assert 0 < bench.step([]).pause_s < 0.01


def test_orders_are_small_arrays(bench):
    request = bench.arrive("a", 64)
    (order,) = bench.step([(request, 64)]).stores
    assert order.blocks.dtype == np.int32
    assert len(order.keys) == 32 * 4
