"""Owners, runs of a fragment, spans, and dealing out the writing."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.errors import PlanError
from kvfold.mesh import Mesh
from kvfold.placement import Run, deal, fragment_runs, place, tokens_per_block
from kvfold.spec import LayerSpec, UniformSpec


def layer(**changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {
        "name": "a",
        "kind": "full_attention",
        "block_size": 8,
        "num_kv_heads": 1,
        "head_bytes": 10,
    }
    return LayerSpec(**(fields | changes))


def mla(**changes: Any) -> LayerSpec:
    return layer(**({"kind": "mla", "max_tp_shards": 1} | changes))


def runs(spec: LayerSpec, mesh: Mesh, shard: int) -> list[Run]:
    return fragment_runs(spec, place(spec, 0, mesh), shard, mesh)


def test_owners_follow_head_and_token_shards() -> None:
    placed = place(layer(max_tp_shards=2), 0, Mesh(tp=8, dcp=2))
    assert [(f.head_shard, f.token_shard, f.owners) for f in placed.fragments] == [
        (0, 0, (0, 2)),
        (0, 1, (1, 3)),
        (1, 0, (4, 6)),
        (1, 1, (5, 7)),
    ]


def test_owners_are_ranks_of_the_owning_stage() -> None:
    placed = place(mla(), 1, Mesh(tp=2, pp=3))
    assert [f.owners for f in placed.fragments] == [(2, 3)]


def test_pcp_ranks_outside_dcp_are_replicas() -> None:
    placed = place(layer(max_tp_shards=2), 0, Mesh(tp=2, pcp=2))
    assert [f.owners for f in placed.fragments] == [(0, 2), (1, 3)]


def test_layers_that_are_not_token_sharded_ignore_dcp() -> None:
    placed = place(mla(dcp_sharded=False), 0, Mesh(tp=4, dcp=4))
    assert [f.replicas for f in placed.fragments] == [4]


def state(**changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {"kind": "mamba2", "tokens_per_state": 8, "encoding": "opaque"}
    return layer(**(fields | {"dcp_sharded": False} | changes))


@pytest.mark.parametrize(
    ("replicated", "mesh", "owners"),
    [
        (False, Mesh(tp=2), [(0,), (1,)]),
        (False, Mesh(tp=2, dcp=2), [(0,), (1,)]),
        (False, Mesh(tp=2, pcp=2), [(0, 2), (1, 3)]),
        (False, Mesh(tp=2, pcp=2, dcp=4), [(0, 2), (1, 3)]),
        (True, Mesh(tp=2, pcp=2), [(0, 1, 2, 3)]),
        (True, Mesh(tp=4, dcp=4), [(0, 1, 2, 3)]),
    ],
)
def test_states_are_split_by_tp_alone(
    replicated: bool, mesh: Mesh, owners: list[tuple[int, ...]]
) -> None:
    placed = place(state(tp_replicated=replicated), 0, mesh)
    assert [f.owners for f in placed.fragments] == owners
    assert placed.warning is None
    assert not placed.canonical


def test_a_replicated_state_that_is_understood_does_not_bind_to_the_mesh() -> None:
    spec = state(tp_replicated=True, encoding="whole_page")
    assert place(spec, 0, Mesh(tp=4)).canonical
    assert runs(spec, Mesh(tp=4), 0) == [Run("a", 0, 0, 0, 10)]


def test_states_keep_a_whole_page_per_tp_rank() -> None:
    assert runs(state(), Mesh(tp=4, pcp=2), 3) == [Run("a", 0, 0, 30, 10)]


def test_whole_pages_cannot_be_divided_by_token() -> None:
    spec = mla(kind="indexer", encoding="whole_page")
    assert place(spec, 0, Mesh(tp=4)).canonical
    split = place(spec, 0, Mesh(tp=4, dcp=2))
    assert not split.canonical
    assert "kept whole per DCP shard" in split.reason
    assert [f.replicas for f in split.fragments] == [2, 2]
    assert runs(spec, Mesh(tp=4, dcp=2), 1) == [Run("a", 0, 0, 80, 80)]


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local"])
def test_recycled_kinds_are_placed_as_full_attention(kind: Any) -> None:
    spec, full = layer(kind=kind, window=8, max_tp_shards=2), layer(max_tp_shards=2)
    for mesh in (Mesh(tp=2), Mesh(tp=8), Mesh(tp=4, pcp=2)):
        assert place(spec, 0, mesh).fragments == place(full, 0, mesh).fragments


@pytest.mark.parametrize(
    ("spec", "mesh", "named"),
    [
        (layer(max_tp_shards=6), Mesh(tp=8), "'a' KV heads=6"),
        (layer(max_tp_shards=6), Mesh(tp=4), "'a' KV heads=6"),
        (layer(max_tp_shards=8), Mesh(tp=4), "'a' num_kv_heads=1: expected 2"),
        (layer(max_tp_shards=8), Mesh(tp=1), "'a' num_kv_heads=1: expected 8"),
        (layer(max_tp_shards=8), Mesh(tp=8, dcp=2), "'a' dcp=2.*at least 2 ranks per head"),
        (mla(), Mesh(tp=2, dcp=2, dcp_interleave=3), "'a' block_size=8.*dcp_interleave=3"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_layer(spec: LayerSpec, mesh: Mesh, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        place(spec, 0, mesh)


def test_an_undeclared_layer_warns_by_name_and_keeps_a_page_per_rank() -> None:
    placed = place(layer(name="draft.0", total_kv_heads=6), 0, Mesh(tp=8))
    assert [f.owners for f in placed.fragments] == [(rank,) for rank in range(8)]
    assert not placed.canonical
    assert placed.warning is not None
    assert "'draft.0'" in placed.warning
    assert "6 total heads" in placed.warning


def test_an_undeclared_layer_on_a_single_rank_loses_nothing() -> None:
    placed = place(layer(num_kv_heads=4), 0, Mesh())
    assert placed.canonical
    assert placed.warning is None


@pytest.mark.parametrize(
    ("spec", "mesh", "shard", "expected"),
    [
        # Whole pages and heads-first shards are one piece.
        (mla(), Mesh(tp=2), 0, [Run("a", 0, 0, 0, 80)]),
        (layer(num_kv_heads=2, max_tp_shards=4), Mesh(tp=2), 1, [Run("a", 0, 0, 160, 160)]),
        (mla(encoding="tokens_first"), Mesh(tp=2), 0, [Run("a", 0, 0, 0, 80)]),
        # One run per head when tokens come first.
        (
            layer(num_kv_heads=2, max_tp_shards=4, encoding="tokens_first"),
            Mesh(tp=2),
            1,
            [Run("a", 0, 0, 160, 10, 8, 20, 10), Run("a", 0, 10, 240, 10, 8, 20, 10)],
        ),
        # Token shards interleave in the slot; one run whatever the number of heads.
        (mla(), Mesh(tp=2, dcp=2), 1, [Run("a", 0, 0, 10, 10, 8, 10, 20)]),
        (
            mla(),
            Mesh(tp=2, dcp=2, dcp_interleave=4),
            1,
            [Run("a", 0, 0, 40, 40, 2, 40, 80)],
        ),
        (
            layer(num_kv_heads=2, max_tp_shards=2),
            Mesh(pcp=2, dcp=2),
            1,
            [Run("a", 0, 0, 10, 10, 16, 10, 20)],
        ),
        # All K before all V: one run for each, whose pieces are one state's part.
        (
            layer(num_kv_heads=2, max_tp_shards=4, encoding="halves_heads_first", key_bytes=6),
            Mesh(tp=2),
            1,
            [Run("a", 0, 0, 160, 6, 16, 6, 10), Run("a", 0, 96, 166, 4, 16, 4, 10)],
        ),
        (
            layer(num_kv_heads=2, max_tp_shards=2, encoding="halves_tokens_first", key_bytes=6),
            Mesh(),
            0,
            [
                Run("a", 0, 0, 0, 6, 8, 12, 10),
                Run("a", 0, 6, 80, 6, 8, 12, 10),
                Run("a", 0, 96, 6, 4, 8, 8, 10),
                Run("a", 0, 100, 86, 4, 8, 8, 10),
            ],
        ),
        (
            layer(num_kv_heads=2, max_tp_shards=2, encoding="halves_heads_first"),
            Mesh(pcp=2, dcp=2),
            1,
            [Run("a", 0, 0, 10, 5, 16, 5, 20), Run("a", 0, 80, 15, 5, 16, 5, 20)],
        ),
        # Opaque pages are whole, in the order of the shards.
        (layer(max_tp_shards=2, encoding="opaque"), Mesh(tp=4), 1, [Run("a", 0, 0, 80, 80)]),
    ],
)
def test_runs_are_merged(spec: LayerSpec, mesh: Mesh, shard: int, expected: list[Run]) -> None:
    assert runs(spec, mesh, shard) == expected


@pytest.mark.parametrize(("interleave", "per_head"), [(1, 1), (2, 2), (4, 2), (8, 1)])
def test_tokens_first_under_dcp_takes_the_fewer_runs(interleave: int, per_head: int) -> None:
    spec = layer(num_kv_heads=3, max_tp_shards=3, encoding="tokens_first")
    mesh = Mesh(pcp=2, dcp=2, dcp_interleave=interleave)
    assert len(runs(spec, mesh, 0)) == 3 * per_head


def copied(spec: LayerSpec, page: bytes) -> bytes:
    slot = bytearray(spec.page_bytes)
    for run in runs(spec, Mesh(), 0):
        for piece in range(run.count):
            at, to = run.page_offset + piece * run.page_stride, run.slot_offset
            to += piece * run.slot_stride
            slot[to : to + run.nbytes] = page[at : at + run.nbytes]
    return bytes(slot)


def test_two_heads_are_not_taken_for_k_and_v() -> None:
    """Pages of one shape, [2, 2, ...]: which of the axes are the heads is said, not guessed."""
    two = {"num_kv_heads": 2, "max_tp_shards": 2, "block_size": 2, "head_bytes": 2}
    slot = b"kvKVlwLW"  # heads k and l, their second state in capitals, v and w the V of each
    for encoding, page in (
        ("heads_first", b"kvKVlwLW"),
        ("tokens_first", b"kvlwKVLW"),
        ("halves_heads_first", b"kKlLvVwW"),
        ("halves_tokens_first", b"klKLvwVW"),
    ):
        assert copied(layer(encoding=encoding, **two), page) == slot


def test_states_that_span_token_shards_keep_pages_whole() -> None:
    spec = mla(tokens_per_state=4)
    assert not place(spec, 0, Mesh(tp=2, dcp=2)).canonical
    assert place(spec, 0, Mesh(tp=2, dcp=2, dcp_interleave=4)).canonical
    assert place(spec, 0, Mesh(tp=2)).canonical


@pytest.mark.parametrize(
    ("block_size", "sharded", "dcp", "tokens"),
    [(64, True, 1, 64), (64, True, 2, 128), (64, True, 8, 512), (16, False, 2, 16)],
)
def test_spans(block_size: int, sharded: bool, dcp: int, tokens: int) -> None:
    main = mla(block_size=block_size, dcp_sharded=sharded)
    indexer = mla(name="i", block_size=block_size, dcp_sharded=sharded, head_bytes=132)
    assert tokens_per_block(main, dcp) == tokens
    assert tokens_per_block(UniformSpec((main, indexer)), dcp) == tokens
    assert tokens_per_block([main, indexer], dcp) == tokens


def test_mixed_spans_have_no_answer() -> None:
    with pytest.raises(PlanError, match="tokens_per_block"):
        tokens_per_block([mla(), mla(name="b", block_size=16)], 1)


@pytest.mark.parametrize(
    ("sizes", "owners", "shares"),
    [
        ([10] * 8, 4, [20, 20, 20, 20]),
        ([7] * 3, 4, [0, 7, 7, 7]),
        ([5, 5, 5, 5, 10], 2, [15, 15]),
        ([1, 10], 2, [1, 10]),
        ([1], 1, [1]),
    ],
)
def test_dealing_balances_bytes(sizes: list[int], owners: int, shares: list[int]) -> None:
    given = [0] * owners
    dealt = deal(sizes, owners)
    for size, owner in zip(sizes, dealt, strict=True):
        given[owner] += size
    assert sorted(given) == sorted(shares)
    assert list(dealt) == sorted(dealt)


def test_no_share_is_more_than_a_segment_from_even() -> None:
    sizes = [1152, 132] * 61
    given = [0] * 8
    for size, owner in zip(sizes, deal(sizes, 8), strict=True):
        given[owner] += size
    assert max(abs(share - sum(sizes) / 8) for share in given) <= 1152
