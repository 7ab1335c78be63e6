"""The scheduler's side of many groups: which blocks a load fills, and what follows a failed one."""

from __future__ import annotations

import pytest
from scheduler_bench import DRAFT, FULL, SPAN, STATE, WINDOW, Bench, hybrid, namespace
from small_specs import group

from kvfold.mesh import Mesh
from kvfold.vllm import metrics
from kvfold.vllm.messages import NO_BLOCK


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def mixed():
    return hybrid()


# -- loads -------------------------------------------------------------------------------------


def test_a_load_orders_the_blocks_beyond_the_local_hit(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request, local=SPAN) == 3 * SPAN
    order = bench.load_of(request, 3 * SPAN, local=SPAN)
    assert (order.req_id, order.store) == ("a", "s")
    (part,) = order.parts
    assert part.blocks.tolist() == [[b] for b in bench.ids("a")[1:4]]
    assert part.keys == bench.keys(request, (1, 2, 3))
    assert not part.optional
    assert bench.store.tickets == [(part.ticket, 0, bench.side.namespaces[0], part.keys, 1)]
    assert bench.side.hit_tiers("a") == (3 * SPAN, 0)
    assert bench.side.waiting_loads == 1
    assert bench.counted(metrics.HIT_TOKENS) == {"host": 3 * SPAN}
    bench.loaded(request, 4 * SPAN)
    assert bench.side.waiting_loads == 0
    assert bench.side.hit_tiers("a") == (0, 0)


def test_every_worker_reads_every_ticket():
    bench = Bench([group(0)], mesh=Mesh(tp=2, pp=2))
    request = bench.arrive("a", 80, know=4)
    bench.offer(request)
    bench.load_of(request, 4 * SPAN)
    assert [ticket[-1] for ticket in bench.store.tickets] == [0b1111]


def test_a_local_hit_inside_a_chunk_skips_its_blocks():
    bench = Bench(chunk=2)
    request = bench.arrive("a", 5 * SPAN, know=2)
    assert bench.offer(request, local=SPAN) == 3 * SPAN
    (part,) = bench.load_of(request, 3 * SPAN, local=SPAN).parts
    ids = bench.ids("a")
    assert part.blocks.tolist() == [[NO_BLOCK, ids[1]], [ids[2], ids[3]]]
    assert part.keys == bench.keys(request, range(2))


def test_a_local_hit_inside_a_block_is_not_served_wrongly(bench):
    request = bench.arrive("a", 80, know=4)
    tokens = bench.offer(request, local=SPAN + 4)
    assert tokens == 0 or bench.load_of(request, tokens, local=SPAN + 4).parts == ()


def test_a_local_hit_inside_a_state_s_block_is_not_served_without_the_state(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request, local=192) == 64
    parts = mixed.load_of(request, 64, local=192).parts
    assert not parts or STATE in {part.group for part in parts}


