"""Plans as data: sizes, spread of writers, fingerprint, serialisation, explanation."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from kvfold.errors import ConfigError, FormatError, PlanError
from kvfold.mesh import Mesh
from kvfold.plan import OffloadPlan, PlanOptions, Run, plan
from kvfold.spec import GroupSpec, LayerSpec, UniformSpec


def mla(name: str, **changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {
        "kind": "mla",
        "block_size": 16,
        "num_kv_heads": 1,
        "head_bytes": 1152,
        "max_tp_shards": 1,
    }
    return LayerSpec(name=name, **(fields | changes))


def gqa(name: str, total: int, tp: int, **changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {"kind": "full_attention", "num_kv_heads": max(1, total // tp)}
    return mla(name, **(fields | {"max_tp_shards": total, "head_bytes": 64} | changes))


def simple(**changes: Any) -> OffloadPlan:
    group = GroupSpec.of(0, [mla("a", **changes), mla("b")])
    return plan([group], Mesh(tp=2), PlanOptions(2))


def written(runs: tuple[Run, ...]) -> int:
    return sum(run.nbytes * run.count for run in runs)


def test_sizes_and_spans() -> None:
    group = simple().groups[0]
    assert (group.tokens_per_block, group.tokens_per_chunk) == (16, 32)
    assert group.chunk_bytes == 2 * 2 * 16 * 1152
    assert group.slot_bytes == 73_728
    assert group.rotations == 2


def test_the_slot_is_layer_block_head_token() -> None:
    runs = simple().groups[0].reads(1)
    page = 16 * 1152
    assert runs == tuple(
        Run(name, block, 0, i * page, page)
        for i, (name, block) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 1)])
    )


@pytest.mark.parametrize("rotation", range(8))
def test_every_rank_writes_its_share(rotation: int) -> None:
    group = plan([GroupSpec.of(0, [mla(f"m{i}") for i in range(61)])], Mesh(tp=8)).groups[0]
    assert group.writers(rotation) == frozenset(range(8))
    shares = [written(group.writes(rank, rotation)) for rank in range(8)]
    assert sum(shares) == group.chunk_bytes
    assert max(shares) - min(shares) <= 16 * 1152


def test_rotation_gives_every_segment_to_every_owner() -> None:
    group = plan([GroupSpec.of(0, mla("only"))], Mesh(tp=4)).groups[0]
    assert sorted(next(iter(group.writers(k))) for k in range(4)) == [0, 1, 2, 3]
    assert all(len(group.writers(k)) == 1 for k in range(4))


def test_replica_groups_of_two_and_three_need_six_rotations() -> None:
    layers = [gqa("two", 3, 6), gqa("three", 2, 6)]
    group = plan([GroupSpec.of(0, layers)], Mesh(tp=6)).groups[0]
    assert group.rotations == 6
    spreads = {tuple(group.writes(r, k) for r in range(6)) for k in range(6)}
    assert len(spreads) == 6


@pytest.mark.parametrize("rotation", [-1, 2])
def test_a_rotation_out_of_range_is_refused(rotation: int) -> None:
    group = simple().groups[0]
    for ask in (lambda: group.writes(0, rotation), lambda: group.writers(rotation)):
        with pytest.raises(ConfigError, match="rotation"):
            ask()


def test_owned_and_audited_fragments() -> None:
    layers = [mla("row"), gqa("sharded", 2, 2)]
    group = plan([GroupSpec.of(0, layers)], Mesh(tp=2), PlanOptions(3)).groups[0]
    assert [f.layer for f in group.fragments] == ["row", "sharded", "sharded"]
    assert [o.id for o in group.owned(0)] == [0, 1]
    assert [o.id for o in group.owned(1)] == [0, 2]
    assert [o.id for o in group.audited(1)] == [0]
    assert [run.block for run in group.audited(1)[0].runs] == [0, 1, 2]
    assert group.reads(1) == group.owned(1)[0].runs + group.owned(1)[1].runs


def test_a_stage_without_layers_of_a_group_has_nothing_to_do() -> None:
    group = plan([GroupSpec.of(0, mla("a"), 1)], Mesh(tp=2, pp=2)).groups[0]
    assert group.reads(0) == group.writes(0, 0) == group.owned(1) == ()
    assert group.writers(0) | group.writers(1) == {2, 3}


def test_groups_outside_prefix_caching_keep_their_position() -> None:
    ring = LayerSpec(name="ring", kind="other", block_size=3, num_kv_heads=1, head_bytes=7)
    result = plan(
        [GroupSpec.of(0, mla("a")), GroupSpec.of(1, ring, prefix_cacheable=False)], Mesh(tp=2)
    )
    idle = result.groups[1]
    assert (idle.index, idle.participating, idle.slot_bytes, idle.rotations) == (1, False, 0, 1)
    assert idle.reads(0) == idle.writes(1, 0) == ()
    assert idle.writers(0) == frozenset()
    assert result.tokens_per_hash == 16
    assert result.kv_tp_replicas == 2
    assert result.engine_slot_bytes(1) == 20_480


@pytest.mark.parametrize("kind", ["hidden_state", "other"])
def test_a_prefix_cacheable_group_of_another_kind_is_refused(kind: str) -> None:
    layer = mla("state.7", kind=kind)
    with pytest.raises(PlanError, match=r"'state.7' kind \(group 3\)"):
        plan([GroupSpec.of(3, layer)], Mesh())


def test_tokens_per_hash_divides_every_span() -> None:
    groups = [GroupSpec.of(0, mla("a", block_size=64)), GroupSpec.of(1, mla("b", block_size=48))]
    assert plan(groups, Mesh()).tokens_per_hash == 16
    assert plan(groups, Mesh(tp=2, dcp=2)).tokens_per_hash == 32
    assert plan(groups, Mesh(), PlanOptions(tokens_per_hash=8)).tokens_per_hash == 8
    with pytest.raises(PlanError, match=r"group 1 tokens_per_block=48.*tokens_per_hash=64"):
        plan(groups, Mesh(), PlanOptions(tokens_per_hash=64))


def test_a_container_under_dcp_spans_both() -> None:
    """{MLA + indexer}, block 64: 128 tokens per block and per hash at DCP2, 512 at DCP8."""
    container = UniformSpec((mla("m", block_size=64), mla("i", block_size=64, head_bytes=132)))
    for dcp, tokens in ((2, 128), (8, 512)):
        result = plan([GroupSpec.of(0, container)], Mesh(tp=8, dcp=dcp))
        assert result.groups[0].tokens_per_block == result.tokens_per_hash == tokens


def test_a_layer_belongs_to_one_group() -> None:
    with pytest.raises(PlanError, match=r"'a'.*one group"):
        plan([GroupSpec.of(0, mla("a")), GroupSpec.of(1, mla("a"))], Mesh())
    with pytest.raises(PlanError, match="group index=0"):
        plan([GroupSpec.of(0, mla("a")), GroupSpec.of(0, mla("b"))], Mesh())


def test_a_stage_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match="pp_rank=1"):
        plan([GroupSpec.of(0, mla("a"), 1)], Mesh())


@pytest.mark.parametrize("options", [{"blocks_per_chunk": 0}, {"tokens_per_hash": 2.0}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PlanOptions(**options)


@pytest.mark.parametrize(
    ("mesh", "replicated"),
    [
        (Mesh(tp=2), True),
        (Mesh(), False),
        (Mesh(tp=2, pp=2), False),
        (Mesh(tp=2, pcp=2), False),
        (Mesh(tp=2, dcp=2), False),
    ],
)
def test_replicated_layout(mesh: Mesh, replicated: bool) -> None:
    assert plan([GroupSpec.of(0, mla("a"))], mesh).replicated_layout is replicated
    sharded = plan([GroupSpec.of(0, [mla("a"), mla("b", max_tp_shards=None)])], mesh)
    assert sharded.replicated_layout is False


def test_plans_are_frozen_and_equal_by_value() -> None:
    assert simple() == simple()
    with pytest.raises(FrozenInstanceError):
        simple().tokens_per_hash = 3  # type: ignore[misc]


def test_a_plan_survives_json() -> None:
    layers = [mla("a"), gqa("b", 2, 2, max_tp_shards=None)]
    made = plan([GroupSpec.of(0, layers, [0, 1])], Mesh(tp=2, pp=2), PlanOptions(2, 16))
    again = OffloadPlan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert again.fingerprint == made.fingerprint
    assert again.groups[0].writes(3, 0) == made.groups[0].writes(3, 0)


def tampered(path: list[Any], value: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(simple().to_dict()))
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], 2),
        (["mesh", "tp"], 0),
        (["mesh"], None),
        (["options", "unknown"], 1),
        (["groups", 0, "layers", 0, "block_size"], "16"),
        (["groups", 0, "layers"], 7),
        (["groups", 0, "derived", "slot_bytes"], 4096),
        (["groups", 0, "derived", "fragments", 0, 3], [0]),
        (["tokens_per_hash"], 8),
        (["extra"], 8),
    ],
)
def test_damaged_plan_data_is_refused(path: list[Any], value: Any) -> None:
    with pytest.raises(FormatError):
        OffloadPlan.from_dict(tampered(path, value))


def test_the_fingerprint_covers_everything() -> None:
    layers = [mla("a"), gqa("b", 4, 2)]
    base = GroupSpec.of(0, layers)
    options = PlanOptions(2, 16)
    plans = [
        plan([base], Mesh(tp=2), options),
        plan([base], Mesh(tp=2), PlanOptions(1, 16)),
        plan([base], Mesh(tp=2), PlanOptions(2, 8)),
        plan([base], Mesh(tp=2, pcp=2), options),
        plan([base], Mesh(tp=2, pp=2), options),
        plan([base], Mesh(tp=2, dcp_interleave=2), options),
        plan([replace(base, index=1)], Mesh(tp=2), options),
        plan([replace(base, is_draft=True)], Mesh(tp=2), options),
        plan([replace(base, prefix_cacheable=False)], Mesh(tp=2), options),
        plan([GroupSpec.of(0, layers[::-1])], Mesh(tp=2), options),
        *(
            plan([GroupSpec.of(0, [mla("a", **changes), layers[1]])], Mesh(tp=2), options)
            for changes in (
                {"head_bytes": 576},
                {"dtype": "float16"},
                {"max_tp_shards": None},
                {"encoding": "tokens_first"},
                {"engine_page_bytes": 20_000},
                {"tokens_per_state": 2},
            )
        ),
        *(
            plan([GroupSpec.of(0, [layers[0], replace(layers[1], **changes)])], Mesh(tp=2), options)
            for changes in (
                {"encoding": "halves_heads_first"},
                {"encoding": "halves_tokens_first"},
                {"encoding": "halves_heads_first", "key_bytes": 1},
            )
        ),
    ]
    assert len({p.fingerprint for p in plans}) == len(plans)


def test_the_fingerprint_covers_what_is_derived() -> None:
    """Two versions of the planner that place or deal otherwise must not agree."""
    made = plan([GroupSpec.of(0, [gqa("a", 4, 8), mla("b")])], Mesh(tp=8), PlanOptions(2))
    [group] = made.groups
    layer = group.layers[0]
    placed = layer.placement
    first, *others = placed.fragments

    def with_layer(**changes: Any) -> OffloadPlan:
        return with_group(layers=(replace(layer, **changes), *group.layers[1:]))

    def with_group(**changes: Any) -> OffloadPlan:
        return replace(made, groups=(replace(group, _cache={}, **changes),))

    def with_fragment(**changes: Any) -> OffloadPlan:
        fragments = (replace(first, **changes), *others)
        return with_layer(placement=replace(placed, fragments=fragments))

    dealt = with_group()
    writers = list(group.base_writers)
    vars(dealt.groups[0])["base_writers"] = (writers[0][::-1], *writers[1:])
    assert writers[0] != writers[0][::-1]
    changed = [
        with_fragment(owners=(0, 2)),
        with_fragment(head_shard=5),
        with_fragment(token_shard=1),
        with_layer(slot_offset=1),
        with_layer(placement=replace(placed, canonical=False)),
        with_group(slot_bytes=0),
        with_group(chunk_bytes=0),
        with_group(rotations=1),
        with_group(tokens_per_block=1),
        with_group(participating=False),
        replace(made, tokens_per_hash=1),
        replace(made, kv_tp_replicas=1),
        dealt,
    ]
    assert with_group().fingerprint == made.fingerprint
    assert len({p.fingerprint for p in [made, *changed]}) == len(changed) + 1


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "from kvfold.plan import *; from kvfold.mesh import Mesh;"
        "from kvfold.spec import GroupSpec, LayerSpec;"
        "a, b = (LayerSpec(name=n, kind='mla', block_size=16, num_kv_heads=1, head_bytes=1152,"
        " max_tp_shards=1) for n in 'ab');"
        "print(plan([GroupSpec.of(0, [a, b])], Mesh(tp=2), PlanOptions(2)).fingerprint)"
    )
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert out.strip() == simple().fingerprint


def test_the_explanation_says_what_is_folded_and_why_not() -> None:
    layers = [mla("m0"), mla("m1"), gqa("full", 8, 8), mla("draft", max_tp_shards=None)]
    ring = LayerSpec(name="ring", kind="other", block_size=3, num_kv_heads=1, head_bytes=7)
    text = plan(
        [GroupSpec.of(0, layers), GroupSpec.of(1, ring, prefix_cacheable=False)], Mesh(tp=8)
    ).explain()
    for expected in (
        "m0 .. m1 (2 layers): mla, stage 0, 1 x 18,432 B per block",
        "folded 8:1",
        "full: full_attention, stage 0, 8 x 1,024 B per block",
        "not folded: every rank holds different bytes (8 head shards)",
        "not folded: max_tp_shards is not declared",
        "bound to this topology",
        "group 1: outside prefix caching",
        "warning: layer 'draft'",
        "16 tokens per block",
        "slot of 192,512 B",
    ):
        assert expected in text, text


def test_planning_imports_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, kvfold.plan, kvfold.identity;"
        "print([m for m in ('numpy', 'torch', 'msgspec', 'vllm') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.strip() == "[]"
