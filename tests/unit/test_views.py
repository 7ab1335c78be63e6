"""Copies, slots and writers as the field counts them, and what cannot be certified."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvfold.mesh import Mesh
from kvfold.plan import GroupSpec, OffloadPlan, plan
from kvfold.spec import LayerSpec
from kvfold.views import compatible_view


def planned(mesh: Mesh, heads: int | None = None, **changes: Any) -> OffloadPlan:
    """One MLA layer, or one of `heads` KV heads; pages of 64 x 1,152 B per head."""
    fields: dict[str, Any] = {"kind": "mla", "num_kv_heads": 1, "max_tp_shards": 1}
    if heads:
        fields = {"kind": "full_attention", "num_kv_heads": max(1, heads // mesh.tp)}
        fields["max_tp_shards"] = heads
    layer = LayerSpec(name="a", block_size=64, head_bytes=1152, **(fields | changes))
    return plan([GroupSpec.of(0, layer)], mesh)


@pytest.mark.parametrize(
    ("made", "replicated", "copies", "slots"),
    [
        (planned(Mesh(tp=8)), True, 1, [0] * 8),
        (planned(Mesh(tp=8), 2), False, 2, [0] * 4 + [1] * 4),
        (planned(Mesh(tp=8), 4), False, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        (planned(Mesh(tp=4), 8), False, 4, [0, 1, 2, 3]),
        (planned(Mesh(tp=4, dcp=2)), False, 4, [0, 1, 2, 3]),
        # Under PP one row would hold the layers of two stages.
        (planned(Mesh(tp=2, pp=2)), False, 2, [0, 0, 1, 1]),
        (planned(Mesh(tp=2, pcp=2)), False, 2, [0, 0, 1, 1]),
        (planned(Mesh()), False, 1, [0]),
        (planned(Mesh(tp=2), max_tp_shards=None), False, 2, [0, 1]),
    ],
)
def test_copies_and_slots(
    made: OffloadPlan, replicated: bool, copies: int, slots: list[int]
) -> None:
    view = compatible_view(made)
    ranks = range(made.mesh.world_size)
    assert (view.replicated_layout, view.copies) == (replicated, copies)
    assert [view.slot(rank) for rank in ranks] == slots
    assert [view.slot(rank) for rank in ranks if view.writes(rank)] == list(range(copies))
    page_bytes = made.groups[0].layers[0].spec.page_bytes
    assert view.row_bytes == -(-page_bytes * copies // 4096) * 4096
    assert (view.canonical_layout, view.fallback) == (False, None)


@pytest.mark.parametrize(("heads", "copies"), [(None, 1), (8, 8), (2, 2)])
def test_a_certified_canonical_layout_changes_no_size(heads: int | None, copies: int) -> None:
    made = planned(Mesh(tp=8), heads)
    view = compatible_view(made, canonical_layout=True)
    assert view.canonical_layout
    assert view.replicated_layout == (heads is None)
    assert (view.copies, view.row_bytes) == (copies, compatible_view(made).row_bytes)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (planned(Mesh(tp=8), encoding="opaque"), "layer 'a': .*opaque"),
        (planned(Mesh(tp=8), tokens_per_state=4), "layer 'a' keeps one state for 4 tokens"),
        (planned(Mesh(tp=8, pp=2)), "pp is 2"),
        (planned(Mesh(tp=8, dcp=2)), "dcp is 2"),
        (planned(Mesh(tp=8, pcp=2)), "pcp is 2"),
        (
            planned(
                Mesh(tp=8),
                kind="kda",
                tokens_per_state=64,
                max_tp_shards=None,
                dcp_sharded=False,
                encoding="opaque",
            ),
            "layer 'a' is a recurrent state",
        ),
        (plan([], Mesh(tp=8)), "no group"),
    ],
)
def test_what_cannot_be_certified_falls_back_and_shares_nothing(
    made: OffloadPlan, why: str
) -> None:
    view = compatible_view(made, canonical_layout=True)
    assert view.fallback is not None
    assert re.search(why, view.fallback)
    assert not view.canonical_layout
    assert not view.replicated_layout
    assert view.copies == made.mesh.world_size
    assert [view.slot(rank) for rank in range(3)] == [0, 1, 2]
    assert view.row_bytes == made.engine_slot_bytes(made.mesh.world_size)