def test_each_group_is_a_part_with_a_ticket_of_its_own(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    order = mixed.load_of(request, 256)
    full, window, state, draft = order.parts
    assert [part.group for part in order.parts] == [FULL, WINDOW, STATE, DRAFT]
    assert [part.optional for part in order.parts] == [False, False, False, True]
    assert full.blocks.tolist() == mixed.rows("a", 0, 0, 16, 4)
    assert full.keys == mixed.keys(request, range(4), FULL)
    assert window.blocks.tolist() == mixed.rows("a", 2, 14, 16, 2), "only the window before 256"
    assert window.keys == mixed.key(request, 3, WINDOW)
    assert state.blocks.tolist() == [[mixed.ids("a", 3)[1]]]
    assert state.keys == mixed.key(request, 3, STATE)
    assert draft.blocks.tolist() == full.blocks.tolist(), "in the blocks of its target"
    assert draft.keys == mixed.keys(request, range(4), DRAFT)
    opened = [(t[0], t[1], t[2], t[3]) for t in mixed.store.tickets]
    assert opened == [
        (part.ticket, part.group, namespace(part.group), part.keys) for part in order.parts
    ]
    assert len({part.ticket for part in order.parts}) == 4


def test_a_state_inside_a_block_of_the_engine(mixed):
    request = mixed.arrive("a", 200, know=3)
    assert mixed.offer(request) == 192
    state = mixed.load_of(request, 192).parts[STATE]
    assert state.blocks.tolist() == [[mixed.ids("a", 3)[1]]], "192 lies in the second block of 128"
    assert state.keys == mixed.key(request, 2, STATE)


def test_of_a_draft_only_what_is_there_is_ordered(mixed):
    request = mixed.arrive("a", 300, know=4)
    mixed.know(request, [0, 2], [DRAFT], tier=0)
    again = mixed.request("b", 300)
    mixed.side.on_new_request(again)
    assert mixed.offer(again) == 256
    draft = mixed.load_of(again, 256).parts[-1]
    rows = mixed.rows("b", 0, 0, 16, 4)
    assert draft.blocks.tolist() == [rows[1], rows[3]]
    assert draft.keys == mixed.keys(again, (1, 3), DRAFT)
    mixed.know(again, range(4), [DRAFT], tier=0)
    third = mixed.request("c", 300)
    mixed.side.on_new_request(third)
    mixed.offer(third)
    assert [part.group for part in mixed.load_of(third, 256).parts] == [FULL, WINDOW, STATE]


def test_blocks_that_the_engine_has_are_left_alone(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request, local=128) == 128
    full, window, state, _ = mixed.load_of(request, 128, local=128).parts
    assert full.blocks.tolist() == mixed.rows("a", 0, 8, 16, 4)
    assert full.keys == mixed.keys(request, (2, 3), FULL)
    assert window.keys == mixed.key(request, 3, WINDOW)
    assert state.keys == mixed.key(request, 3, STATE)


def test_a_window_that_begins_inside_a_chunk_loads_the_rest_of_it():
    bench = Bench([group(0), group(1, "sliding_window", 16, window=97)], alignment=64)
    request = bench.arrive("a", 300, know=4)
    assert bench.offer(request, local=144) == 112
    full, window = bench.load_of(request, 112, local=144).parts
    ids, own = bench.ids("a"), bench.ids("a", 1)
    assert full.blocks.tolist() == [[NO_BLOCK, *ids[9:12]], ids[12:16]]
    assert window.blocks.tolist() == [[NO_BLOCK, NO_BLOCK, *own[10:12]], own[12:16]]
    assert window.blocks.shape == (2, 4)


def test_chunked_attention_needs_nothing_at_the_end_of_its_chunk():
    bench = Bench([group(0), group(1, "chunked_local", 16, window=128)], alignment=64)
    request = bench.arrive("a", 270, know=4)
    bench.know(request, range(4), [1], tier=0)
    bench.know(request, [2], [1])
    again = bench.request("b", 270)
    bench.side.on_new_request(again)
    assert bench.offer(again) == 256
    assert [part.group for part in bench.load_of(again, 256).parts] == [0]
    shorter = bench.request("c", 200)
    bench.side.on_new_request(shorter)
    assert bench.offer(shorter) == 192
    _, chunked = bench.load_of(shorter, 192).parts
    assert chunked.blocks.tolist() == bench.rows("c", 1, 8, 12, 4)
    assert chunked.keys == bench.key(shorter, 2, 1)


def test_a_load_of_one_token_less_than_the_engine_computes(mixed):
    """An offer that the engine cuts short cannot be served: its groups end elsewhere."""
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    order = mixed.load_of(request, 192)
    assert order.parts == ()
    mixed.failed(request, order)
    assert mixed.retry(request) == 0


def test_tokens_by_tier(mixed):
    request = mixed.arrive("a", 300, know=4)
    mixed.know(request, [0, 3], [FULL], tier=1)
    mixed.know(request, [3], [WINDOW], tier=1)
    again = mixed.request("b", 300)
    mixed.side.on_new_request(again)
    assert mixed.offer(again) == 256
    mixed.load_of(again, 256)
    assert mixed.side.hit_tiers("b") == (128, 128), "a hit is as slow as its slowest group"
    assert mixed.counted(metrics.HIT_TOKENS) == {"host": 128, "disk": 128}


def test_a_state_from_disk_stands_for_all_tokens_before_it():
    bench = Bench([group(0, "gdn", 64)], alignment=64, modes={0: "align"})
    request = bench.request("a", 300)
    bench.know(request, [3], tier=1)
    bench.side.on_new_request(request)
    assert bench.offer(request) == 256
    bench.load_of(request, 256)
    assert bench.side.hit_tiers("a") == (0, 256)


def test_an_order_for_blocks_that_no_chunk_fills_is_an_order_to_fail(mixed, caplog):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    mixed.compute(request, 256)  # window blocks from the first token on
    mixed.side.start_load(request, mixed.tables["a"], 256)
    (order,) = mixed.step().loads
    assert (order.req_id, order.parts) == ("a", ())
    assert "could not be ordered" in caplog.text
    assert "blocks that no chunk fills" in caplog.text
    assert not mixed.store.tickets
    mixed.failed(request, order)
    assert mixed.retry(request) == 0


def test_a_load_without_enough_blocks_is_ordered_to_fail(bench, caplog):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    bench.compute(request, 2 * SPAN)
    bench.side.start_load(request, bench.tables["a"], 4 * SPAN)
    (order,) = bench.step().loads
    assert (order.req_id, order.parts) == ("a", ())
    assert "could not be ordered" in caplog.text


def test_a_load_of_an_unknown_request_is_ordered_to_fail(bench):
    request = bench.request("never seen", 80)
    assert bench.load_of(request, SPAN).parts == ()
    bench.side.update(None, {"never seen"})


def test_a_store_that_went_away_meanwhile_fails_the_load(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    bench.connected = False
    order = bench.load_of(request, 4 * SPAN)
    assert order.store == ""
    bench.failed(request, order, reason="the store is gone")
    assert bench.counted(metrics.LOAD_FAILURES) == {"store_gone": 1}


# -- failures ----------------------------------------------------------------------------------


def test_after_a_failure_one_shorter_offer_then_none(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    bench.failed(request, bench.load_of(request, 4 * SPAN), index=2)
    bench.now += 10
    assert bench.retry(request) == 2 * SPAN
    order = bench.load_of(request, 2 * SPAN)
    assert order.parts[0].keys == bench.keys(request, (0, 1))
    bench.failed(request, order, index=1)
    bench.now += 10
    assert bench.retry(request) == 0
    assert len(bench.store.asked) == 1, "asking again would only find the same"
    assert bench.outcomes == ["failed"]
    bench.compute(request)
    (order,) = bench.step((request, 80)).stores
    assert order.keys == bench.keys(request, range(1, 5)), "what was lost is stored again"


def test_a_shorter_offer_that_the_engine_does_not_take_is_withdrawn(mixed):
    """It has no room for it and never will: it counts the blocks of the failed load still."""
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    mixed.failed(request, mixed.load_of(request, 256), part=STATE)
    assert mixed.retry(request) == 192
    assert mixed.offer(request) == 0
    assert mixed.offer(request) == 0
    assert mixed.outcomes == ["failed"]
    assert len(mixed.store.asked) == 1


def test_a_first_offer_that_the_engine_does_not_take_stands(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert [mixed.offer(request) for _ in range(3)] == [256] * 3


def test_a_request_that_was_loaded_after_a_failure_may_be_loaded_again(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    mixed.failed(request, mixed.load_of(request, 256), part=STATE)
    assert mixed.retry(request) == 192
    mixed.load_of(request, 192)
    mixed.loaded(request, 192)
    mixed.free("a")  # preempted
    request.num_computed_tokens = 0
    assert mixed.offer(request) == 192


def test_a_failure_names_a_part_and_a_chunk_of_it(mixed):
    request = mixed.arrive("a", 400, know=6)
    assert mixed.offer(request, local=128) == 256
    order = mixed.load_of(request, 256, local=128)
    assert order.parts[0].keys == mixed.keys(request, (2, 3, 4, 5), FULL)
    mixed.failed(request, order, part=0, index=2)
    assert mixed.retry(request, local=128) == 128, "chunk 4 of attention is lost"
    order = mixed.load_of(request, 128, local=128)
    mixed.failed(request, order, part=1, index=0)
    assert mixed.retry(request) == 0


@pytest.mark.parametrize(("part", "left"), [(WINDOW, 192), (STATE, 192)])
def test_a_window_or_state_that_is_lost_moves_the_boundary(mixed, part, left):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    mixed.failed(request, mixed.load_of(request, 256), part=part)
    assert mixed.retry(request) == left
    order = mixed.load_of(request, left)
    assert order.parts[STATE].keys == mixed.key(request, 2, STATE)
    mixed.loaded(request, left)
    assert mixed.outcomes[-1] == "partly"


def test_only_what_was_lost_is_stored_again(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    mixed.failed(request, mixed.load_of(request, 256), part=WINDOW)
    assert mixed.retry(request) == 192
    mixed.load_of(request, 192)
    mixed.loaded(request, 192)
    mixed.free("a")
    (order,) = mixed.step((mixed.compute(request), 108)).stores
    assert (order.group, order.keys) == (WINDOW, mixed.key(request, 3, WINDOW))


def test_what_a_resumed_request_lost_is_stored_when_it_is_computed_again(bench):
    request = bench.compute(bench.arrive("a", 80))
    assert len(bench.step((request, 80)).stores[0].blocks) == 5
    bench.free("a")
    request.num_computed_tokens, bench.now = 0, bench.now + 1
    bench.know(request, range(4))
    assert bench.offer(request) == 4 * SPAN
    bench.failed(request, bench.load_of(request, 4 * SPAN), index=1)
    assert bench.retry(request) == SPAN
    bench.failed(request, bench.load_of(request, SPAN), index=0)
    bench.compute(request)
    (order,) = bench.step((request, 32)).stores
    assert order.keys == bench.keys(request, range(2))


def test_a_load_without_parts_that_fails_leaves_nothing_to_offer(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    bench.side.start_load(request, ([],), 4 * SPAN)
    (order,) = bench.step().loads
    bench.tables["a"] = ([],)
    bench.failed(request, order)
    assert bench.retry(request) == 0


def test_each_worker_reports_the_same_failure_in_its_own_step(bench):
    request = bench.arrive("a", 80, know=4)
    assert bench.offer(request) == 4 * SPAN
    order = bench.load_of(request, 4 * SPAN)
    for index in (3, 2):
        bench.failed(request, order, index=index, ended=False)
    bench.side.update(None, {"a"})
    assert bench.retry(request) == 2 * SPAN, "one failure, at the earlier chunk"
    assert bench.counted(metrics.LOAD_FAILURES) == {"lost": 1}


def test_workers_may_miss_different_groups(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    order = mixed.load_of(request, 256)
    mixed.failed(request, order, part=STATE, ended=False)
    mixed.failed(request, order, part=FULL, index=2)
    assert mixed.retry(request) == 128
    mixed.loaded(request, 0)


def test_a_late_report_of_an_earlier_load_is_ignored(bench):
    request = bench.arrive("a", 80, know=4)
    bench.offer(request)
    first = bench.load_of(request, 4 * SPAN)
    bench.failed(request, first, index=2)
    assert bench.retry(request) == 2 * SPAN
    bench.load_of(request, 2 * SPAN)
    bench.failed(request, first, index=0, ended=False)
    bench.loaded(request, 2 * SPAN)
    assert bench.outcomes == ["partly"]


def test_a_failure_of_another_load_or_a_forgotten_request_is_ignored(bench):
    request = bench.arrive("a", 80, know=4)
    bench.offer(request)
    order = bench.load_of(request, 4 * SPAN)
    stranger = bench.request("b", 80)
    bench.tables["b"] = ([],)
    bench.failed(stranger, order)
    bench.loaded(request, 4 * SPAN)
    bench.failed(request, order)
    assert bench.offer(request) == 4 * SPAN
    assert bench.counted(metrics.LOAD_FAILURES) == {}
