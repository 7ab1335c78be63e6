"""The field's tables: replicas, fragments and slot sizes, row by row and to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvfold.errors import PlanError
from kvfold.mesh import Mesh
from kvfold.placement import kv_cache_groups_tp_replicas
from kvfold.plan import OffloadPlan, PlanOptions, plan
from kvfold.spec import GroupSpec, LayerSpec, UniformSpec, declared_shards


def mla(name: str, head_bytes: int = 1152, block_size: int = 64, **changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {"kind": "mla", "num_kv_heads": 1, "max_tp_shards": 1}
    return LayerSpec(name=name, block_size=block_size, head_bytes=head_bytes, **(fields | changes))


def gqa(name: str, total: int, tp: int, **changes: Any) -> LayerSpec:
    heads = max(1, total // tp)
    fields: dict[str, Any] = {"kind": "full_attention", "max_tp_shards": total}
    return LayerSpec(
        name=name,
        block_size=64,
        num_kv_heads=heads,
        head_bytes=512,
        **(fields | changes),
    )


MLA = mla("m")
HIDDEN = LayerSpec(name="h", kind="hidden_state", block_size=64, num_kv_heads=1, head_bytes=4096)


def mamba(**changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {"kind": "mamba2", "block_size": 64, "encoding": "opaque"}
    return LayerSpec(
        name="mamba",
        num_kv_heads=1,
        head_bytes=4096,
        dcp_sharded=False,
        tokens_per_state=changes.get("block_size", 64),
        **(fields | changes),
    )


STATE = LayerSpec(
    name="s", kind="other", block_size=64, num_kv_heads=1, head_bytes=64, max_tp_shards=1
)


@pytest.mark.parametrize(
    ("groups", "tp", "dcp", "replicas"),
    [
        ([MLA], 8, 1, 8),
        ([MLA], 8, 2, 1),
        ([gqa("g", 2, 8)], 8, 1, 4),
        ([gqa("g", 8, 4)], 4, 1, 1),
        ([MLA, gqa("g", 4, 8)], 8, 1, 2),
        ([mla("m", max_tp_shards=None)], 8, 1, 1),
        ([HIDDEN], 8, 1, 1),
        # Beside the table: containers, no layers, states, layers that ignore DCP, odd sizes.
        ([UniformSpec((MLA, gqa("g", 4, 8)))], 8, 1, 2),
        ([], 8, 1, 1),
        ([MLA, STATE], 8, 1, 1),
        ([MLA, mamba()], 8, 1, 1),
        ([MLA, mamba(tp_replicated=True)], 8, 1, 1),
        ([MLA, mla("i", 132, kind="indexer")], 8, 1, 8),
        ([mla("w", 584, kind="sliding_window_mla", window=128)], 8, 1, 8),
        ([gqa("g", 2, 8, kind="sliding_window", window=64)], 8, 1, 4),
        ([mla("m", dcp_sharded=False)], 8, 2, 8),
        ([gqa("g", 4, 4)], 6, 1, 1),
        ([gqa("g", 4, 12)], 12, 1, 3),
    ],
)
def test_kv_tp_replicas(groups: list[Any], tp: int, dcp: int, replicas: int) -> None:
    assert kv_cache_groups_tp_replicas(groups, tp, dcp) == replicas


def planned(layers: list[LayerSpec], mesh: Mesh, stages: Any = 0, blocks: int = 1) -> OffloadPlan:
    return plan([GroupSpec.of(0, layers, stages)], mesh, PlanOptions(blocks))


@pytest.mark.parametrize(
    ("layer", "mesh", "fragments", "replicas"),
    [
        (MLA, Mesh(tp=8), 1, 8),
        (MLA, Mesh(tp=8, dcp=2), 2, 4),
        (MLA, Mesh(tp=8, dcp=4), 4, 2),
        (MLA, Mesh(tp=8, dcp=8), 8, 1),
        (MLA, Mesh(tp=4, pcp=2), 1, 8),
        (MLA, Mesh(tp=4, pcp=2, dcp=2), 2, 4),
        (MLA, Mesh(tp=4, pcp=2, dcp=8), 8, 1),
        (gqa("g", 8, 16), Mesh(tp=16), 8, 2),
        (gqa("g", 4, 8), Mesh(tp=8, dcp=2), 8, 1),
        (mamba(tp_replicated=True), Mesh(tp=4), 1, 4),
        (mamba(), Mesh(tp=4), 4, 1),
        (mamba(), Mesh(tp=4, dcp=4), 4, 1),
        (mla("i", 132, kind="indexer"), Mesh(tp=8), 1, 8),
        (mla("w", 584, kind="sliding_window_mla", window=128), Mesh(tp=8), 1, 8),
        (gqa("g", 8, 16, kind="sliding_window", window=64), Mesh(tp=16), 8, 2),
        (gqa("g", 8, 16, kind="chunked_local", window=64), Mesh(tp=16), 8, 2),
        (MLA, Mesh(tp=4, pp=2), 1, 4),
        (mla("m", max_tp_shards=None), Mesh(tp=8), 8, 1),
        (gqa("g", 8, 8, max_tp_shards=None), Mesh(tp=8), 8, 1),
    ],
)
def test_fragments_and_replicas(
    layer: LayerSpec, mesh: Mesh, fragments: int, replicas: int
) -> None:
    stage = mesh.pp - 1
    result = planned([layer], mesh, stage)
    found = result.groups[0].fragments
    assert len(found) == fragments
    assert {f.replicas for f in found} == {replicas}
    owners = sorted(rank for f in found for rank in f.owners)
    assert owners == list(mesh.stage_ranks(stage))
    assert result.groups[0].chunk_bytes == layer.page_bytes * fragments
    undeclared = layer.max_tp_shards is None and layer.name != "mamba"
    assert bool(result.warnings) == undeclared
    assert all(repr(layer.name) in text for text in result.warnings)


def test_six_heads_at_tp8_are_refused_as_engines_do() -> None:
    with pytest.raises(PlanError, match=r"'g' KV heads=6.*tp=8"):
        planned([gqa("g", 6, 8)], Mesh(tp=8))


def test_a_draft_beside_mla_does_not_stop_the_folding() -> None:
    result = plan(
        [GroupSpec.of(0, MLA), GroupSpec.of(0, gqa("g", 8, 8), is_draft=True)], Mesh(tp=8)
    )
    target, draft = result.groups
    assert [f.replicas for f in target.fragments] == [8]
    assert [f.replicas for f in draft.fragments] == [1] * 8
    assert result.kv_tp_replicas == 1


def test_groups_of_unstorable_kinds_keep_their_position() -> None:
    kinds = ("cross_attention", "encoder_only", "circular_buffer", "hidden_state")
    odd = [replace(HIDDEN, name=kind, kind=kind) for kind in kinds]
    groups = [GroupSpec.of(i, layer, prefix_cacheable=False) for i, layer in enumerate(odd)]
    result = plan([*groups, GroupSpec.of(4, MLA)], Mesh(tp=8))
    assert [g.participating for g in result.groups] == [False] * 4 + [True]
    assert [g.index for g in result.groups] == [0, 1, 2, 3, 4]
    assert result.kv_tp_replicas == 8
    for layer in odd:
        with pytest.raises(PlanError, match=f"{layer.kind}"):
            planned([layer], Mesh(tp=8))


def test_states_keep_their_span_under_dcp() -> None:
    """Attention block 16 and Mamba block 16 at DCP2: 32 and 16 tokens."""
    attention = mla("m", block_size=16)
    states = mamba(block_size=16)
    result = plan([GroupSpec.of(0, attention), GroupSpec.of(1, states)], Mesh(tp=4, dcp=2))
    assert [g.tokens_per_block for g in result.groups] == [32, 16]
    assert result.tokens_per_hash == 16


def test_kimi_k3_folds_its_mla_layers_and_keeps_its_states_apart() -> None:
    result = plan([GroupSpec.of(0, MLA), GroupSpec.of(1, mamba(kind="kda"))], Mesh(tp=8))
    assert [{f.replicas for f in g.fragments} for g in result.groups] == [{8}, {1}]


def test_one_undeclared_layer_among_62_is_the_only_one_not_folded() -> None:
    layers = [mla(f"m{i}") for i in range(61)] + [mla("draft", max_tp_shards=None)]
    result = planned(layers, Mesh(tp=8))
    assert [f.replicas for f in result.groups[0].fragments] == [8] * 61 + [1] * 8
    assert len(result.warnings) == 1
    assert "'draft'" in result.warnings[0]
    assert result.kv_tp_replicas == 1


V2_LITE = [mla(f"m{i}", 1152, 16) for i in range(27)]
V32 = [x for i in range(61) for x in (mla(f"m{i}"), mla(f"m{i}.indexer", 132))]
GLM = [mla(f"m{i}", 656) for i in range(78)] + [mla(f"i{i}", 132) for i in range(21)]


@pytest.mark.parametrize(
    ("layers", "tp", "single", "copies"),
    [
        (V2_LITE, 2, 499_712, 995_328),
        (V32, 8, 5_013_504, 40_103_936),
        (GLM, 8, 3_452_928, 27_619_328),
    ],
)
def test_reference_slots(layers: list[LayerSpec], tp: int, single: int, copies: int) -> None:
    result = planned(layers, Mesh(tp=tp))
    assert result.groups[0].slot_bytes == single
    assert result.engine_slot_bytes(1) == single
    assert result.engine_slot_bytes(tp) == copies


def test_padding_is_the_engines_not_ours() -> None:
    """DeepSeek-V4-Flash's widest group: pages padded to 576, four blocks of 256 per chunk."""
    shapes = [("c4", 21, 4, 584, 37_440), ("c128", 20, 128, 584, 1_728), ("i", 21, 4, 132, 8_640)]
    layers = [
        mla(f"{name}.{i}", row, 256, tokens_per_state=ratio, engine_page_bytes=padded)
        for name, count, ratio, row, padded in shapes
        for i in range(count)
    ]
    result = planned(layers, Mesh(tp=8), blocks=4)
    assert result.groups[0].chunk_bytes == 3_942_656
    assert result.groups[0].slot_bytes == 3_944_448
    assert result.engine_slot_bytes(1) == 4_009_984
    assert result.engine_slot_bytes(8) == 32_071_680


