"""The oracle is worth something only if it catches broken plans: seeded mutations, one a test."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from plan_oracle import Cluster, Moves, changed, cluster, problem

from kvfold.mesh import Mesh
from kvfold.plan import PlanOptions, Run, plan
from kvfold.spec import GroupSpec, LayerSpec

BLOCKS = 2
ROW = 3
SEEDS = range(12)


def layer(name: str, kind: str, heads: int, total: int, encoding: str) -> LayerSpec:
    return LayerSpec(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        block_size=4,
        num_kv_heads=heads,
        head_bytes=ROW,
        max_tp_shards=total,
        encoding=encoding,  # type: ignore[arg-type]
    )


def case(mesh: Mesh, layers: list[LayerSpec]) -> tuple[Moves, Cluster]:
    group = plan([GroupSpec.of(0, layers)], mesh, PlanOptions(BLOCKS)).groups[0]
    return Moves.of(group, mesh.world_size), cluster(layers, [0] * len(layers), mesh, BLOCKS)


HEADS, TRUE_HEADS = case(
    Mesh(tp=2),
    [
        layer("row", "mla", 1, 1, "heads_first"),
        layer("a", "full_attention", 2, 4, "tokens_first"),
        layer("b", "full_attention", 2, 4, "heads_first"),
    ],
)
TOKENS, TRUE_TOKENS = case(
    Mesh(tp=4, dcp=2),
    [
        layer("row", "mla", 1, 1, "heads_first"),
        layer("a", "full_attention", 1, 2, "heads_first"),
        layer("b", "full_attention", 1, 1, "tokens_first"),
    ],
)


def pick(
    rng: random.Random, runs: dict[int, list[Run]], fits: Callable[[Run], bool] = lambda run: True
) -> tuple[list[Run], int]:
    """Return a random run that fits, as its list and index."""
    found = [(some, i) for some in runs.values() for i, run in enumerate(some) if fits(run)]
    return rng.choice(found)


def caught(mutate: Callable[[random.Random, Moves], None], moves: Moves, truth: Cluster) -> None:
    for seed in SEEDS:
        mutated = moves.copy()
        mutate(random.Random(seed), mutated)
        assert problem(mutated, truth) is not None, f"{seed=}"


@pytest.mark.parametrize(("moves", "truth"), [(HEADS, TRUE_HEADS), (TOKENS, TRUE_TOKENS)])
def test_the_unchanged_plan_passes(moves: Moves, truth: Cluster) -> None:
    assert problem(moves.copy(), truth) is None


def test_a_read_shifted_by_a_token_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        runs, i = pick(rng, moves.reads)
        changed(runs, i, slot_offset=runs[i].slot_offset + ROW)

    caught(mutate, TOKENS, TRUE_TOKENS)


def test_a_write_shifted_by_a_token_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        runs, i = pick(rng, rng.choice(moves.writes))
        changed(runs, i, page_offset=runs[i].page_offset + ROW)

    caught(mutate, HEADS, TRUE_HEADS)


def test_swapped_heads_are_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        runs = rng.choice(rng.choice(moves.writes))
        block = rng.randrange(BLOCKS)
        first, second = (i for i, run in enumerate(runs) if run.layer == "a" and run.block == block)
        one, other = runs[first].slot_offset, runs[second].slot_offset
        changed(runs, first, slot_offset=other)
        changed(runs, second, slot_offset=one)

    caught(mutate, HEADS, TRUE_HEADS)


def test_a_dropped_writer_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        runs, i = pick(rng, rng.choice(moves.writes))
        del runs[i]

    caught(mutate, HEADS, TRUE_HEADS)


def test_a_doubled_writer_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        spread = rng.choice(moves.writes)
        runs, i = pick(rng, spread, lambda run: run.layer != "a")
        rank = next(rank for rank, some in spread.items() if some is runs)
        spread[(rank + 2) % 4].append(runs[i])  # the other owner of these tokens on this mesh

    caught(mutate, TOKENS, TRUE_TOKENS)


def test_a_run_cut_short_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        runs, i = pick(rng, rng.choice([moves.reads, *moves.writes]))
        changed(runs, i, nbytes=runs[i].nbytes - 1)

    caught(mutate, TOKENS, TRUE_TOKENS)


def test_a_lost_piece_of_a_run_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        runs, i = pick(rng, rng.choice([moves.reads, *moves.writes]), lambda run: run.count > 1)
        changed(runs, i, count=runs[i].count - 1)

    caught(mutate, TOKENS, TRUE_TOKENS)


def test_two_layers_swapped_in_the_slot_are_caught() -> None:
    """Even if all ranks agree on it: the slot would no longer be canonical."""

    def swap(run: Run) -> Run:
        size = ROW * 4 * 4 * BLOCKS
        shift = {"row": 0, "a": size, "b": -size}[run.layer]
        return replace(run, slot_offset=run.slot_offset + shift)

    def mutate(rng: random.Random, moves: Moves) -> None:
        for spread in [moves.reads, *moves.writes]:
            for rank, runs in spread.items():
                spread[rank] = [swap(run) for run in runs]

    caught(mutate, HEADS, TRUE_HEADS)


def test_two_blocks_swapped_are_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        runs, i = pick(rng, rng.choice([moves.reads, *moves.writes]))
        changed(runs, i, block=1 - runs[i].block)

    caught(mutate, HEADS, TRUE_HEADS)


def test_token_shards_taken_for_replicas_are_caught() -> None:
    """DCP shards folded as if they were copies: the corruption seen in the field."""

    def mutate(rng: random.Random, moves: Moves) -> None:
        rank = rng.randrange(4)
        moves.reads[rank] = list(moves.reads[rank ^ 1])

    caught(mutate, TOKENS, TRUE_TOKENS)


def test_head_shards_taken_for_replicas_are_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        rank = rng.randrange(2)
        mine = [run for run in moves.reads[rank] if run.layer == "row"]
        moves.reads[rank] = mine + [r for r in moves.reads[1 - rank] if r.layer != "row"]

    caught(mutate, HEADS, TRUE_HEADS)


def test_a_wrong_stride_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        runs, i = pick(rng, moves.reads, lambda run: run.count > 1)
        changed(runs, i, slot_stride=runs[i].slot_stride - ROW)

    caught(mutate, TOKENS, TRUE_TOKENS)


def test_a_missing_reader_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        moves.reads[rng.randrange(4)].pop()

    caught(mutate, TOKENS, TRUE_TOKENS)


def test_padding_counted_as_content_is_caught() -> None:
    def mutate(rng: random.Random, moves: Moves) -> None:
        moves.chunk_bytes += rng.randrange(1, 4096)

    caught(mutate, HEADS, TRUE_HEADS)
