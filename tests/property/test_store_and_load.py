"""What one request stores is what another loads: every block gets the bytes of its own tokens.

Blocks of the engine hold, instead of bytes, the group and the number of the block; a chunk in the
store is the row of them that an order named.
"""

from __future__ import annotations

from math import lcm

import pytest

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import Bench, split
from small_specs import group, outside

from kvfold.vllm.messages import NO_BLOCK

kinds = st.one_of(
    st.tuples(st.just("mla"), st.sampled_from([8, 16]), st.none()),
    st.tuples(st.just("sliding_window_mla"), st.sampled_from([4, 8]), st.integers(1, 100)),
    st.tuples(st.just("chunked_local"), st.sampled_from([8, 16]), st.integers(1, 100)),
    st.tuples(st.just("gdn"), st.sampled_from([16, 64]), st.none()),
)


@st.composite
def engines(draw):
    """Two requests of one engine; the second finds what the first one stored."""
    shapes = [("mla", 16, None), *draw(st.lists(kinds, max_size=3))]
    sizes = [64 if shape[0] == "gdn" else draw(st.sampled_from([4, 64])) for shape in shapes]
    groups = [group(i, *shapes[i], head_bytes=size) for i, size in enumerate(sizes)]
    groups.insert(1, outside(len(groups)))
    if draw(st.booleans()):
        groups.append(group(0, "mla", 16, draft=True))
    modes = {i: "align" for i, shape in enumerate(shapes) if shape[0] == "gdn"}
    return Bench(groups, alignment=16, hash_tokens=4, modes=modes, num_blocks=4000,
                 chunk=draw(st.integers(1, 3)), lag=draw(st.sampled_from([0, 3])))  # fmt: skip


def label(bench, name):
    """What each block of a request holds: (engine's group, its place in the table)."""
    return {
        block.block_id: (index, place)
        for index, table in enumerate(bench.tables[name])
        for place, block in enumerate(table)
        if not block.is_null
    }


def contents(orders, held):
    """The chunks that a step stores, by group and key: what the copied blocks hold."""
    return {
        (order.group, key): [held[block] for block in row]
        for order in orders.stores
        for key, row in zip(split(order.keys), order.blocks.tolist(), strict=True)
    }


@settings(max_examples=200)
@given(engines(), st.integers(1, 300), st.lists(st.integers(1, 100), max_size=4), st.data())
def test_every_block_that_is_loaded_gets_its_own_tokens(bench, tokens, steps, data):
    g = bench.geometry
    first = bench.compute(bench.arrive("a", tokens))
    held = label(bench, "a")
    stored, done = {}, 0
    for count in (*steps, tokens):
        count = min(count, tokens - done)
        done += count
        states = [(shape, end) for shape in g.groups if shape.handed_over
                  for end in range(g.period, done + 1, g.period)]  # fmt: skip
        ids = {shape.index: bench.ids("a", shape.index) for shape, _ in states}
        handed = [(s.index, ids[s.index][-(-end // s.tokens_per_block) - 1], end)
                  for s, end in states]  # fmt: skip
        stored |= contents(bench.step((first, count), handed={"a": handed}), held)
    bench.finish(first)
    stored |= contents(bench.step(), held)
    gone = data.draw(st.lists(st.sampled_from(sorted(stored)), max_size=3)) if stored else []
    bench.store.tiers = {place[1]: 2 for place in stored if place not in gone}

    second = bench.arrive("b", tokens)
    unit = lcm(g.period, *(shape.tokens_per_block for shape in g.groups))
    local = data.draw(st.integers(0, tokens // unit)) * unit
    offered = bench.offer(second, local)
    if not offered:
        return
    order = bench.load_of(second, offered, local)
    wanted = label(bench, "b")
    filled = {}
    for part in order.parts:
        shape = g.groups[part.group]
        for key, row in zip(split(part.keys), part.blocks.tolist(), strict=True):
            for block, content in zip(row, stored[part.group, key], strict=True):
                if block != NO_BLOCK:
                    assert wanted[block] == content
                    assert (part.group, block) not in filled, "each block once"
                    filled[part.group, block] = content
    for shape in g.groups:
        after = -(-local // shape.tokens_per_block)
        for block, (index, place) in wanted.items():
            if index == shape.index and not shape.optional:
                assert ((shape.number, block) in filled) == (place >= after)
