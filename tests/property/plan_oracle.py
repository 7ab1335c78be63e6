"""An independent judge of plans: every byte of every rank, one by one.

Shares no code with the planner and uses none of its formulas: ranks are counted, tokens are dealt
like cards, and slot positions come from counting through the canonical order. Only the input
values (`LayerSpec`, `Mesh`) and the runs under test are the planner's types, read as plain fields.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

Content = tuple[Any, ...]  # what a byte is: (layer, block, head, token, byte), or a whole page's


@dataclass
class Moves:
    """What a plan tells the ranks to do with one chunk; free to be mutated."""

    chunk_bytes: int
    reads: dict[int, list[Any]]
    writes: list[dict[int, list[Any]]]  # by rotation, then rank

    def copy(self) -> Moves:
        return Moves(
            self.chunk_bytes,
            {rank: list(runs) for rank, runs in self.reads.items()},
            [{rank: list(runs) for rank, runs in spread.items()} for spread in self.writes],
        )

    @classmethod
    def of(cls, group: Any, world_size: int) -> Moves:
        return cls(
            group.chunk_bytes,
            {rank: list(group.reads(rank)) for rank in range(world_size)},
            [
                {rank: list(group.writes(rank, rotation)) for rank in range(world_size)}
                for rotation in range(group.rotations)
            ],
        )


@dataclass
class Cluster:
    """The truth: for every rank, layer and block, what each byte of the page is."""

    pages: dict[tuple[int, str, int], list[Content]] = field(default_factory=dict)
    slot: dict[Content, int] = field(default_factory=dict)
    uncovered: bool = False  # some head or token is held by nobody


def cluster(layers: list[Any], stages: list[int], mesh: Any, blocks: int) -> Cluster:
    """Lay out every page of every rank, and the canonical slot of one chunk."""
    truth = Cluster()
    position = 0
    for layer, stage in zip(layers, stages, strict=True):
        for block in range(blocks):
            contents = _layer_pages(truth, layer, stage, mesh, block)
            for content in contents:
                truth.slot[content] = position
                position += 1
    held = {content for page in truth.pages.values() for content in page}
    truth.uncovered = any(content not in held for content in truth.slot)
    return truth


def _layer_pages(truth: Cluster, layer: Any, stage: int, mesh: Any, block: int) -> list[Content]:
    """Fill in the layer's pages on all its ranks; return the block's bytes in slot order."""
    ranks = _count_ranks(mesh)[stage]
    shards = mesh.dcp if layer.dcp_sharded else 1
    states = layer.block_size // layer.tokens_per_state
    if layer.kind in ("mamba2", "kda"):  # one state per TP rank, or one for all of them
        parts = 1 if layer.tp_replicated else mesh.tp
        for rank, tp_rank, _ in ranks:
            truth.pages[rank, layer.name, block] = [
                (layer.name, block, "state", tp_rank % parts, byte)
                for byte in range(layer.page_bytes)
            ]
        return [
            (layer.name, block, "state", part, byte)
            for part in range(parts)
            for byte in range(layer.page_bytes)
        ]
    undeclared = layer.max_tp_shards is None and len(ranks) > 1
    # Tokens are dealt in hands of `interleave` to the token shards, in turn.
    tokens: list[list[int]] = [[] for _ in range(shards)]
    split_states = shards > 1 and mesh.dcp_interleave % layer.tokens_per_state != 0
    if not split_states:
        hand = mesh.dcp_interleave // layer.tokens_per_state if shards > 1 else states
        deck = list(range(states * shards))
        turn = 0
        while deck:
            tokens[turn % shards] += deck[:hand]
            deck = deck[hand:]
            turn += 1

    if undeclared:
        whole = [("rank", i) for i in range(len(ranks))]
        for i, (rank, _, _) in enumerate(ranks):
            truth.pages[rank, layer.name, block] = [
                (layer.name, block, "rank", i, byte) for byte in range(layer.page_bytes)
            ]
        return [(layer.name, block, *key, b) for key in whole for b in range(layer.page_bytes)]

    kept_whole = layer.encoding == "opaque" or split_states
    kept_whole |= layer.encoding == "whole_page" and shards > 1
    total = layer.max_tp_shards or layer.num_kv_heads
    seats = [total * seat // mesh.tp for seat in range(mesh.tp)]  # first head of each tp rank
    head_groups = sorted(set(seats))
    for rank, tp_rank, token_shard in ranks:
        shard = token_shard if shards > 1 else 0
        first = seats[tp_rank]
        if kept_whole:
            page = [
                (layer.name, block, "shard", head_groups.index(first), shard, byte)
                for byte in range(layer.page_bytes)
            ]
        else:
            heads = range(first, first + layer.num_kv_heads)
            rows = [(h, t) for h in heads for t in tokens[shard]]
            if layer.encoding in ("tokens_first", "halves_tokens_first"):
                rows = [(h, t) for t in tokens[shard] for h in heads]
            state = list(range(layer.head_bytes))
            parts = [state]
            if layer.encoding in ("halves_heads_first", "halves_tokens_first"):
                parts = [state[: layer.key_bytes], state[layer.key_bytes :]]  # all K, then all V
            page = [
                (layer.name, block, h, t, byte) for part in parts for h, t in rows for byte in part
            ]
        truth.pages[rank, layer.name, block] = page
    if kept_whole:
        return [
            (layer.name, block, "shard", group, shard, byte)
            for group in range(len(head_groups))
            for shard in range(shards)
            for byte in range(layer.page_bytes)
        ]
    return [
        (layer.name, block, h, t, byte)
        for h in range(total)
        for t in range(states * shards)
        for byte in range(layer.head_bytes)
    ]


def _count_ranks(mesh: Any) -> list[list[tuple[int, int, int]]]:
    """Return per stage (rank, tp rank, token shard), by counting through the axes."""
    stages, rank = [], 0
    for _ in range(mesh.pp):
        stage = []
        for pcp_rank in range(mesh.pcp):
            for tp_rank in range(mesh.tp):
                stage.append((rank, tp_rank, (tp_rank * mesh.pcp + pcp_rank) % mesh.dcp))
                rank += 1
        stages.append(stage)
    return stages


def problem(moves: Moves, truth: Cluster) -> str | None:
    """Return the first thing that is wrong with `moves`, or None."""
    if moves.chunk_bytes != len(truth.slot):
        return f"chunk of {moves.chunk_bytes} bytes, {len(truth.slot)} are distinct"
    read: Counter[tuple[int, str, int, int]] = Counter()
    for rank, runs in moves.reads.items():
        for run in runs:
            if wrong := _follow(run, rank, truth, read, None):
                return f"reads of rank {rank}: {wrong}"
    for (rank, layer, block), page in truth.pages.items():
        for byte in range(len(page)):
            if (n := read[rank, layer, block, byte]) != 1:
                return f"byte {byte} of {layer} block {block} on rank {rank} is read {n} times"
    for rotation, spread in enumerate(moves.writes):
        written: Counter[int] = Counter()
        for rank, runs in spread.items():
            for run in runs:
                if wrong := _follow(run, rank, truth, None, written):
                    return f"writes of rank {rank}, rotation {rotation}: {wrong}"
        for position in range(moves.chunk_bytes):
            if written[position] != 1:
                return f"slot byte {position} is written {written[position]} times ({rotation=})"
    return None


def _follow(
    run: Any,
    rank: int,
    truth: Cluster,
    read: Counter[tuple[int, str, int, int]] | None,
    written: Counter[int] | None,
) -> str | None:
    """Walk one run byte by byte; both ends must be the same logical byte."""
    page = truth.pages.get((rank, run.layer, run.block))
    if page is None:
        return f"no page of {run.layer} block {run.block}"
    for piece in range(run.count):
        for byte in range(run.nbytes):
            at = run.page_offset + piece * run.page_stride + byte
            to = run.slot_offset + piece * run.slot_stride + byte
            if not 0 <= at < len(page):
                return f"page byte {at} of {run.layer} is outside the page"
            if truth.slot[page[at]] != to:
                return f"page byte {at} of {run.layer} is {page[at]}, not slot byte {to}"
            if read is not None:
                read[rank, run.layer, run.block, at] += 1
            if written is not None:
                written[to] += 1
    return None


def changed(runs: list[Any], index: int, **fields: int) -> None:
    """Replace one run in a list by itself with other `fields`."""
    runs[index] = replace(runs[index], **fields)
