"""One period for all groups, and what each of them stores per period."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_specs import group, layer, outside

from kvfold.errors import PlanError
from kvfold.mesh import Mesh
from kvfold.plan import PlanOptions, plan
from kvfold.spans import look_back_tokens, window_interval_tokens, with_chunks
from kvfold.spec import GroupSpec

V4 = [
    group(0, "mla", 64),
    group(1, "indexer", 64),
    group(2, "mla", 256),
    group(3, "sliding_window_mla", 4, window=128),
    group(4, "sliding_window_mla", 8, window=128),
]


def chunks(groups, alignment, *, dcp=1, blocks=1):
    """(period, blocks per chunk of each group that takes part)."""
    period, chunked = with_chunks(groups, dcp, alignment, blocks)
    return period, [g.blocks_per_chunk for g in chunked if g.prefix_cacheable]


@pytest.mark.parametrize("window", [2, 5, 9, 128, 129, 256, 257, 1000])
def test_the_five_groups_of_deepseek_v4_share_a_period_of_256(window):
    small = [group(3, "sliding_window_mla", 4, window), group(4, "sliding_window_mla", 8, window)]
    period, blocks = chunks([*V4[:3], *small], 256)
    assert period == 256
    assert blocks[:3] == [4, 4, 1]
    assert blocks[3] == min(64, -(-(window - 1) // 4)), "only what a hit at the end looks back on"
    assert blocks[4] == min(32, -(-(window - 1) // 8))


def test_a_small_compressor_block_does_not_cost_a_slot_each():
    _, chunked = with_chunks(V4, 1, 256, 1)
    planned = plan(chunked, Mesh(tp=1), PlanOptions(1, None)).stored
    assert [g.tokens_per_chunk for g in planned] == [256, 256, 256, 128, 128]
    row = V4[3].layers[0].head_bytes
    assert planned[3].chunk_bytes == 128 * row


def test_the_alignment_is_the_period_where_blocks_divide_it():
    states = group(1, "gdn", 4096)
    assert chunks([group(0, block=64), states], 64) == (64, [1, 1]), "hits inside a state's block"
    assert chunks([group(0, block=64), states], 4096) == (4096, [64, 1])
    assert chunks([group(0, block=64), group(1, block=4096)], 64) == (4096, [64, 1])


def test_a_group_outside_prefix_caching_keeps_its_place_and_binds_nothing():
    states, tail, attention = group(0, "kda", 4480), outside(1), group(2, block=64)
    period, chunked = with_chunks([states, tail, attention], 1, 4480, 1)
    assert period == 4480
    assert [g.index for g in chunked] == [0, 1, 2]
    assert chunked[1] == tail
    assert [chunked[0].blocks_per_chunk, chunked[2].blocks_per_chunk] == [1, 70]


def test_a_window_longer_than_the_period_fills_its_chunks():
    assert chunks([group(0), group(1, "sliding_window", 16, window=1024)], 64) == (64, [4, 4])


@pytest.mark.parametrize(("size", "blocks"), [(64, 4), (48, 3), (16, 1), (17, 2), (4096, 16)])
def test_chunked_attention_looks_back_on_its_own_chunk(size, blocks):
    groups = [group(0, block=256), group(1, "chunked_local", 16, window=size)]
    assert chunks(groups, 256) == (256, [1, blocks])


def test_the_next_token_sees_itself_so_a_window_looks_back_one_less():
    assert look_back_tokens(layer("a", "sliding_window", window=17)) == 16
    assert look_back_tokens(layer("a", "sliding_window", window=1)) == 1
    assert look_back_tokens(layer("a", "chunked_local", window=16)) == 16
    assert look_back_tokens(layer("a")) == look_back_tokens(layer("a", "gdn")) == 0
    assert chunks([group(0, block=64), group(1, "sliding_window", 16, window=17)], 64)[1][1] == 1
    assert chunks([group(0, block=64), group(1, "sliding_window", 16, window=18)], 64)[1][1] == 2


def test_the_widest_window_of_a_group_counts():
    layers = (layer("a", "sliding_window", window=17), layer("b", "sliding_window", window=49))
    assert chunks([group(0, block=64), GroupSpec(1, layers)], 64) == (64, [1, 3])


def test_several_units_per_chunk():
    groups = [group(0), group(1, "sliding_window", 16, window=40), group(2, "mamba2", 32)]
    assert chunks(groups, 32, blocks=3) == (96, [6, 3, 1])


@pytest.mark.parametrize(("dcp", "period"), [(1, 64), (2, 128), (8, 512)])
def test_context_parallel_blocks_span_more_tokens(dcp, period):
    container = GroupSpec.of(0, [layer("a", "mla", 64), layer("a.indexer", "indexer", 64)])
    assert chunks([container], period, dcp=dcp) == (period, [1])


def test_states_are_not_sharded_by_token():
    groups = [group(0, block=16), group(1, "mamba2", 16)]
    period, chunked = with_chunks(groups, 2, 32, 1)
    planned = plan(chunked, Mesh(tp=2, dcp=2), PlanOptions(1, 16)).stored
    assert period == 32
    assert [g.tokens_per_block for g in planned] == [32, 16]


def test_a_window_counts_its_blocks_by_the_tokens_of_all_ranks():
    groups = [group(0, block=64), group(1, "sliding_window", 16, window=65)]
    assert chunks(groups, 64, dcp=1) == (64, [1, 4])
    assert chunks(groups, 128, dcp=2) == (128, [1, 2])


def test_a_period_out_of_bounds_is_refused_with_what_fits():
    groups = [group(0, block=64)]
    assert chunks(groups, 64, blocks=16_384)[0] == 1 << 20
    with pytest.raises(PlanError, match=r"blocks_per_chunk=16385: expected at most 16384"):
        chunks(groups, 64, blocks=16_385)


@st.composite
def models(draw):
    """Groups of blocks that divide one another, with an alignment."""
    groups = []
    for index in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["mla", "sliding_window_mla", "gdn", "chunked_local"]))
        block = 1 << draw(st.integers(0, 6))
        groups.append(group(index, kind, block, draw(st.integers(1, 300))))
    return groups, 1 << draw(st.integers(0, 7)), draw(st.sampled_from([1, 2, 8]))


@given(models(), st.integers(1, 3))
def test_chunks_cover_what_hits_need_and_no_block_more(model, blocks):
    groups, alignment, dcp = model
    period, chunked = with_chunks(groups, dcp, alignment, blocks)
    assert period % (alignment * blocks) == 0
    for g in chunked:
        first = g.layers[0]
        span = first.block_size * (dcp if first.dcp_sharded else 1)
        width = g.blocks_per_chunk
        if first.kind == "gdn":
            assert width == 1
            continue
        assert period % span == 0
        assert 1 <= width <= period // span
        looks = look_back_tokens(first)
        if looks == 0:
            assert width * span == period
        else:
            assert width * span >= min(looks, period)
            assert (width - 1) * span < looks


# -- how often windows are stored --------------------------------------------------------------


def interval(groups, alignment=64):
    period, chunked = with_chunks(groups, 1, alignment, 1)
    stored = plan(chunked, Mesh(tp=1), PlanOptions(1, None)).stored
    return window_interval_tokens(stored, period)


def wide(index, kind, head_bytes, window=None, block=64):
    return group(index, kind, block, window, head_bytes=head_bytes)


def test_windows_take_no_more_than_what_stores_every_token():
    # A tail of 256 tokens of 16 bytes is as large as 1,024 tokens of 4.
    groups = [wide(0, "mla", 4), wide(1, "sliding_window_mla", 16, window=257)]
    assert interval(groups) == 1024
    assert interval([*groups, wide(2, "sliding_window_mla", 16, window=257)]) == 2048
    assert interval([wide(0, "mla", 40), groups[1]]) == 64, "windows that are cheap: everywhere"


def test_an_interval_no_longer_than_a_window_would_save_nothing():
    same = wide(1, "sliding_window_mla", 4, window=257)
    assert interval([wide(0, "mla", 4), same]) == 64
    assert interval([wide(0, "mla", 4), same, wide(2, "sliding_window_mla", 1, window=65)]) == 320


def test_without_windows_or_whole_groups_there_is_no_interval():
    assert interval([wide(0, "mla", 4), group(1, "gdn", 64)]) == 64
    assert interval([wide(0, "sliding_window_mla", 4, window=257)]) == 64


def test_drafts_and_states_do_not_count():
    base = [wide(0, "mla", 4), wide(1, "sliding_window_mla", 16, window=257)]
    draft = group(0, "mla", 64, draft=True, head_bytes=4000)
    assert interval([*base, draft, group(2, "gdn", 64, head_bytes=4000)]) == 1024


@given(models())
def test_an_interval_is_a_period_or_longer_than_every_window(model):
    groups, alignment, _ = model
    period, chunked = with_chunks(groups, 1, alignment, 1)
    stored = plan(chunked, Mesh(tp=1), PlanOptions(1, None)).stored
    found = window_interval_tokens(stored, period)
    assert found % period == 0
    windows = [look_back_tokens(g.layers[0].spec) for g in stored]
    assert found == period or found > max(windows)
