"""The scheduler's side of many groups: what it offers when, and what a reset or an audit ends."""

from __future__ import annotations

import pytest
from scheduler_bench import FULL, SPAN, STATE, WINDOW, Bench, hybrid, index_of, namespace

from kvfold.vllm import metrics


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def mixed():
    return hybrid()


def test_the_geometry_of_a_hybrid(mixed):
    g = mixed.geometry
    assert (g.period, g.hashes_per_chunk, g.world) == (64, 4, 1)
    assert [shape.need for shape in g.groups] == ["all", "window", "state", "all"]
    assert [shape.index for shape in g.groups] == [0, 2, 3, 0]
    assert [shape.blocks_per_chunk for shape in g.groups] == [4, 2, 1, 4]
    assert [shape.optional for shape in g.groups] == [False, False, False, True]
    assert [shape.handed_over for shape in g.groups] == [False, False, True, False]
    assert mixed.side.loaded_groups == (0, 2, 3)


# -- offers ------------------------------------------------------------------------------------


def test_the_leading_chunks_are_offered_and_one_token_stays(bench):
    request = bench.request("a", 64)
    bench.know(request, [0, 1, 3])
    bench.side.on_new_request(request)
    assert bench.offer(request) == 2 * SPAN
    full = bench.arrive("b", 64, know=4)
    assert bench.offer(full) == 3 * SPAN, "a prompt of whole chunks keeps its last chunk to compute"
    assert bench.offer(full, local=2 * SPAN) == SPAN
    assert bench.offer(full, local=2 * SPAN + 1) == SPAN - 1
    assert bench.offer(full, local=3 * SPAN) == 0


def test_a_local_hit_may_bridge_a_gap(bench):
    request = bench.request("a", 80)
    bench.know(request, range(1, 4))
    bench.side.on_new_request(request)
    assert bench.offer(request) == 0
    assert bench.offer(request, local=SPAN) == 3 * SPAN
    assert bench.offer(request) == 0


def test_a_late_lookup_asks_again_then_gives_up(bench):
    bench.io.inline = False
    request = bench.arrive("a", 64, know=4)
    bench.now += 3  # it waited for its turn: that is nobody's fault
    assert bench.offer(request) is None
    bench.now += 0.019
    assert bench.offer(request) is None
    bench.now += 0.002
    assert bench.offer(request) == 0
    bench.io.run()
    assert bench.outcomes == ["late"]
    assert bench.counted(metrics.MISSED_REQUESTS) == {"late": 1}
    assert bench.offer(request) == 3 * SPAN, "the answer is there now"


def test_without_a_store_nobody_waits(bench):
    bench.io.inline = bench.connected = False
    request = bench.arrive("a", 64, know=4)
    assert bench.offer(request) == 0
    assert bench.counted(metrics.MISSED_REQUESTS) == {"no_store": 1}


def test_a_dead_store_is_a_miss(bench):
    bench.store.fail = True
    assert bench.offer(bench.arrive("a", 64)) == 0


def test_a_request_that_must_not_read_is_not_looked_up(bench):
    request = bench.arrive("a", 64, know=4, skip_reading_prefix_cache=True)
    assert bench.offer(request) == 0
    assert not bench.store.asked
    assert bench.outcomes == ["skipped"]


def test_a_prompt_shorter_than_a_chunk_asks_nothing(bench):
    assert bench.offer(bench.arrive("a", 15)) == 0
    assert not bench.store.asked


def test_an_old_partial_answer_is_refreshed_and_a_complete_one_stays(bench):
    request = bench.arrive("a", 64)
    assert bench.offer(request) == 0
    bench.know(request, range(3))
    bench.now += 0.5
    assert bench.offer(request) == 0, "within half a second the answer stands"
    bench.now += 0.01
    assert bench.offer(request) == 3 * SPAN
    complete = bench.arrive("b", 64, know=4)
    asked = len(bench.store.asked)
    bench.now += 10
    assert bench.offer(complete) == 3 * SPAN
    assert len(bench.store.asked) == asked


def test_a_refresh_may_be_waited_for_as_long_as_the_first_lookup(bench):
    request = bench.arrive("a", 64)
    assert bench.offer(request) == 0
    bench.io.inline, bench.now = False, bench.now + 5
    assert bench.offer(request) is None
    bench.now += 0.019
    assert bench.offer(request) is None
    bench.io.run()
    assert bench.offer(request) == 0


def test_an_unknown_request_is_offered_nothing(bench):
    assert bench.offer(bench.request("never seen", 64)) == 0


def test_all_groups_end_at_one_boundary(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(4), [FULL, WINDOW])
    mixed.know(request, [1, 3], [STATE])
    mixed.side.on_new_request(request)
    assert mixed.offer(request) == 256
    mixed.know(request, [3], [WINDOW], tier=0)
    again = mixed.request("b", 300)
    mixed.side.on_new_request(again)
    assert mixed.offer(again) == 128, "the state at 192 is not stored"
    assert mixed.offer(again, local=128) == 0


def test_a_draft_never_limits_a_hit(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(4), [FULL, WINDOW, STATE])
    mixed.side.on_new_request(request)
    assert mixed.offer(request) == 256


def test_one_question_for_all_groups(mixed):
    request = mixed.arrive("a", 300)
    (asked,) = mixed.store.asked
    assert asked == b"".join(mixed.keys(request, range(4), number) for number in range(4))


def test_hashes_of_16_bytes_make_keys_of_32():
    bench = Bench(hash_bytes=16)
    request = bench.arrive("a", 40, know=2)
    assert bench.store.asked == [bench.keys(request, range(2))]
    assert bench.offer(request) == 2 * SPAN


