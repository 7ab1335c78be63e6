"""The engine's groups, where its own code does not say: one case per rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvfold.errors import PlanError
from kvfold.grouping import block_bytes, engine_groups
from kvfold.spec import LayerSpec

ROW = LayerSpec(name="row", kind="mla", block_size=16, num_kv_heads=1, head_bytes=100)
FULL = replace(ROW, kind="full_attention", head_bytes=128, page_bytes=0, engine_page_bytes=0)
WINDOW = replace(FULL, kind="sliding_window", window=64)


def named(*parts: tuple[LayerSpec, int]) -> list[LayerSpec]:
    layers = [layer for layer, count in parts for _ in range(count)]
    return [replace(layer, name=f"l{i}") for i, layer in enumerate(layers)]


def counts(layers: list[LayerSpec], **options: Any) -> list[int]:
    return [len(group.layers) for group in engine_groups(layers, **options)]


def test_no_layers_are_no_groups() -> None:
    assert engine_groups([]) == ()
    assert block_bytes(()) == 0


def test_of_equal_paddings_packing_takes_the_larger_groups() -> None:
    wide = replace(FULL, num_kv_heads=2, page_bytes=0, engine_page_bytes=0)
    layers = named((FULL, 2), (wide, 2), (WINDOW, 3))
    assert counts(layers, block_outermost=True) == [4, 3]


def test_the_rarest_kind_sets_the_groups_unless_the_others_are_close() -> None:
    assert counts(named((FULL, 4), (WINDOW, 6))) == [4, 3, 3]
    assert counts(named((FULL, 5), (WINDOW, 7))) == [5, 7]


def test_a_block_is_one_stages_widest_group() -> None:
    layers = named((FULL, 3), (WINDOW, 3))
    groups = engine_groups(layers, [0, 0, 1, 0, 1, 1])
    assert [group.stages for group in groups] == [(0, 0, 1), (0, 1, 1)]
    assert block_bytes(groups) == 2 * 16 * 128


def test_rows_that_do_not_fit_a_page_need_a_block_outermost_layout() -> None:
    state = replace(
        ROW,
        kind="kda",
        tokens_per_state=16,
        dcp_sharded=False,
        encoding="opaque",
        head_bytes=2000,
        page_bytes=2000,
        engine_page_bytes=2000,
    )
    layers = named((ROW, 1), (state, 1))
    with pytest.raises(PlanError, match=r"'l0' engine_page_bytes=1600: .* block-outermost"):
        engine_groups(layers)
    assert counts(layers, block_outermost=True) == [1, 1]


def test_windows_without_a_hybrid_manager_keep_every_token() -> None:
    [group] = engine_groups(named((FULL, 1), (WINDOW, 5)), hybrid_manager=False)
    assert {(x.kind, x.window) for x in group.layers} == {("full_attention", None)}


def test_what_is_outside_prefix_caching_stays_there() -> None:
    ring = replace(FULL, kind="circular_buffer", dcp_sharded=False)
    layers = named((FULL, 2), (ring, 2))
    groups = engine_groups(layers, outside={"l2", "l3"})
    assert [group.prefix_cacheable for group in groups] == [True, False]
