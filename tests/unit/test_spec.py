"""Cache kinds, containers, merging, and total heads."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from kvfold.errors import ConfigError
from kvfold.spec import (
    STATE_KINDS,
    GroupSpec,
    LayerSpec,
    UniformSpec,
    declared_shards,
    iter_layer_specs,
    merge,
)


def attention(name: str = "a", **changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {
        "name": name,
        "kind": "full_attention",
        "block_size": 16,
        "num_kv_heads": 2,
        "head_bytes": 256,
        "max_tp_shards": 4,
    }
    return LayerSpec(**(fields | changes))


def mla(name: str = "m", **changes: Any) -> LayerSpec:
    return attention(name, **({"kind": "mla", "num_kv_heads": 1, "max_tp_shards": 1} | changes))


def test_page_bytes_are_heads_by_states_by_bytes() -> None:
    assert attention().page_bytes == 2 * 16 * 256
    compressed = mla(tokens_per_state=4, head_bytes=584)
    assert compressed.states_per_block == 4
    assert compressed.page_bytes == compressed.engine_page_bytes == 4 * 584
    assert mla(engine_page_bytes=8192).page_bytes == 16 * 256


def test_an_opaque_page_has_the_size_it_is_given() -> None:
    assert attention(encoding="opaque", page_bytes=12345).page_bytes == 12345


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": ""}, "layer name"),
        ({"kind": "mamba"}, "kind"),
        ({"encoding": "BNHC"}, "encoding"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"num_kv_heads": "2"}, "num_kv_heads"),
        ({"head_bytes": -1}, "head_bytes"),
        ({"tokens_per_state": 3}, "tokens_per_state"),
        ({"max_tp_shards": 0}, "max_tp_shards"),
        ({"total_kv_heads": 8}, "max_tp_shards"),
        ({"page_bytes": 100}, "page_bytes"),
        ({"engine_page_bytes": 100}, "engine_page_bytes"),
        ({"dcp_sharded": 1}, "dcp_sharded"),
        ({"dtype": None}, "dtype"),
        ({"kind": "mla", "max_tp_shards": 1}, "num_kv_heads"),
        ({"kind": "mla", "num_kv_heads": 1}, "max_tp_shards"),
        (
            {"kind": "mla", "num_kv_heads": 1, "max_tp_shards": 1, "total_kv_heads": 2},
            "total_kv_heads",
        ),
    ],
)
def test_a_bad_field_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        attention(**changes)


def state(name: str = "s", **changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {
        "name": name,
        "kind": "gdn",
        "block_size": 16,
        "tokens_per_state": 16,
        "num_kv_heads": 1,
        "head_bytes": 1000,
        "dcp_sharded": False,
        "encoding": "opaque",
    }
    return LayerSpec(**(fields | changes))


@pytest.mark.parametrize("kind", sorted(STATE_KINDS))
def test_a_block_of_a_state_kind_is_one_state(kind: Any) -> None:
    assert state(kind=kind).states_per_block == 1
    assert state(kind=kind).page_bytes == 1000


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dcp_sharded": True}, "'s' dcp_sharded"),
        ({"tokens_per_state": 1}, "'s' tokens_per_state"),
        ({"num_kv_heads": 2}, "'s' max_tp_shards"),
        ({"max_tp_shards": 1}, "'s' max_tp_shards.*tp_replicated"),
        ({"encoding": "heads_first"}, "'s' encoding"),
        ({"encoding": "whole_page"}, "'s' encoding.*every rank"),
        ({"tp_replicated": "yes"}, "'s' tp_replicated"),
        ({"window": 4}, "'s' window"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        state(**changes)


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local", "sliding_window_mla"])
def test_a_recycled_kind_has_a_window_and_no_other_has(kind: Any) -> None:
    fields: dict[str, Any] = {"kind": kind, "num_kv_heads": 1, "max_tp_shards": 1}
    assert attention(window=128, **fields).window == 128
    with pytest.raises(ConfigError, match="'a' window=None"):
        attention(**fields)
    with pytest.raises(ConfigError, match=r"'a' window=128.*unset"):
        attention(window=128)


@pytest.mark.parametrize("kind", ["mla", "indexer", "sliding_window_mla"])
@pytest.mark.parametrize("field", ["num_kv_heads", "total_kv_heads", "max_tp_shards"])
def test_kinds_with_one_row_per_state_have_no_heads(kind: Any, field: str) -> None:
    window = 128 if kind == "sliding_window_mla" else None
    assert mla(kind=kind, window=window, encoding="whole_page").page_bytes == 16 * 256
    with pytest.raises(ConfigError, match=f"'m' {field}"):
        mla(kind=kind, window=window, **{field: 2})


def test_only_states_are_declared_replicated_and_only_equal_pages_are_whole() -> None:
    with pytest.raises(ConfigError, match="'a' tp_replicated"):
        attention(tp_replicated=True)
    with pytest.raises(ConfigError, match="'a' encoding"):
        attention(encoding="whole_page")
    assert state(tp_replicated=True, encoding="whole_page").tp_replicated


@pytest.mark.parametrize("encoding", ["halves_heads_first", "halves_tokens_first"])
def test_halves_say_where_v_begins(encoding: Any) -> None:
    assert attention(encoding=encoding, head_bytes=10).key_bytes == 5
    assert attention(encoding=encoding, head_bytes=10, key_bytes=9).key_bytes == 9
    for head_bytes, key_bytes in ((10, 10), (10, -1), (10, True), (9, 0), (1, 0)):
        with pytest.raises(ConfigError, match="'a' key_bytes"):
            attention(encoding=encoding, head_bytes=head_bytes, key_bytes=key_bytes)
    with pytest.raises(ConfigError, match=r"'m' encoding.*no K and V"):
        mla(encoding=encoding)


@pytest.mark.parametrize("encoding", ["heads_first", "tokens_first", "opaque"])
def test_only_halves_have_key_bytes(encoding: Any) -> None:
    assert attention(encoding=encoding).key_bytes == 0
    with pytest.raises(ConfigError, match=r"'a' key_bytes=5.*together"):
        attention(encoding=encoding, key_bytes=5)


def test_specs_are_frozen_values() -> None:
    assert attention() == attention()
    with pytest.raises(FrozenInstanceError):
        attention().block_size = 32  # type: ignore[misc]


def test_a_container_is_unwrapped_and_a_single_spec_yields_itself() -> None:
    one, two = mla("one"), attention("two")
    assert list(iter_layer_specs(UniformSpec((one, two)))) == [one, two]
    assert list(iter_layer_specs(one)) == [one]
    assert list(iter_layer_specs(GroupSpec.of(0, UniformSpec((one, two)), [0, 1]))) == [one, two]


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (mla("same"), mla("same")),
        (mla("one"), mla("two", block_size=32)),
        (mla("one"), mla("two", dcp_sharded=False)),
    ],
)
def test_a_container_has_distinct_layers_of_one_span(layers: tuple[LayerSpec, ...]) -> None:
    with pytest.raises(ConfigError, match=r"layer|block_size|dcp_sharded"):
        UniformSpec(layers)


def test_a_group_outside_prefix_caching_may_mix_spans() -> None:
    layers = (mla("one"), mla("two", block_size=32))
    assert len(GroupSpec(3, layers, prefix_cacheable=False).layers) == 2
    with pytest.raises(ConfigError):
        GroupSpec(3, layers)


@pytest.mark.parametrize(("index", "stages"), [(-1, (0,)), (True, (0,)), (0, (0, 1))])
def test_a_malformed_group_is_refused(index: int, stages: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="group"):
        GroupSpec(index, (mla(),), stages)


def test_merge_passes_max_tp_shards_through() -> None:
    merged = merge([attention("one"), attention("two"), attention("three")])
    assert merged == attention("one")
    assert merged.max_tp_shards == 4


@pytest.mark.parametrize("other", [None, 8])
def test_merge_refuses_layers_that_disagree_on_shards(other: int | None) -> None:
    with pytest.raises(ConfigError, match=r"'two' max_tp_shards.*'one'"):
        merge([attention("one"), attention("two", max_tp_shards=other)])


def test_merge_refuses_any_other_difference() -> None:
    for changed in (
        {"block_size": 32},
        {"dtype": "float16"},
        {"encoding": "tokens_first"},
        {"dcp_sharded": False},
    ):
        other = LayerSpec(
            **(vars(attention("two")) | {"page_bytes": 0, "engine_page_bytes": 0} | changed)
        )
        with pytest.raises(ConfigError, match=next(iter(changed))):
            merge([attention("one"), other])


@pytest.mark.parametrize(
    ("heads", "tp", "total", "shards"),
    [
        (2, 4, 8, 8),
        (1, 8, 8, 8),
        (1, 16, 8, 8),
        (1, 2, 1, 1),
        (1, 2, 2, 2),
        (2, 2, 2, None),  # two per rank are not two in total at TP2
        (1, 8, 6, None),  # six heads do not split over eight ranks
        (1, 4, 6, None),
        (4, 4, 8, None),
        (1, 1, None, None),
        (1, 1, 0, None),
    ],
)
def test_total_heads_count_only_if_they_explain_the_rank(
    heads: int, tp: int, total: int | None, shards: int | None
) -> None:
    assert declared_shards(heads, tp, total) == shards


def test_replacing_the_name_keeps_the_pages() -> None:
    assert replace(attention(), name="b").page_bytes == attention().page_bytes
