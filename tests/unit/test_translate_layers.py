"""vLLM's cache specs and tensors in kvfold's terms: kinds, sizes, encodings, pages."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiddenStateCacheSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm_configs import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    engine_config,
    full,
    group,
    kv_config,
    mla,
    model_config,
    speculative,
    state,
    states,
    view,
)

from kvfold.errors import ConfigError, PlanError
from kvfold.spec import LayerSpec
from kvfold.vllm.translate_layers import (
    STATES,
    encoding,
    kind,
    layer_record,
    layer_specs,
    pages,
    stored_layers,
    window_tokens,
)

ATTENTION = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
ROW = ATTENTION | {"num_kv_heads": 1}


def window(**changes):
    return SlidingWindowSpec(**ATTENTION, **{"sliding_window": 64} | changes)


# -- kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "wanted", "tokens"),
    [
        (full(), "full_attention", None),
        (full(sliding_window=64), "full_attention", None),  # all of whose tokens are kept
        (full(attention_chunk_size=64), "full_attention", None),
        (mla(), "mla", None),
        (mla(cache_role=SparseCacheRole.INDEXER), "indexer", None),
        (window(), "sliding_window", 64),
        (window(extra_retained_tokens=3), "sliding_window", 67),
        (SlidingWindowMLASpec(**ROW, sliding_window=128), "sliding_window_mla", 128),
        (ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=48), "chunked_local", 48),
        (state("MAMBA1"), "mamba1", None),
        (state("MAMBA2"), "mamba2", None),
        (state("SHORT_CONV"), "short_conv", None),
        (state("LINEAR"), "mamba2", None),
        (state("GDN_ATTN"), "gdn", None),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_each_spec_has_its_kind_and_window(spec, wanted, tokens):
    assert kind("a", spec) == wanted
    assert window_tokens(spec) == tokens


def test_every_recurrent_state_of_the_engine_is_known_or_refused_by_name():
    for backend in MambaAttentionBackendEnum:
        if backend.name in STATES:
            assert kind("a", state(backend.name)) == STATES[backend.name]
        else:
            with pytest.raises(PlanError, match=r"layer 'a' cache='MambaSpec'"):
                kind("a", state(backend.name))


@pytest.mark.parametrize(
    "spec",
    [
        CrossAttentionSpec(**ATTENTION),
        EncoderOnlyAttentionSpec(**ATTENTION),
        CircularBufferSpec(**ROW),
        HiddenStateCacheSpec(**ROW),
        RSWASpec(**ATTENTION, rswa_window=64),
        SinkFullAttentionSpec(**ATTENTION, sink_len=4),
        SimpleNamespace(),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_other_caches_are_refused_by_layer_and_name(spec):
    """Also those that derive from a spec that is known: they add a meaning that is not."""
    with pytest.raises(PlanError, match=rf"layer 'layers.3' cache='{type(spec).__name__}'"):
        kind("layers.3", spec)


def test_states_that_are_not_cached_are_refused():
    with pytest.raises(PlanError, match=r"layer 'a' mamba_cache_mode='none': expected align"):
        kind("a", state(mode="none"))


def test_containers_are_unwrapped_and_groups_outside_left_out():
    specs = {"a": full(), "b": mla()}
    container = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
    ring = group(CircularBufferSpec(**ROW), "ring")
    config = kv_config(group(container, "a", "b"), ring, group(mla(), "c"))
    assert layer_specs(config, 0) == specs
    assert dict(stored_layers(config)) == {**specs, "c": mla()}


# -- records -----------------------------------------------------------------------------------


def record(spec, tensor, *, name="layers.0.attn", draft=False, **changes):
    return LayerSpec(**layer_record(engine_config(**changes), name, spec, tensor, draft=draft))


def rows(heads=HEADS, row=2 * DIM, split=1):
    return view("LBHNC", 1, heads, row, split)[0]


def test_attention_is_recorded_with_its_heads():
    one = record(full(), rows())
    assert (one.kind, one.block_size, one.num_kv_heads, one.head_bytes) == (
        "full_attention", 16, 2, 64,
    )  # fmt: skip
    assert (one.total_kv_heads, one.max_tp_shards, one.dcp_sharded) == (HEADS, HEADS, True)
    assert (one.dtype, one.page_bytes, one.engine_page_bytes) == ("float32", 2048, 2048)
    tp2 = {"parallel_config__tensor_parallel_size": 2}
    assert record(full(num_kv_heads=1), rows(1), **tp2).max_tp_shards == HEADS
    assert record(full(), rows(), **tp2).max_tp_shards is None, "the config says something else"


def test_rows_are_the_same_on_every_rank_whatever_the_spec_declares():
    for spec in (mla(), mla(max_tp_shards=None)):
        one = record(spec, rows(1, 24))
        assert (one.kind, one.max_tp_shards, one.total_kv_heads) == ("mla", 1, 1)
    small = SlidingWindowMLASpec(**ROW, sliding_window=128, tokens_per_state=4)
    one = record(small, torch.zeros(BLOCKS, 1, BLOCK // 4, DIM))
    assert (one.kind, one.window, one.tokens_per_state) == ("sliding_window_mla", 128, 4)
    assert (one.max_tp_shards, one.page_bytes) == (1, 4 * DIM * 4)


def test_pages_count_without_what_the_engine_pads():
    padded = mla(page_size_padded=2048)
    one = record(padded, rows(1, 24))
    assert (one.page_bytes, one.engine_page_bytes) == (16 * 96, 2048)


def test_an_indexer_s_rows_are_not_divided():
    one = record(mla(cache_role=SparseCacheRole.INDEXER), rows(1, 24))
    assert (one.kind, one.encoding) == ("indexer", "whole_page")


def test_layers_may_differ_in_their_heads():
    class Arch(SimpleNamespace):
        def __getitem__(self, layer):
            return SimpleNamespace(total_num_kv_heads=self.per_layer_overrides[layer])

    arch = Arch(per_layer_overrides=[2, 8], total_num_kv_heads=8)
    changes = {"model_config": model_config(model_arch_config=arch)}
    assert record(full(), rows(), **changes).max_tp_shards == 2
    assert record(full(), rows(), name="layers.1.attn", **changes).max_tp_shards is None
    eight = record(full(num_kv_heads=8), rows(8), name="layers.1.attn", **changes)
    assert eight.max_tp_shards == 8
    assert record(full(), rows(), name="layers.2.attn", **changes).max_tp_shards is None
    assert record(full(), rows(), name="attn", **changes).max_tp_shards is None


def test_a_draft_s_heads_are_its_own():
    arch = SimpleNamespace(per_layer_overrides=None, total_num_kv_heads=8)
    changes = {"speculative_config": speculative(model_arch_config=arch)}
    eight = full(num_kv_heads=8)
    assert record(eight, rows(8), draft=True, **changes).max_tp_shards == 8
    assert record(eight, rows(8), draft=False, **changes).max_tp_shards is None
    assert record(full(), rows(), draft=False, **changes).max_tp_shards == HEADS


def test_heads_that_share_a_slot_are_not_told_apart():
    packed = full(num_head_slots=1, state_content_bytes=4 * DIM * 4)
    one = record(packed, rows(1, 4 * DIM))
    assert (one.num_kv_heads, one.max_tp_shards, one.total_kv_heads) == (1, None, None)
    assert one.head_bytes == 4 * DIM * 4


def test_a_state_is_one_row_of_bytes():
    one = record(state(), states()[0])
    assert (one.kind, one.block_size, one.tokens_per_state) == ("gdn", 32, 32)
    assert (one.page_bytes, one.engine_page_bytes, one.dtype) == (40, 64, "float32+float32")
    assert (one.encoding, one.dcp_sharded, one.tp_replicated) == ("opaque", False, False)
    everywhere = record(state(tp_replicated=True), states()[0])
    assert (everywhere.encoding, everywhere.tp_replicated) == ("whole_page", True)


def test_several_states_per_token_are_refused():
    with pytest.raises(ConfigError, match="tokens_per_state"):
        record(full(tokens_per_state=Fraction(1, 2)), torch.zeros(BLOCKS, HEADS, 32, 2 * DIM))


# -- pages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "heads", "split", "wanted"),
    [
        ("LBHNC", 2, 1, "heads_first"),
        ("LBNHC", 2, 1, "tokens_first"),
        ("BLHNC", 2, 1, "heads_first"),
        ("BLNHC", 2, 1, "tokens_first"),
        ("LBNHC", 1, 1, "heads_first"),
        ("LBHNC", 1, 4, "heads_first"),
        ("LBHNC", 2, 4, "opaque"),
    ],
)
def test_pages_are_found_by_layout(layout, heads, split, wanted):
    tensors = dict(zip("ab", view(layout, 2, heads, 2 * DIM, split), strict=True))
    config = kv_config(group(full(num_kv_heads=heads), "a", "b"))
    assert encoding(tensors["a"], BLOCKS, heads) == wanted
    assert record(full(num_kv_heads=heads), tensors["a"]).encoding == wanted
    for name, at in pages(tensors, config).items():
        for block in range(BLOCKS):
            start = at.offset + block * at.block_stride
            page = at.memory[start : start + at.page_bytes]
            logical = tensors[name].unflatten(0, (BLOCKS, split))[block]
            order = logical.permute(0, 2, 1, 3) if wanted == "tokens_first" else logical
            assert page.tobytes() == order.contiguous().numpy().tobytes()


def test_heads_outermost_are_no_page():
    tensor = view("BHLNC", 2, 2, 2 * DIM)[0]
    with pytest.raises(PlanError, match="page strides"):
        encoding(tensor, BLOCKS, HEADS)


def test_pages_with_gaps_are_refused():
    backing = torch.zeros(BLOCKS, HEADS, BLOCK, 4 * DIM)
    with pytest.raises(PlanError, match="page strides"):
        encoding(backing[..., : 2 * DIM], BLOCKS, HEADS)


def test_states_in_padded_pages_are_found_by_their_stride():
    tensors = dict(zip("ab", states(2), strict=True))
    config = kv_config(group(state(), "a", "b"))
    found = pages(tensors, config)
    assert found["a"].memory is found["b"].memory, "one allocation"
    for name, at in found.items():
        assert (at.page_bytes, at.block_stride) == (40, 64)
        for block in range(BLOCKS):
            start = at.offset + block * at.block_stride
            page = at.memory[start : start + at.page_bytes]
            assert page.tobytes() == tensors[name][block].numpy().tobytes()


def test_groups_may_lie_in_the_same_bytes_with_strides_of_their_own():
    backing = torch.arange(BLOCKS * 2048, dtype=torch.int64).to(torch.int8)
    attention = backing.view(torch.float32).reshape(BLOCKS, HEADS, BLOCK, 2 * DIM)
    gdn = backing.reshape(BLOCKS, 1, 1, 2048)[..., :40]
    config = kv_config(group(full(), "attn"), group(state(page_size_padded=2048), "state"))
    found = pages({"attn": attention, "state": gdn}, config)
    assert found["attn"].memory is found["state"].memory
    assert [at.block_stride for at in found.values()] == [2048, 2048]
    assert [at.page_bytes for at in found.values()] == [2048, 40]


def test_tensors_of_groups_outside_are_not_looked_at():
    config = kv_config(group(CircularBufferSpec(**ROW), "ring"), group(full(), "a"))
    assert list(pages({"a": rows()}, config)) == ["a"]