def test_the_engines_slot_is_one_ranks_widest_group() -> None:
    """Under PP a rank has only its stage's layers; groups are not summed."""
    small, large = [mla("a"), mla("b")], [mla(f"c{i}") for i in range(4)]
    result = plan(
        [GroupSpec.of(0, small, [0, 1]), GroupSpec.of(1, large, [0, 1, 1, 1])], Mesh(pp=2)
    )
    assert result.engine_slot_bytes(1) == -(-3 * 64 * 1152 // 4096) * 4096


def test_the_engines_slot_holds_a_draft_split_off_its_group() -> None:
    result = plan([GroupSpec.of(0, mla("a")), GroupSpec.of(0, mla("b"), is_draft=True)], Mesh())
    assert result.engine_slot_bytes(1) == 2 * 64 * 1152


def test_a_chunk_does_not_depend_on_tp() -> None:
    """A canonical row that grows with TP made peers refuse each other."""
    sizes = set()
    for tp in (1, 2, 4, 8, 16):
        layers = [gqa(f"g{i}", 8, tp) for i in range(3)]
        shards = declared_shards(layers[0].num_kv_heads, tp, 8)
        assert shards == 8
        sizes.add(planned(layers, Mesh(tp=tp)).groups[0].chunk_bytes)
    assert sizes == {3 * 8 * 64 * 512}