def test_a_prefix_that_others_share_is_named_to_the_engine(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(3), [FULL])
    mixed.side.on_new_request(request)
    assert mixed.offer(request, local=64) == 0
    assert request.shared_prefix_boundary == 192, "have it keep a state there"
    nobody = mixed.arrive("c", 300, salt="c")
    assert mixed.offer(nobody, local=128) == 0
    assert nobody.shared_prefix_boundary == 0, "what the engine has itself is no news"
    known = mixed.arrive("b", 300, know=4, salt="b")
    assert mixed.offer(known) == 256
    assert known.shared_prefix_boundary == 0


# -- epochs ------------------------------------------------------------------------------------


def test_a_reset_makes_everything_stored_before_unservable(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    before = mixed.side.namespaces
    assert before == tuple(namespace(number) for number in range(4))
    mixed.side.reset()
    assert mixed.offer(request) == 0
    orders = mixed.step((mixed.compute(request), 300))
    assert orders.reset
    epoch = mixed.side.epoch
    assert len(epoch) == 16
    assert mixed.side.namespaces == tuple(namespace(number, epoch) for number in range(4))
    assert not set(mixed.side.namespaces) & set(before)
    for order in orders.stores:
        assert order.namespace == namespace(order.group, epoch)
    assert index_of(orders, FULL).keys == mixed.keys(request, range(4), FULL)
    assert not mixed.step().reset
    mixed.side.reset()
    assert mixed.side.epoch != epoch


def test_a_lookup_of_an_older_epoch_answers_nothing(bench):
    bench.io.inline = False
    request = bench.arrive("a", 80, know=4)
    bench.side.reset()
    bench.know(request, range(2))
    assert bench.offer(request) is None
    bench.io.run()
    assert bench.offer(request) == 2 * SPAN, "of the new epoch"
    assert bench.store.asked == [bench.keys(request, range(5))], "nobody wanted the old answer"


def test_blocks_computed_before_a_reset_are_not_stored_after_it(mixed):
    request = mixed.compute(mixed.arrive("a", 300))
    assert mixed.step((request, 70)).stores
    mixed.side.reset()
    orders = mixed.step((request, 230), handed={"a": [(3, 7, 192)]})
    assert not orders.stores
    mixed.side.hand_over_at_end(request, [(3, 7, 256)])
    mixed.finish(request)
    assert not mixed.step().stores


def test_a_load_across_a_reset_leaves_a_request_that_stores_nothing(bench):
    request = bench.arrive("a", 80, know=4)
    bench.offer(request)
    bench.load_of(request, 4 * SPAN)
    request.num_computed_tokens = 4 * SPAN  # as the engine has it while it waits
    bench.side.reset()
    bench.loaded(request, 4 * SPAN)
    assert not bench.step((request, 16)).stores


# -- the rest ----------------------------------------------------------------------------------


def test_a_failed_audit_ends_offers_and_stores(mixed):
    request = mixed.compute(mixed.arrive("a", 300, know=4))
    mixed.side.disable()
    assert mixed.offer(request) == 0
    assert not mixed.step((request, 200), handed={"a": [(3, 7, 192)]}).stores
    mixed.side.hand_over_at_end(request, [(3, 7, 256)])
    mixed.finish(request)
    assert not mixed.step().stores
    asked = len(mixed.store.asked)
    assert mixed.offer(mixed.arrive("b", 300)) == 0
    assert len(mixed.store.asked) == asked
    assert mixed.outcomes == ["disabled"]


def test_a_load_that_was_offered_before_the_audit_failed_is_ordered_to_fail(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    bench.side.disable()
    assert bench.load_of(request, 4 * SPAN).parts == ()


def test_an_aborted_load_stores_nothing(bench):
    request = bench.arrive("a", 80, know=3)
    assert bench.offer(request) == 3 * SPAN
    bench.load_of(request, 3 * SPAN)
    request.num_computed_tokens = 64
    bench.finish(request, free=False)
    assert not bench.step().stores
    bench.side.update(None, {"a"})


def test_loads_that_wait_are_counted(bench):
    for name in "ab":
        request = bench.arrive(name, 80, know=3)
        bench.offer(request)
        bench.load_of(request, 3 * SPAN)
    assert bench.side.waiting_loads == 2
    bench.finish(request, free=False)
    assert bench.side.waiting_loads == 1, "one was aborted"
    bench.side.update(None, {"a", "b"})
    assert bench.side.waiting_loads == 0


def test_only_steps_that_compute_nothing_are_slowed_down(bench):
    request = bench.compute(bench.arrive("a", 64))
    assert bench.step((request, 64)).pause_s == 0
    assert 0 < bench.step().pause_s < 0.01


def test_numbers_of_loads_and_tickets_never_repeat(mixed):
    other = hybrid()
    seen = []
    for bench in (mixed, other):
        for name in "ab":
            request = bench.arrive(name, 300, know=4)
            bench.offer(request)
            order = bench.load_of(request, 256)
            seen += [order.load, *(part.ticket for part in order.parts)]
    assert len(set(seen)) == len(seen)


def test_what_was_asked_and_found_is_counted_by_group(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(3), [FULL])
    mixed.know(request, [1, 3], [STATE])
    mixed.side.on_new_request(request)
    mixed.offer(request)
    stats = mixed.side.recorder.take().data
    assert stats["lookup_tokens"] == {"": 256}
    assert stats["found_tokens"] == {"0 full_attention": 192, "3 gdn": 128}
