"""Models from their config files: bytes per token, fixed bytes, replicas, groups and slots."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import pytest

from kvfold.capacity import Costs, costs, is_growing, replicas
from kvfold.errors import PlanError
from kvfold.grouping import block_bytes
from kvfold.mesh import Mesh
from kvfold.models import build, load, shipped
from kvfold.placement import kv_cache_groups_tp_replicas
from kvfold.plan import OffloadPlan, PlanOptions, plan, round_up
from kvfold.spec import STATE_KINDS

MIB = 1024 * 1024


class Row(NamedTuple):
    """One model. Per token and copy, with the engine's page padding: bf16, fp8. Fixed per sequence
    (bf16): windows in bytes, and states as count x bytes. Per TP size (8, 16): the engine's
    kv_tp_replicas, physical copies by kind, bytes per token and rank; None: the engine refuses.
    """

    bf16: float
    fp8: float
    window: int = 0
    states: tuple[int, int] = (0, 0)
    at: tuple[tuple[int, dict[str, int], float] | None, ...] = ()


def gqa(bf16: int, rank: int, copies: tuple[int, int] = (1, 2)) -> Row:
    one, two = ({"full_attention": c} for c in copies)
    return Row(bf16, bf16 // 2, at=((1, one, rank), (1, two, rank)))


def mla(bf16: int, fp8: int, indexed: bool = False) -> Row:
    kinds = ("mla", "indexer") if indexed else ("mla",)
    at = tuple((tp, dict.fromkeys(kinds, tp), bf16) for tp in (8, 16))
    return Row(bf16, fp8, at=at)


def hybrid(
    bf16: int,
    count: int,
    state: int,
    kind: str,
    rank: tuple[int, int | None],
    copies: tuple[int, int],
) -> Row:
    at = tuple(
        None if r is None else (1, {"full_attention": c, kind: 1}, r)
        for r, c in zip(rank, copies, strict=True)
    )
    return Row(bf16, bf16 // 2, states=(count, state), at=at)


def windowed(
    bf16: int, window: int, rank: tuple[int, int | None], copies: tuple[int, int] = (1, 1)
) -> Row:
    at = tuple(
        None if r is None else (1, {"full_attention": c, "sliding_window": 1}, r)
        for r, c in zip(rank, copies, strict=True)
    )
    return Row(bf16, bf16 // 2, window, at=at)


V3 = mla(70_272, 35_136)
GLM_52 = mla(92_628, 47_700, indexed=True)
NO = (None, None)
V4 = {"mla": 8, "indexer": 8, "sliding_window_mla": 8}
V4_16 = dict.fromkeys(V4, 16)

TABLE = {
    "llama-3.1-8b": gqa(131_072, 16_384),
    "llama-3.1-70b": gqa(327_680, 40_960),
    "llama-3.1-405b": gqa(516_096, 64_512),
    "qwen3-8b": gqa(147_456, 18_432),
    "mistral-small-3-24b": gqa(163_840, 20_480),
    "minimax-m2": gqa(253_952, 31_744),
    "minimax-m3": Row(
        137_472,
        76_032,
        at=(
            (1, {"full_attention": 2, "indexer": 8}, 45_312),
            (1, {"full_attention": 4, "indexer": 16}, 45_312),
        ),
    ),
    "deepseek-v2-lite": mla(31_104, 15_552),
    "deepseek-v3": V3,
    "deepseek-r1": V3,
    "kimi-k2": V3,
    "mistral-large-3-675b": V3,
    "deepseek-v3.2-exp": mla(78_324, 43_188, indexed=True),
    "glm-5": mla(100_152, 55_224, indexed=True),
    "glm-5.2": GLM_52,
    "glm-5.3": GLM_52,
    "deepseek-v4-flash": Row(6250, 3915, 17_842_176, at=((8, V4, 6250), None)),
    # Its config does not say o_groups, so that nothing refuses 16.
    "deepseek-v4-flash-0731": Row(6250, 3915, 17_842_176, at=((8, V4, 6250), (16, V4_16, 6250))),
    # Not in the engine's declarations, though the same on every rank.
    "deepseek-v4.1-flash": Row(2890, 1797.75, at=((1, {"mla": 8, "indexer": 8}, 2890), None)),
    "deepseek-v4-pro": Row(8948, 5609.25, 26_705_920, at=((8, V4, 8948), (16, V4_16, 8948))),
    "gemma-3-27b": windowed(81_920, 416 * MIB, (10_240, 5_120)),
    "gemma-4-31b": windowed(81_920, 800 * MIB, (20_480, 20_480), (2, 4)),
    "gpt-oss-20b": windowed(24_576, 3 * MIB, (3_072, None)),
    "gpt-oss-120b": windowed(36_864, 9 * MIB // 2, (4_608, None)),
    "qwen3-next-80b-a3b": hybrid(24_576, 36, 1_097_728, "gdn", (12_288, 12_288), (4, 8)),
    "qwen3.5-35b-a3b": hybrid(20_480, 30, 2_146_304, "gdn", (10_240, 10_240), (4, 8)),
    "qwen3.5-397b-a17b": hybrid(30_720, 45, 4_268_032, "gdn", (15_360, 15_360), (4, 8)),
    "qwen3.8-2.4t-a95b": hybrid(94_208, 69, 8_511_488, "gdn", (23_552, 23_552), (2, 4)),
    "nemotron-h-8b": hybrid(16_384, 24, 4_255_744, "mamba2", (2_048, None), (1, 1)),
    "nemotron-nano-9b-v2": hybrid(16_384, 27, 5_316_608, "mamba2", (2_048, None), (1, 1)),
    "nemotron-3-nano-30b-a3b": hybrid(6_144, 23, 2_134_016, "mamba2", (3_072, None), (4, 8)),
    "jamba-v0.1": hybrid(16_384, 28, 311_296, "mamba1", (2_048, 2_048), (1, 2)),
    "jamba-1.5-large": hybrid(36_864, 63, 622_592, "mamba1", (4_608, 4_608), (1, 2)),
    "falcon-h1-7b": Row(45_056, 22_528, states=(44, 1_594_368), at=NO),
    "falcon-h1-34b": Row(147_456, 73_728, states=(72, 2_127_872), at=NO),
    "bamba-9b": hybrid(12_288, 29, 2_147_840, "mamba2", (1_536, 1_536), (1, 2)),
    "kimi-k3": Row(
        27_648,
        13_824,
        states=(69, 6_512_640),
        at=((1, {"mla": 8, "kda": 1}, 27_648), (1, {"mla": 16, "kda": 1}, 27_648)),
    ),
    "glm-5.3-flash": Row(
        11_354.75,
        5_722.75,
        states=(34, 4_341_760),
        at=(
            (1, {"mla": 8, "indexer": 8, "kda": 1}, 11_354.75),
            (1, {"mla": 16, "indexer": 16, "kda": 1}, 11_354.75),
        ),
    ),
}


def planned(name: str, mesh: Mesh, dtype: str = "auto", blocks: int = 1) -> OffloadPlan:
    return plan(build(load(name), mesh, dtype).groups, mesh, PlanOptions(blocks))


def cost(name: str, dtype: str = "auto") -> Costs:
    return costs(planned(name, Mesh(), dtype))


def test_every_shipped_model_is_in_the_table() -> None:
    assert sorted(TABLE) == sorted(shipped())


@pytest.mark.parametrize("name", TABLE)
def test_bytes_per_token_of_one_copy(name: str) -> None:
    assert cost(name).padded_per_token == Fraction(TABLE[name].bf16)
    assert cost(name, "fp8").padded_per_token == Fraction(TABLE[name].fp8)


@pytest.mark.parametrize("name", TABLE)
def test_fixed_bytes_per_sequence(name: str) -> None:
    count, state_bytes = TABLE[name].states
    found = planned(name, Mesh())
    states = [x for g in found.groups for x in g.layers if x.spec.kind in STATE_KINDS]
    assert [x.block_bytes for x in states] == [state_bytes] * count
    assert costs(found).state_per_sequence == count * state_bytes
    assert costs(found).window_per_sequence == TABLE[name].window


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(("column", "tp"), [(0, 8), (1, 16)])
def test_replicas_and_bytes_per_rank(name: str, column: int, tp: int) -> None:
    expected = TABLE[name].at[column]
    mesh = Mesh(tp=tp)
    if expected is None:
        with pytest.raises(PlanError, match=f"tp={tp}: expected"):
            build(load(name), mesh)
        return
    engine, copies, rank = expected
    model = build(load(name), mesh)
    result = plan(model.groups, mesh)
    assert kv_cache_groups_tp_replicas(model.engine_view(), tp, 1) == engine
    found = {x.spec.kind: replicas(g, x.spec.kind) for g in result.groups for x in g.layers}
    assert found == copies
    growing = [x for g in result.groups for x in g.layers if is_growing(x)]
    pages = sum(Fraction(x.spec.engine_page_bytes, x.spec.block_size) for x in growing)
    assert pages == Fraction(rank)


@pytest.mark.parametrize(
    ("name", "packed"),
    [("deepseek-v3.2-exp", 48_068), ("glm-5", 61_464), ("glm-5.2", 53_940), ("glm-5.3", 53_940)],
)
def test_packed_rows_of_sparse_models(name: str, packed: int) -> None:
    assert cost(name, "fp8_ds_mla").unique_per_token == packed


def test_the_engines_padding_is_not_ours() -> None:
    assert cost("deepseek-v4-flash", "fp8").unique_per_token == Fraction("3850.25")
    assert cost("deepseek-v4-pro", "fp8").unique_per_token == Fraction("5511.4375")


@pytest.mark.parametrize(
    ("name", "tp", "dtype", "blocks", "ours", "single", "copies"),
    [
        ("deepseek-v2-lite", 2, "auto", 1, 499_712, 499_712, 995_328),
        ("deepseek-v3.2-exp", 8, "auto", 1, 5_013_504, 5_013_504, 40_103_936),
        ("glm-5.3", 8, "fp8_ds_mla", 1, 3_452_928, 3_452_928, 27_619_328),
        ("deepseek-v4-flash", 8, "fp8_ds_mla", 4, 3_944_448, 4_009_984, 32_071_680),
    ],
)
def test_reference_slots(
    name: str, tp: int, dtype: str, blocks: int, ours: int, single: int, copies: int
) -> None:
    mesh = Mesh(tp=tp)
    model = build(load(name), mesh, dtype)
    widest_bytes = block_bytes(model.engine_view()) * blocks
    assert (round_up(widest_bytes), round_up(widest_bytes * tp)) == (single, copies)
    result = plan(model.groups, mesh, PlanOptions(blocks))
    growing = [g for g in result.groups if any(map(is_growing, g.layers))]
    assert [g.slot_bytes for g in growing] == [ours]
    assert result.engine_slot_bytes(1) == single
    assert result.engine_slot_bytes(tp) == copies


def test_the_five_groups_of_deepseek_v4_flash() -> None:
    result = planned("deepseek-v4-flash", Mesh(tp=8), "fp8")
    pages = [sum(x.spec.engine_page_bytes for x in g.layers) for g in result.groups]
    by_span = sorted(zip((g.tokens_per_block for g in result.groups), pages, strict=True))
    assert by_span == [
        (4, 870_912),
        (8, 656_640),
        (64, 786_240),
        (64, 823_680),
        (256, 1_002_240),
    ]
    widest = planned("deepseek-v4-pro", Mesh(tp=8), "fp8")
    assert max(sum(x.spec.engine_page_bytes for x in g.layers) for g in widest.groups) == 1_435_968


def test_indexers_of_glm_are_on_every_fourth_layer() -> None:
    names = [x.name for x in build(load("glm-5.3"), Mesh()).layers if x.kind == "indexer"]
    assert [int(n.split(".")[2]) for n in names] == [0, 1, 2, *range(6, 75, 4)]


def test_gemma_3_without_a_pattern_has_its_classes() -> None:
    config = load("gemma-3-27b")
    spoken = build(config, Mesh()).groups
    del config.values["sliding_window_pattern"]
    assert build(config, Mesh()).groups == spoken


def test_rings_keep_their_position_outside_prefix_caching() -> None:
    model = build(load("glm-5.3-flash"), Mesh(tp=8))
    ring = [g for g in model.groups if not g.prefix_cacheable]
    assert [[x.page_bytes for x in g.layers] for g in ring] == [[8192] * 11]
    result = plan(model.groups, Mesh(tp=8))
    assert [g.participating for g in result.groups] == [g.prefix_cacheable for g in model.groups]


def test_the_four_sources_of_deepseek_v4_1() -> None:
    """Windows are replayed and rings request-local: both outside prefix caching."""
    model = build(load("deepseek-v4.1-flash"), Mesh(tp=8), "fp8")
    outside: dict[str, list[int]] = {
        x.kind: [] for x in model.layers if x.kind not in ("mla", "indexer")
    }
    for group in model.groups:
        for layer in group.layers:
            if not group.prefix_cacheable:
                outside[layer.kind].append(layer.page_bytes)
    assert outside == {"sliding_window_mla": [32 * 584] * 40, "circular_buffer": [32_768] * 3}
    owners = {
        int(x.name.split(".")[2]): x.tokens_per_state for x in model.layers if x.kind == "mla"
    }
    assert owners == {2: 2, 8: 2, 14: 2, 20: 1}
    windows = [
        g for g in build(load("deepseek-v4.1-flash"), Mesh(pcp=2)).groups if g.layers[0].window
    ]
    assert [g.prefix_cacheable for g in windows] == [True]


def test_states_raise_the_block_size_as_the_engine_does() -> None:
    model = build(load("qwen3-next-80b-a3b"), Mesh())
    assert model.block_size == 544
    assert {x.engine_page_bytes for x in model.layers} == {1_114_112}
    assert any("544 instead of 16" in note for note in model.notes)


def test_a_single_mamba2_group_is_copied_to_every_rank() -> None:
    """Bamba at TP8: conv 3 x (8192 + 2 x 8 x 128) / 8 bf16, state 8192 / 8 x 128 bf16."""
    states = [x for x in build(load("bamba-9b"), Mesh(tp=8)).layers if x.kind == "mamba2"]
    assert {x.page_bytes for x in states} == {2 * (3 * (8192 + 2 * 8 * 128) // 8 + 1024 * 128)}


@pytest.mark.parametrize(("layers", "pp"), [(61, 4), (61, 2), (78, 8)])
def test_every_layer_is_on_one_stage_in_order(layers: int, pp: int) -> None:
    name = {61: "deepseek-v3", 78: "glm-5"}[layers]
    [group] = build(load(name), Mesh(tp=2, pp=pp)).groups
    assert list(group.stages) == sorted(group.stages)
    mla_stages = [s for x, s in zip(group.layers, group.stages, strict=True) if x.kind == "mla"]
    sizes = [mla_stages.count(i) for i in range(pp)]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [
        ("bfloat16", 131_072),
        ("float32", 262_144),
        ("fp8_e5m2", 65_536),
        ("nvfp4", 32 * 8 * 2 * (64 + 8)),
        ("int8_per_token_head", 32 * 8 * 2 * (128 + 4)),
        ("int4_per_token_head", 32 * 8 * 2 * (64 + 4)),
    ],
)
def test_quantised_pages(dtype: str, per_token: int) -> None:
    result = planned("llama-3.1-8b", Mesh(tp=2), dtype)
    assert costs(result).unique_per_token == per_token
    packed = "nvfp4" in dtype or "per_token_head" in dtype
    assert result.groups[0].topology_bound == packed


def test_canonical_slots_do_not_depend_on_tp_or_pp() -> None:
    for name in ("glm-5.3", "llama-3.1-70b", "minimax-m3"):
        slots = {
            planned(name, mesh).groups[0].slot_bytes
            for mesh in (Mesh(), Mesh(tp=2), Mesh(tp=16), Mesh(tp=4, pp=3), Mesh(tp=2, pcp=2))
        }
        assert len(slots) == 1
        assert not planned(name, Mesh(tp=8)).groups[0].topology_bound


def test_stored_bytes_count_whole_slots() -> None:
    found: Any = cost("kimi-k3")
    assert found.stored_per_token >= found.unique_per_token
    assert found.stored_per_sequence >= found.state_per_sequence
    assert found.stored_per_sequence % 4096 == 0
