"""Plans of random models on random meshes, judged byte by byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_oracle import Cluster, Moves, cluster, problem

from kvfold.errors import PlanError
from kvfold.mesh import Mesh
from kvfold.plan import PlanOptions, plan
from kvfold.spec import GroupSpec, LayerSpec

LARGEST_CHUNK_BYTES = 6000


@st.composite
def meshes(draw: Any) -> Mesh:
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    pcp = draw(st.sampled_from([1, 1, 2, 3] if tp <= 4 else [1]))
    choices = [d for d in range(1, tp + 1) if tp % d == 0] if pcp == 1 else [1, pcp, tp * pcp]
    pp = draw(st.sampled_from([1, 1, 2] if tp * pcp <= 8 else [1]))
    return Mesh(tp, draw(st.sampled_from(choices)), pcp, pp, draw(st.sampled_from([1, 2, 4])))


@st.composite
def layer_specs(draw: Any, name: str, mesh: Mesh, block_size: int, sharded: bool) -> LayerSpec:
    shared: dict[str, Any] = {
        "name": name,
        "block_size": block_size,
        "dcp_sharded": sharded,
        "head_bytes": draw(st.integers(1, 3)),
        "tokens_per_state": draw(st.sampled_from([1, 1, 1, 2])),
        "encoding": draw(st.sampled_from(["heads_first", "tokens_first", "opaque"])),
    }
    declared = draw(st.sampled_from([True, True, True, False]))
    if not sharded and draw(st.sampled_from([True, False, False])):
        replicated = draw(st.booleans())
        shared |= {"tokens_per_state": block_size, "encoding": "opaque"}
        if replicated and draw(st.booleans()):
            shared["encoding"] = "whole_page"
        kind = draw(st.sampled_from(["mamba2", "kda"]))
        return LayerSpec(kind=kind, num_kv_heads=1, tp_replicated=replicated, **shared)
    if draw(st.booleans()):
        shards = 1 if declared else None
        shared["encoding"] = draw(st.sampled_from([shared["encoding"], "whole_page"]))
        kind = draw(st.sampled_from(["mla", "indexer", "sliding_window_mla"]))
        window = 8 if kind == "sliding_window_mla" else None
        return LayerSpec(kind=kind, num_kv_heads=1, max_tp_shards=shards, window=window, **shared)
    fitting = [h for h in (1, 2, 3, 4, 6, 8, 12) if h % mesh.tp == 0 or mesh.tp % h == 0]
    total = draw(st.sampled_from(fitting))
    kind = draw(st.sampled_from(["full_attention", "sliding_window", "chunked_local"]))
    if shared["head_bytes"] > 1 and draw(st.booleans()):
        shared["encoding"] = draw(st.sampled_from(["halves_heads_first", "halves_tokens_first"]))
        shared["key_bytes"] = draw(st.integers(1, shared["head_bytes"] - 1))
    return LayerSpec(
        kind=kind,
        window=None if kind == "full_attention" else 8,
        num_kv_heads=max(1, total // mesh.tp),
        total_kv_heads=draw(st.sampled_from([total, None])),
        max_tp_shards=total if declared else None,
        **shared,
    )


@st.composite
def cases(draw: Any) -> tuple[list[LayerSpec], list[int], Mesh, int]:
    mesh = draw(meshes())
    block_size = draw(st.sampled_from([4, 8]))
    sharded = draw(st.sampled_from([True, True, False]))
    layers = [
        draw(layer_specs(f"layer{i}", mesh, block_size, sharded))
        for i in range(draw(st.integers(1, 4)))
    ]
    stages = [draw(st.integers(0, mesh.pp - 1)) for _ in layers]
    return layers, stages, mesh, draw(st.integers(1, 3))


def truth_of(case: tuple[list[LayerSpec], list[int], Mesh, int]) -> Cluster:
    layers, stages, mesh, blocks = case
    while len(layers) > 1 and (
        sum(x.page_bytes for x in layers) * mesh.stage_size * blocks > LARGEST_CHUNK_BYTES
    ):
        layers.pop()
        stages.pop()
    return cluster(layers, stages, mesh, blocks)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_every_byte_is_written_once_and_read_back_by_every_owner(case: Any) -> None:
    truth = truth_of(case)
    layers, stages, mesh, blocks = case
    groups = [GroupSpec.of(0, layers, stages)]
    if truth.uncovered:
        with pytest.raises(PlanError, match="dcp"):
            plan(groups, mesh, PlanOptions(blocks))
        return
    group = plan(groups, mesh, PlanOptions(blocks)).groups[0]
    assert problem(Moves.of(group, mesh.world_size), truth) is None
    assert group.slot_bytes % 4096 == 0
    assert 0 <= group.slot_bytes - group.chunk_bytes < 4096


ENCODINGS = ("heads_first", "tokens_first", "halves_heads_first", "halves_tokens_first")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_several_heads_under_dcp(encoding: Any) -> None:
    """Every small case of the rarest layout: strides over heads and over token shards at once."""
    for tp, block_size, interleave, per_state, head_bytes in product(
        (1, 2), (4, 8, 12), (1, 2, 4), (1, 2), (2, 3)
    ):
        mesh = Mesh(tp=tp, pcp=2, dcp=2, dcp_interleave=interleave)
        layer = LayerSpec(
            name="a",
            kind="full_attention",
            block_size=block_size,
            num_kv_heads=6 // tp,
            head_bytes=head_bytes,
            max_tp_shards=6,
            encoding=encoding,
            key_bytes=head_bytes - 1 if encoding.startswith("halves") else 0,
            tokens_per_state=per_state,
        )
        group = plan([GroupSpec.of(0, layer)], mesh, PlanOptions(2)).groups[0]
        assert group.topology_bound == bool(interleave % per_state)
        truth = cluster([layer], [0], mesh, 2)
        assert problem(Moves.of(group, mesh.world_size), truth) is None


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_fragments_owners_and_writers_agree_with_the_bytes(case: Any) -> None:
    truth = truth_of(case)
    layers, stages, mesh, blocks = case
    if truth.uncovered:
        return
    group = plan([GroupSpec.of(0, layers, stages)], mesh, PlanOptions(blocks)).groups[0]
    # Owners by content: all ranks whose page of a layer starts with the same logical byte.
    owners: dict[Any, list[int]] = {}
    for (rank, _, block), page in truth.pages.items():
        if block == 0:
            owners.setdefault(page[0], []).append(rank)
    assert sorted(f.owners for f in group.fragments) == sorted(map(tuple, owners.values()))
    for rank in range(mesh.world_size):
        for owned in group.owned(rank):
            assert group.fragments[owned.id] == owned.fragment
            assert rank in owned.fragment.owners
        assert [o.id for o in group.audited(rank)] == [
            o.id for o in group.owned(rank) if len(group.fragments[o.id].owners) > 1
        ]
    spreads = []
    for rotation in range(group.rotations):
        writing = {r: group.writes(r, rotation) for r in range(mesh.world_size)}
        assert group.writers(rotation) == {r for r, runs in writing.items() if runs}
        spreads.append(tuple(writing.values()))
    assert len(set(spreads)) == group.rotations


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from([1, 2, 4, 8]), st.permutations(ENCODINGS))
def test_a_canonical_slot_does_not_depend_on_tp_or_encoding(
    case: Any, tp: int, encodings: Any
) -> None:
    """What one TP size wrote another reads: equal logical bytes at equal slot positions."""
    layers, _, _, blocks = case
    totals = [layer.max_tp_shards or 1 for layer in layers]
    slots = []
    for size, encoding in zip((1, tp), encodings[:2], strict=True):
        halves = encoding.startswith("halves")
        specs = [
            LayerSpec(
                name=layer.name,
                kind="full_attention",
                block_size=layer.block_size,
                num_kv_heads=max(1, total // size),
                head_bytes=layer.head_bytes + 1,
                max_tp_shards=total,
                encoding=encoding,
                key_bytes=layer.head_bytes if halves else 0,
            )
            for layer, total in zip(layers, totals, strict=True)
        ]
        if any(total % size and size % total for total in totals):
            return
        group = plan([GroupSpec.of(0, specs)], Mesh(size), PlanOptions(blocks)).groups[0]
        truth = cluster(specs, [0] * len(specs), Mesh(size), blocks)
        slot: dict[int, Any] = {}
        for rank in range(size):
            for run in group.reads(rank):
                page = truth.pages[rank, run.layer, run.block]
                for i in range(run.count * run.nbytes):
                    piece, byte = divmod(i, run.nbytes)
                    at = run.page_offset + piece * run.page_stride + byte
                    slot[run.slot_offset + piece * run.slot_stride + byte] = page[at]
        slots.append(slot)
        assert not group.topology_bound
    assert slots[0] == slots[1]
