"""What a step stores of many groups, and how long it holds the blocks it is copied from."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_bench import DRAFT, FULL, SPAN, STATE, WINDOW, Bench, hybrid, index_of
from small_specs import group

from kvfold.errors import PlanError
from kvfold.vllm import metrics
from kvfold.vllm.messages import StepResults


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def mixed():
    return hybrid()


def windows(**options):
    """Attention, and a window so much larger that it is stored every 2,048 tokens only."""
    groups = [group(0, head_bytes=4), group(1, "sliding_window", 16, window=33, head_bytes=256)]
    bench = Bench(groups, alignment=64, hash_tokens=16, **options)
    assert bench.geometry.window_interval == 2048
    assert bench.geometry.groups[1].blocks_per_chunk == 2
    return bench


# -- one group ---------------------------------------------------------------------------------


def test_a_prompt_is_stored_in_the_step_that_computes_it_and_held(bench):
    request = bench.compute(bench.arrive("a", 70))
    (order,) = bench.step((request, 40)).stores
    assert order.blocks.tolist() == [[b] for b in bench.ids("a")[:2]]
    assert order.blocks.dtype == np.int32
    assert order.keys == bench.keys(request, (0, 1))
    assert (order.group, order.namespace) == (0, bench.side.namespaces[0])
    (second,) = bench.step((request, 30)).stores
    assert second.blocks.tolist() == [[b] for b in bench.ids("a")[2:4]]
    bench.finish(request)
    assert bench.used == 4, "jobs hold their sources after the request is gone"
    assert bench.side.holds.blocks == 4
    bench.done(order)
    assert bench.used == 2
    bench.done(second)
    assert (bench.used, bench.side.holds.jobs, bench.side.holds.blocks) == (0, 0, 0)
    bench.done(second)  # unknown by now
    assert bench.used == 0


def test_the_first_chunks_of_each_group_are_audited_and_some_jobs_later():
    bench = hybrid(settings={"audit_chunks": 1, "audit_every": 6})
    audited = []
    for name in "abcd":
        request = bench.compute(bench.arrive(name, 64, salt=name))
        audited += [(order.group, order.audit) for order in bench.step((request, 64)).stores]
        bench.finish(request)
    assert [number for number, audit in audited[:3] if audit] == [WINDOW, FULL, DRAFT]
    assert [audit for _, audit in audited[3:]] == [i % 6 == 5 for i in range(3, len(audited))]


def test_what_the_store_has_is_not_offered_to_it_again(bench):
    request = bench.compute(bench.arrive("a", 80, know=3))
    assert bench.offer(request) == 3 * SPAN
    request.num_computed_tokens = 3 * SPAN
    (order,) = bench.step((request, 32)).stores
    assert order.keys == bench.keys(request, (3, 4))


def test_decoding_stores_when_a_chunk_is_full(bench):
    request = bench.compute(bench.arrive("a", 15), 32)
    assert not bench.step((request, 15)).stores
    request.num_tokens += 1
    request.block_hashes = [b"h" * 32]
    assert len(bench.step((request, 1)).stores) == 1
    request.num_tokens += 1
    assert not bench.step((request, 1)).stores


def test_tokens_that_may_be_rejected_are_not_stored(bench):
    """A step with proposals computes more tokens than are accepted."""
    request = bench.compute(bench.arrive("a", 31), 64)
    (order,) = bench.step((request, 33)).stores
    assert order.keys == bench.key(request, 0)


def test_holds_are_bounded_and_the_rest_follows_later():
    bench = Bench(num_blocks=100, max_step_tokens=SPAN)
    assert bench.geometry.max_pinned_blocks == 5
    request = bench.compute(bench.arrive("a", 8 * SPAN))
    (first,) = bench.step((request, 8 * SPAN)).stores
    assert len(first.blocks) == 5
    request.num_tokens += 1
    assert not bench.step((request, 1)).stores
    bench.done(first)
    request.num_tokens += 1
    (rest,) = bench.step((request, 1)).stores
    assert rest.blocks.tolist() == [[b] for b in bench.ids("a")[5:8]]


def test_the_rest_is_stored_at_the_end_as_far_as_it_can_be_held():
    bench = Bench(num_blocks=100, max_step_tokens=SPAN)
    request = bench.compute(bench.arrive("a", 12 * SPAN))
    (first,) = bench.step((request, 12 * SPAN)).stores
    bench.done(first)
    bench.finish(request)
    (rest,) = bench.step().stores
    assert len(rest.blocks) == 5
    assert bench.counted(metrics.CHUNKS_DROPPED) == {"": 2}


def test_the_last_token_of_a_request_is_not_computed(bench):
    request = bench.compute(bench.arrive("a", 20), 48)
    bench.step((request, 20))
    request.num_tokens, request.num_computed_tokens = 32, 33  # a step ahead of what was sampled
    request.block_hashes.append(b"h" * 32)
    bench.finish(request)
    assert not bench.step().stores
    other = bench.compute(bench.arrive("b", 32))
    other.num_computed_tokens = 32
    bench.finish(other)
    assert len(bench.step().stores) == 1, "a prompt's last token is"


def test_a_step_may_always_hold_what_it_computes(mixed):
    g = mixed.geometry
    assert g.max_pinned_blocks == 200, "half of the pool at most"
    roomy = hybrid(num_blocks=10_000, max_step_tokens=2048)
    assert roomy.geometry.max_pinned_blocks == 500
    assert hybrid(num_blocks=2000).geometry.max_pinned_blocks == 128 + 128 + 16 + 128


def test_a_chunk_may_be_larger_than_a_step():
    bench = Bench([group(0)], chunk=64, num_blocks=400, max_step_tokens=512)
    request = bench.compute(bench.arrive("a", 1024))
    bench.step((request, 512))
    (order,) = bench.step((request, 512)).stores
    assert order.keys == bench.key(request, 0)


def test_an_engine_that_can_never_hold_a_chunk_is_refused():
    Bench([group(0)], chunk=64, num_blocks=128)
    with pytest.raises(PlanError, match=r"chunk of group 0 full_attention=64: expected at most 63"):
        Bench([group(0)], chunk=64, num_blocks=127)


# -- many groups -------------------------------------------------------------------------------


def test_each_group_is_a_job_and_what_goes_first_goes_first(mixed):
    request = mixed.compute(mixed.arrive("a", 300))
    orders = mixed.step((request, 200))
    assert [order.group for order in orders.stores] == [WINDOW, FULL, DRAFT]
    window, full, draft = orders.stores
    assert full.blocks.tolist() == mixed.rows("a", 0, 0, 12, 4)
    assert full.keys == mixed.keys(request, range(3), FULL)
    assert draft.blocks.tolist() == full.blocks.tolist()
    assert draft.keys == mixed.keys(request, range(3), DRAFT)
    ids = mixed.ids("a", 2)
    assert window.blocks.tolist() == [ids[2:4], ids[6:8], ids[10:12]]
    assert window.keys == mixed.keys(request, range(3), WINDOW)
    assert mixed.side.holds.blocks == 6 + 12 + 12
    assert len({order.job for order in orders.stores}) == 3
    (again,) = [o for o in mixed.step((request, 100)).stores if o.group == WINDOW]
    assert again.keys == mixed.key(request, 3, WINDOW), "each chunk once"


def test_a_window_is_stored_where_hits_are_likely(caplog):
    bench = windows(num_blocks=1000, max_step_tokens=4096)
    request = bench.arrive("a", 2500)
    request.shared_prefix_boundary = 700
    orders = bench.step((bench.compute(request, 2600), 2500))
    full, window = index_of(orders, 0), index_of(orders, 1)
    assert full.keys == bench.keys(request, range(39), 0)
    chunks = [9, 31, 38]  # before 640, 2,048 and 2,496
    assert window.keys == bench.keys(request, chunks, 1)
    ids = bench.ids("a", 1)
    assert window.blocks.tolist() == [ids[4 * c + 2 : 4 * c + 4] for c in chunks]
    request.num_tokens = 2600
    request.block_hashes = bench.request("b", 2600).block_hashes
    orders = bench.step((request, 100))
    assert index_of(orders, 1).keys == bench.key(request, 39, 1), "what is generated: everywhere"
    assert not caplog.records


def test_a_junction_that_the_store_knows_of_is_stored(caplog):
    bench = windows(num_blocks=1000, max_step_tokens=4096)
    request = bench.request("a", 1000)
    bench.know(request, range(10), [0])
    bench.side.on_new_request(request)
    assert bench.offer(request) == 0
    assert request.shared_prefix_boundary == 640
    request.shared_prefix_boundary = 0  # the engine looks for its own whenever it asks
    orders = bench.step((bench.compute(request), 1000))
    assert index_of(orders, 0).keys == bench.keys(request, range(10, 15), 0)
    assert index_of(orders, 1).keys == bench.keys(request, (9, 14), 1)


def test_holes_are_passed_over(mixed):
    request = mixed.compute(mixed.arrive("a", 300))
    mixed.drop("a", 2, range(7))
    orders = mixed.step((request, 300))
    assert index_of(orders, WINDOW).keys == mixed.keys(request, (2, 3), WINDOW)
    assert index_of(orders, FULL).keys == mixed.keys(request, range(4), FULL)
    assert not mixed.step((request, 0)).stores


def test_states_are_stored_where_the_engine_hands_them_over(mixed):
    request = mixed.compute(mixed.arrive("a", 300))
    ids = mixed.ids("a", 3)
    handed = [
        (3, ids[0], 128), (3, ids[1], 192), (3, 0, 64), (3, ids[2], 100), (0, ids[2], 64),
        (3, ids[2], 320), (3, ids[2], 0),
    ]  # fmt: skip
    orders = mixed.step((request, 40), handed={"a": handed, "nobody": [(3, ids[2], 64)]})
    states = [order for order in orders.stores if order.group == STATE]
    assert [order.blocks.tolist() for order in states] == [[[ids[0]]], [[ids[1]]]]
    assert [order.keys for order in states] == [mixed.key(request, c, STATE) for c in (1, 2)]
    mixed.finish(request)
    assert mixed.used == 2
    mixed.done(*states)
    assert mixed.used == 0


def test_a_handed_state_is_held_although_the_engine_freed_it(mixed):
    request = mixed.compute(mixed.arrive("a", 300))
    block = mixed.ids("a", 3)[0]
    mixed.drop("a", 3, [0])
    (order,) = mixed.step((request, 0), handed={"a": [(3, block, 128)]}).stores
    assert mixed.pool.blocks[block].ref_cnt == 1
    mixed.done(order)
    assert mixed.pool.blocks[block].ref_cnt == 0


def test_a_finished_request_leaves_a_state(mixed):
    request = mixed.compute(mixed.arrive("a", 192))
    request.num_computed_tokens = 192
    block = mixed.ids("a", 3)[1]
    mixed.side.hand_over_at_end(request, [(3, block, 192)])
    mixed.finish(request)
    orders = mixed.step()
    state = index_of(orders, STATE)
    assert (state.keys, state.blocks.tolist()) == (mixed.key(request, 2, STATE), [[block]])
    assert index_of(orders, FULL).keys == mixed.keys(request, range(3), FULL)


def test_a_state_that_cannot_be_held_is_counted():
    mixed = hybrid(num_blocks=40)
    assert mixed.geometry.max_pinned_blocks == 20
    request = mixed.compute(mixed.arrive("a", 192))
    mixed.side.holds.hold(1, mixed.ids("a") + mixed.ids("a", 2)[:8])
    orders = mixed.step((request, 0), handed={"a": [(3, mixed.ids("a", 3)[0], 128)]})
    assert not orders.stores
    assert mixed.counted(metrics.CHUNKS_DROPPED) == {"": 1}


def test_windows_go_first_when_few_blocks_may_be_held():
    mixed = hybrid(num_blocks=90)
    assert mixed.geometry.max_pinned_blocks == 45
    mixed.side.holds.hold(1, [mixed.pool.get_new_blocks(1)[0].block_id] * 35)
    request = mixed.compute(mixed.arrive("a", 256))
    first = mixed.step((request, 256))
    assert index_of(first, WINDOW).keys == mixed.keys(request, range(4), WINDOW)
    assert len(first.stores) == 1, "2 blocks are left: no chunk of attention"
    mixed.done(*first.stores)
    second = mixed.step((request, 0))
    assert index_of(second, FULL).keys == mixed.keys(request, (0, 1), FULL)
    assert len(second.stores) == 1
    mixed.done(*second.stores)
    mixed.side.holds.reported(1, 1)
    third = mixed.step((request, 0))
    assert index_of(third, FULL).keys == mixed.keys(request, (2, 3), FULL)
    assert index_of(third, DRAFT).keys == mixed.keys(request, range(4), DRAFT)


def test_a_window_that_waits_for_room_is_lost_with_its_blocks():
    mixed = hybrid(num_blocks=90)
    held = [mixed.pool.get_new_blocks(1)[0].block_id] * 43
    mixed.side.holds.hold(1, held)
    request = mixed.compute(mixed.arrive("a", 256))
    (first,) = mixed.step((request, 256)).stores
    assert first.keys == mixed.key(request, 0, WINDOW)
    mixed.drop("a", 2, range(7))
    mixed.done(first)
    mixed.side.holds.reported(1, 1)
    orders = mixed.step((request, 0))
    assert index_of(orders, WINDOW).keys == mixed.keys(request, (2, 3), WINDOW)


def test_a_draft_is_stored_when_its_proposals_are_settled():
    mixed = hybrid(lag=5)
    request = mixed.compute(mixed.arrive("a", 200))
    orders = mixed.step((request, 128))
    assert index_of(orders, FULL).keys == mixed.keys(request, (0, 1), FULL)
    assert index_of(orders, DRAFT).keys == mixed.key(request, 0, DRAFT), "128 may be rewritten"
    assert not mixed.step((request, 4)).stores
    (order,) = mixed.step((request, 1)).stores
    assert (order.group, order.keys) == (DRAFT, mixed.key(request, 1, DRAFT))
    orders = mixed.step((request, 67))
    assert index_of(orders, FULL).keys == mixed.key(request, 2, FULL)
    assert index_of(orders, DRAFT).keys == mixed.key(request, 2, DRAFT)


def test_proposals_settle_no_draft():
    mixed = hybrid(lag=5)
    request = mixed.compute(mixed.arrive("a", 66), 128)
    orders = mixed.step((request, 70))
    assert {order.group for order in orders.stores} == {WINDOW, FULL}


def test_the_end_settles_a_draft():
    mixed = hybrid(lag=5)
    request = mixed.compute(mixed.arrive("a", 128))
    orders = mixed.step((request, 128))
    assert index_of(orders, DRAFT).keys == mixed.key(request, 0, DRAFT)
    mixed.finish(request)
    assert index_of(mixed.step(), DRAFT).keys == mixed.key(request, 1, DRAFT)


# -- life of a request -------------------------------------------------------------------------


def test_after_a_preemption_nothing_is_stored_twice(mixed):
    request = mixed.compute(mixed.arrive("a", 300))
    first = mixed.step((request, 140))
    assert index_of(first, FULL).keys == mixed.keys(request, range(2), FULL)
    mixed.free("a")
    assert mixed.used == 4 + 8, "preempted with stores in flight"
    request.num_computed_tokens = 0
    assert mixed.offer(request) == 0
    mixed.compute(request)
    assert not mixed.step((request, 140)).stores
    second = mixed.step((request, 160))
    assert index_of(second, FULL).keys == mixed.keys(request, (2, 3), FULL)
    assert index_of(second, FULL).blocks.tolist() == mixed.rows("a", 0, 8, 16, 4)
    assert index_of(second, WINDOW).keys == mixed.keys(request, (2, 3), WINDOW)
    mixed.finish(request)
    mixed.done(*first.stores, *second.stores)
    assert mixed.used == 0


def test_a_request_that_computed_nothing_leaves_nothing(mixed):
    request = mixed.arrive("a", 300)
    mixed.side.request_finished(request, ([], [], [], []))
    stranger = mixed.request("never seen", 300)
    mixed.side.request_finished(stranger, ())
    assert not mixed.step().stores


def test_what_was_loaded_is_not_stored(mixed):
    request = mixed.arrive("a", 300, know=3)
    assert mixed.offer(request) == 192
    mixed.load_of(request, 192)
    mixed.loaded(request, 192)
    mixed.free("a")
    orders = mixed.step((mixed.compute(request), 108))
    for number in (FULL, WINDOW):
        assert index_of(orders, number).keys == mixed.key(request, 3, number)


def loaded_without_draft(mixed, name):
    """A request whose load had no chunk of the draft, or the first of three."""
    request = mixed.request(name, 300)
    mixed.know(request, range(3), [FULL, WINDOW, STATE])
    mixed.side.on_new_request(request)
    assert mixed.offer(request) == 192
    mixed.load_of(request, 192)
    mixed.loaded(request, 192)
    grow(mixed, name, 300)
    return request


def grow(mixed, name, tokens):
    """Blocks for the rest of a request's tokens."""
    tables = []
    for index, table in enumerate(mixed.tables[name]):
        span = mixed.spans[index].tokens_per_block if index in mixed.spans else tokens
        new = max(0, -(-tokens // span) - len(table))
        tables.append([*table, *mixed.pool.get_new_blocks(new)])
    mixed.tables[name] = tuple(tables)


def groups_of(orders):
    return {order.group for order in orders.stores}


def test_a_draft_that_was_not_loaded_is_not_stored(mixed):
    request = loaded_without_draft(mixed, "a")
    orders = mixed.step((request, 108))
    assert index_of(orders, FULL).keys == mixed.key(request, 3, FULL)
    assert DRAFT not in groups_of(orders), "not even the last chunk: it looks back on the others"


def test_what_another_request_computes_in_the_same_blocks_is_stored(mixed):
    mixed.free(loaded_without_draft(mixed, "a").request_id)
    other = mixed.compute(mixed.arrive("b", 300))
    orders = mixed.step((other, 300))
    assert index_of(orders, DRAFT).keys == mixed.keys(other, range(4), DRAFT)


def test_a_draft_in_blocks_that_the_engine_shares_is_as_good_as_they_are(mixed):
    first = loaded_without_draft(mixed, "a")
    other = mixed.arrive("b", 300)
    assert mixed.offer(other, local=192) == 0
    mixed.tables["b"] = mixed.tables["a"]
    other.num_computed_tokens = 192
    orders = mixed.step((other, 108))
    assert groups_of(orders) >= {FULL}
    assert DRAFT not in groups_of(orders)
    assert first.request_id in mixed.side._requests


def test_holes_in_tables_spoil_nothing(mixed):
    request = loaded_without_draft(mixed, "a")
    full, *others = mixed.tables["a"]
    mixed.tables["a"] = ([*full[:-1], mixed.null], *others)
    mixed.step((request, 108))
    other = mixed.compute(mixed.arrive("b", 300))
    mixed.tables["b"] = ([mixed.null, *mixed.tables["b"][0][1:]], *mixed.tables["b"][1:])
    orders = mixed.step((other, 300))
    assert index_of(orders, DRAFT).keys == mixed.keys(other, range(1, 4), DRAFT)


def test_a_draft_whose_load_failed_is_not_stored(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(3))
    mixed.side.on_new_request(request)
    assert mixed.offer(request) == 192
    assert DRAFT in [part.group for part in mixed.load_of(request, 192).parts]
    mixed.side.update(StepResults(without_draft=["a"]), set())
    mixed.loaded(request, 192)
    grow(mixed, "a", 300)
    assert DRAFT not in groups_of(mixed.step((request, 108)))


def test_a_table_that_the_engine_cut_is_stored_as_far_as_it_goes(mixed):
    request = mixed.compute(mixed.arrive("a", 300), 130)
    orders = mixed.step((request, 300))
    assert index_of(orders, FULL).keys == mixed.keys(request, range(2), FULL)
    assert index_of(orders, WINDOW).keys == mixed.keys(request, range(2), WINDOW)


def test_a_request_without_tables_waits_for_them(bench):
    request = bench.compute(bench.arrive("a", 64))
    orders = bench.step((request, 32), hide={"a"})
    assert not orders.stores
    (order,) = bench.step((request, 32)).stores
    assert order.keys == bench.keys(request, range(4))


@pytest.mark.parametrize("lag", [0, 5])
def test_steps_that_complete_nothing_do_not_look_at_tables(lag):
    mixed = hybrid(lag=lag)
    request = mixed.compute(mixed.arrive("a", 300))
    mixed.step((request, 64 + lag))
    mixed.asked_tables.clear()
    for _ in range(63 - lag):
        mixed.step((request, 1))
    assert not mixed.asked_tables
    mixed.step((request, 1))
    assert mixed.asked_tables == ["a"]


def test_a_store_that_cannot_be_ordered_holds_nothing_and_ends_the_request_s(bench, caplog):
    request = bench.compute(bench.arrive("a", 64))
    request.block_hashes = [b"far too long to be a hash of a block"] * 4
    other = bench.compute(bench.arrive("b", 32, salt="b"))
    (order,) = bench.step((request, 32), (other, 32)).stores
    assert order.keys == bench.keys(other, range(2)), "the others go on"
    assert bench.side.holds.jobs == 1
    assert "could not be ordered" in caplog.text
    caplog.clear()
    assert not bench.step((request, 32)).stores
    bench.finish(request)
    assert not bench.step().stores
    assert not caplog.text, "once"
