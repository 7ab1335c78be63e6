"""What the store has lost is taken back: on its way to the engine's loop, and as KV events."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from scheduler_bench import Bench, hybrid, namespace
from test_events import SPAN, keys_of, make_events, make_request, order, remove, told
from vllm.distributed.kv_events import BlockStored

from kvfold.vllm import events as events_room
from kvfold.vllm import evictions as room
from kvfold.vllm.evictions import Evictions, listening_link
from kvfold.vllm.metrics import Recorder

ONE, OTHER = b"1" * 32, b"2" * 32


class Told:
    """Events that only notes what it is told."""

    enabled = False

    def __init__(self):
        self.calls = []

    def removed(self, *lost):
        self.calls.append(lost)

    def cleared(self):
        self.calls.append("cleared")

    def ordered(self, *order):
        pass

    def take(self):
        taken, self.calls = self.calls, []
        return taken


def listening(make=Bench):
    evictions = Evictions()
    bench = make(settings={"evictions": evictions, "events": Told()})
    return bench.side, evictions


def test_keys_wait_by_namespace_until_they_are_taken():
    evictions = Evictions()
    assert not evictions.pending
    evictions.add(ONE, b"a" * 32)
    evictions.add(OTHER, b"b" * 32)
    evictions.add(ONE, b"c" * 32)
    assert evictions.pending
    assert evictions.take() == (False, {ONE: b"a" * 32 + b"c" * 32, OTHER: b"b" * 32})
    assert not evictions.pending
    assert evictions.take() == (False, {})


@pytest.mark.parametrize("lose", [lambda e: e.lose_all(), lambda e: e.add(bytes(32), b"")])
def test_after_everything_was_lost_only_later_losses_are_named(lose):
    evictions = Evictions()
    evictions.add(ONE, b"a" * 32)
    lose(evictions)
    evictions.add(ONE, b"b" * 32)
    assert evictions.pending
    assert evictions.take() == (True, {ONE: b"b" * 32})
    assert evictions.take() == (False, {})


def test_more_than_can_wait_is_everything(monkeypatch):
    monkeypatch.setattr(room, "MAX_BYTES", 64)
    evictions = Evictions()
    evictions.add(ONE, b"a" * 64)
    evictions.add(OTHER, b"b" * 32)
    assert evictions.take() == (True, {})
    evictions.add(ONE, b"a" * 64)
    assert evictions.take() == (False, {ONE: b"a" * 64})


def test_losses_are_told_by_group_and_those_of_other_epochs_are_not():
    side, evictions = listening(hybrid)
    evictions.add(namespace(2), b"a" * 64)
    evictions.add(OTHER, b"x" * 32)
    assert side.take_events() == [(2, namespace(2), b"a" * 64)]
    side.reset()
    evictions.add(namespace(2), b"b" * 32)
    evictions.add(side.namespaces[1], b"c" * 32)
    assert side.take_events() == ["cleared", (1, side.namespaces[1], b"c" * 32)]


def test_a_lost_store_withdraws_everything_before_what_comes_later():
    side, evictions = listening()
    evictions.add(namespace(0), b"a" * 32)
    evictions.lose_all()
    evictions.add(namespace(0), b"b" * 32)
    side.withdraw()
    assert side.take_events() == ["cleared", (0, namespace(0), b"b" * 32)]
    side.withdraw()
    assert side.take_events() == []


def test_without_events_there_is_nothing_to_withdraw():
    side = Bench().side
    side.withdraw()
    assert side.take_events() == []


def test_only_engines_with_events_ask_for_evictions(monkeypatch):
    made = []
    monkeypatch.setattr(room, "StoreLink", lambda *given, **more: made.append((given, more)))
    evictions = Evictions()
    listening_link(None, "peer", None)
    listening_link(None, "peer", evictions)
    (_, without), (given, listens) = made
    assert without == {}
    assert given == (None, "peer")
    for event, given in (("on_client", (None, 1)), ("on_gone", (1,))):
        listens[event](*given)
        assert evictions.take() == (True, {})
    listens["on_evicted"](ONE, b"a" * 32)
    assert evictions.take() == (False, {ONE: b"a" * 32})


# -- losses while jobs run ---------------------------------------------------------------------


def test_a_chunk_lost_before_its_job_is_reported_is_not_announced():
    events, request = make_events(), make_request()
    order(events, request, [16, 32], job=1)
    order(events, request, [32, 48], job=2)
    assert remove(events, request, [32]) == []
    order(events, request, [32], job=3)
    events.ended(2, b"\1\1")
    events.ended(1, b"\1\1")
    first, second = events.take()
    assert (first.token_ids, second.token_ids) == (list(range(32, 48)), list(range(16)))
    events.ended(3, b"\1")
    [event] = events.take()
    assert isinstance(event, BlockStored)
    assert event.token_ids == list(range(16, 32)), "it was ordered after the loss"
    assert not events._gone


def test_losses_without_a_running_job_are_not_remembered():
    events, request = make_events(), make_request()
    remove(events, request, [16])
    assert len(told(events, request, [16], job=5)) == 1
    order(events, request, [32], job=6)
    remove(events, request, [48])
    events.ended(6, b"\1")
    assert not events._gone, "the last job has ended"
    order(events, request, [64], job=7)
    remove(events, request, [48])
    events.cleared()
    assert not events._gone
    events.take()
    assert len(told(events, request, [48], job=7)) == 1


def test_more_losses_than_are_remembered_silence_the_jobs_that_run(monkeypatch):
    recorder, request = Recorder(), make_request()
    events = make_events(recorder=recorder)
    order(events, request, [SPAN], job=1)
    monkeypatch.setattr(events_room, "MAX_ANNOUNCED", 1)
    events.removed(0, namespace(0), keys_of(request, [32, 48]))
    events.ended(1, b"\1")
    assert events.take() == []
    assert recorder.take().data == {"events_dropped": {"": 1}}
    assert len(told(events, request, [SPAN], job=2)) == 1
