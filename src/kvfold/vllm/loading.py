"""What a load fills: chunks and block tables, per group, from the engine's own tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvfold.vllm.messages import NO_BLOCK, LoadPart
from kvfold.vllm.requests import Geometry, GroupGeometry, Load, RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def load_parts(
    geometry: Geometry,
    state: RequestState,
    tables: Sequence[Sequence[KVCacheBlock]],
    load: Load,
    tickets: Iterator[int],
    keys: Callable[[int, NDArray[np.int64]], bytes],
) -> list[LoadPart]:
    """One part per group that a load up to `load.end` fills; noted in `load.parts` too.

    `tables` are the request's blocks by the engine's groups. Raises ValueError if the engine wants
    a hit that was not offered, or blocks that no chunk fills.
    """
    lookup = state.lookup
    if lookup is None or lookup.tiers is None or load.end != lookup.boundary:
        raise ValueError(f"nothing is known of a hit of {load.end} tokens")
    parts = []
    for group in geometry.groups:
        chunks, blocks = rows(geometry, group, tables[group.index], state.local, load.end)
        if group.optional:
            there = lookup.tiers[group.number, chunks] != 0
            load.draft_left_out += _ids(blocks[~there])
            load.draft_blocks += _ids(blocks[there])
            chunks, blocks = chunks[there], blocks[there]
        if len(chunks):
            joined = keys(group.number, chunks)
            parts.append(LoadPart(next(tickets), group.number, joined, blocks, group.optional))
            load.parts.append((group.number, chunks))
    return parts


def _ids(blocks: NDArray[np.int32]) -> list[int]:
    return [int(block) for block in blocks[blocks != NO_BLOCK]]


def rows(
    geometry: Geometry, group: GroupGeometry, table: Sequence[KVCacheBlock], local: int, end: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The chunks that fill the blocks of `table` in [local, end), and their rows of block ids.

    Rows have shape (chunks, blocks per chunk), `NO_BLOCK` where the engine has the block already or
    none at all. Chunks without any block to fill are left out. Raises ValueError as above.
    """
    period, span, width = geometry.period, group.tokens_per_block, group.blocks_per_chunk
    if local % span:
        raise ValueError(f"the engine's own hit of {local} tokens ends inside a block")
    first, stop = -(-local // span), -(-end // span)
    ids = np.fromiter((block.block_id for block in table[first:stop]), np.int32, stop - first)
    fill = np.count_nonzero(ids)  # block 0 is the engine's hole
    if not fill:
        return np.empty(0, np.int64), np.empty((0, width), np.int32)
    start = max(local, group.first_token(end)) // period
    chunks = np.arange(start, end // period)
    in_period = period // span  # a state's block may be longer than a period
    last = np.array([stop - 1]) if group.need == "state" else (chunks + 1) * in_period - 1
    places = last[:, None] + np.arange(1 - width, 1)
    blocks = np.full(places.shape, NO_BLOCK, dtype=np.int32)
    inside = (places >= first) & (places < stop)
    taken = ids[places[inside] - first]
    blocks[inside] = np.where(taken == 0, NO_BLOCK, taken)
    if np.count_nonzero(blocks >= 0) != fill:
        raise ValueError(f"group {group.label} has blocks that no chunk fills")
    there = (blocks >= 0).any(axis=1)
    return chunks[there], blocks[there]


def disk_tokens(geometry: Geometry, load: Load, tiers: NDArray[np.uint8]) -> int:
    """Tokens of a load of which any group's chunk comes from disk. `tiers`: (groups, chunks)."""
    columns = np.zeros(tiers.shape[1], dtype=bool)
    for number, chunks in load.parts:
        columns[chunks[tiers[number, chunks] == 1]] = True
    if all(group.need != "all" for group in geometry.groups):  # a chunk stands for all before it
        return load.tokens if columns.any() else 0
    return min(int(columns.sum()) * geometry.period, load.tokens)
