"""Whether loads leave the engine the blocks that all loaded requests need."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvfold.vllm.room import STATE_BLOCKS, EngineGroup, Room

FULL = EngineGroup("all", 16)


def test_what_a_request_holds_at_most_by_kind_of_group():
    def most(group, tokens=1000, computed=0, step=128):
        return Room([group], 10**6, step).most_blocks(tokens, computed) - 1

    assert most(FULL) == 63
    assert most(EngineGroup("state", 16)) == STATE_BLOCKS
    assert most(EngineGroup("ring", 16)) == 1
    window = EngineGroup("window", 16, 64)
    assert most(window) == 4 + 8 + 2, "the window, a step, and both ends cut blocks"
    assert most(window, computed=984) == 4 + 1 + 2
    assert most(window, tokens=40) == 3, "no more than all"


def test_a_load_must_leave_room_for_those_that_hold_blocks():
    room = Room([FULL], 101, 64)
    assert room.empty
    assert room.has("b", 800, 400, again=False)
    room.hold("a", 800, 400)
    assert not room.empty
    assert not room.has("b", 800, 400, again=False), "51 and 51 of 100"
    assert room.has("b", 768, 400, again=False)
    room.release("a")
    assert room.has("b", 800, 400, again=False)
    room.release("unknown")


def test_after_a_failed_load_the_engine_reserves_twice():
    room = Room([FULL], 101, 64)
    assert room.has("b", 784, 400, again=True)
    assert not room.has("b", 800, 400, again=True)
    room.hold("a", 784, 0)
    assert not room.has("b", 800, 400, again=False)
    assert room.has("a", 784, 400, again=True), "what it is reserved itself is in the twice"


def test_a_request_counts_once():
    room = Room([FULL], 101, 64)
    room.hold("a", 400, 100)
    room.hold("a", 400, 0)
    assert room.has("b", 1168, 0, again=False)
