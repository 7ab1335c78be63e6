"""The truth of a virtual cluster: one logical cache, and what every rank holds of it.

Written from the rules of cache kinds and ranks alone, with formulas of its own: it shares no code
with the planner. Only input values (`LayerSpec`, `Mesh`) are read, as plain fields.

The logical cache is a stream of pseudo-random bytes per layer in the order block, head, state,
byte, so that a byte in the wrong place shows. Pages that cannot be read that way (states, opaque
pages) are streams of their own, named by what makes two ranks hold the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfold.mesh import Mesh
from kvfold.spec import STATE_KINDS, LayerSpec

Bytes = NDArray[np.uint8]


class Seat(NamedTuple):
    """One rank and where it sits; `dcp` is the token shard it holds of token-sharded layers."""

    rank: int
    pp: int
    pcp: int
    tp: int
    dcp: int


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a layer. Equal holdings are equal bytes.

    `heads` and `states` number the rows of the logical cache in a page; both empty for a page that
    is held whole, whose content `name` tells apart.
    """

    name: tuple[str | int, ...]
    heads: tuple[int, ...] = ()
    states: tuple[int, ...] = ()


def seats(mesh: Mesh) -> Iterator[Seat]:
    """Yield every rank, counted through the axes: stages outermost, TP innermost."""
    rank = 0
    for pp in range(mesh.pp):
        for pcp in range(mesh.pcp):
            for tp in range(mesh.tp):
                yield Seat(rank, pp, pcp, tp, (tp * mesh.pcp + pcp) % mesh.dcp)
                rank += 1


def heads_of(total: int, tp: int, tp_rank: int) -> tuple[int, ...]:
    """Return the heads of a TP rank: an equal share, or the one head it shares with others."""
    if total >= tp:
        share = total // tp
        return tuple(range(tp_rank * share, (tp_rank + 1) * share))
    return (tp_rank // (tp // total),)


def holding(layer: LayerSpec, mesh: Mesh, seat: Seat) -> Holding:
    """Return what the rank at `seat` holds of each block of `layer`, on the layer's stage."""
    if layer.kind in STATE_KINDS:
        return Holding(("state", 0 if layer.tp_replicated else seat.tp))
    alone = mesh.tp * mesh.pcp == 1
    if layer.max_tp_shards is None and not alone:
        return Holding(("rank", seat.pcp, seat.tp))
    total = layer.max_tp_shards or layer.num_kv_heads
    heads = heads_of(total, mesh.tp, seat.tp)
    shards = mesh.dcp if layer.dcp_sharded else 1
    shard = seat.dcp if shards > 1 else 0
    states_split = shards > 1 and mesh.dcp_interleave % layer.tokens_per_state > 0
    if layer.encoding == "opaque" or states_split:
        return Holding(("shard", heads[0], shard))
    if layer.encoding == "whole_page":  # one head, the same wherever all of it is held
        return Holding(("page", shard))
    all_states = layer.block_size // layer.tokens_per_state * shards
    hand = mesh.dcp_interleave // layer.tokens_per_state if shards > 1 else all_states
    mine = tuple(s for s in range(all_states) if s // hand % shards == shard)
    return Holding(("rows",), heads, mine)


class Truth:
    """The logical cache of `blocks` blocks of every layer, for the ranks of one mesh.

    Layers named in `unlike` are held differently by every rank, whatever they declare. Two truths
    of one `seed` agree wherever both meshes can read the same logical bytes.
    """

    def __init__(
        self, mesh: Mesh, blocks: int, seed: int = 0, unlike: Collection[str] = ()
    ) -> None:
        self.mesh, self.blocks, self.seed, self.unlike = mesh, blocks, seed, frozenset(unlike)
        self._last: tuple[tuple[object, ...], Bytes] = ((), np.empty(0, np.uint8))

    def holding(self, layer: LayerSpec, seat: Seat) -> Holding:
        """Return what the rank at `seat` holds of each block of `layer`."""
        if layer.name in self.unlike:
            return Holding(("unlike", seat.pcp, seat.tp))
        return holding(layer, self.mesh, seat)

    def pages(self, layer: LayerSpec, seat: Seat) -> Bytes:
        """Return all pages of the rank at `seat`, shape (blocks, page_bytes), without padding."""
        held = self.holding(layer, seat)
        if not held.states:
            return self._stream((layer.name, *held.name), (layer.page_bytes,))
        logical = self._rows(layer)
        first, count = held.heads[0], len(held.heads)
        mine = logical[:, first : first + count]
        if len(held.states) < logical.shape[2]:
            mine = mine[:, :, list(held.states)]
        if layer.encoding in ("tokens_first", "halves_tokens_first"):
            mine = mine.transpose(0, 2, 1, 3)
        if layer.encoding.startswith("halves"):
            halves = np.split(mine, [layer.key_bytes], axis=3)
            return np.concatenate([half.reshape(self.blocks, -1) for half in halves], axis=1)
        return mine.reshape(self.blocks, layer.page_bytes)

    def slots(self, layer: LayerSpec, stage: int) -> Bytes | None:
        """Return the layer's bytes of a slot by the format, shape (blocks, bytes of one block).

        Rows by head, state, byte; pages held whole one after another, by shard. None if `layer` is
        in `unlike`: what its slot should be is not defined.
        """
        holders = {self.holding(layer, s): s for s in seats(self.mesh) if s.pp == stage}
        if layer.name in self.unlike:
            return None
        if all(held.states for held in holders):
            return self._rows(layer).reshape(self.blocks, -1)
        ordered = sorted(holders.items(), key=lambda item: item[0].name)
        return np.concatenate([self.pages(layer, seat) for _, seat in ordered], axis=1)

    def distinct_bytes(self, layer: LayerSpec, stage: int) -> int:
        """Return how many bytes of one block of `layer` differ in more than their copies."""
        heads: dict[tuple[object, ...], set[int]] = {}
        whole: set[Holding] = set()
        for seat in seats(self.mesh):
            if seat.pp == stage:
                held = self.holding(layer, seat)
                if held.states:
                    heads.setdefault(held.states, set()).update(held.heads)
                else:
                    whole.add(held)
        rows = sum(len(states) * len(found) for states, found in heads.items())
        return rows * layer.head_bytes + len(whole) * layer.page_bytes

    def _rows(self, layer: LayerSpec) -> Bytes:
        """Return the logical cache of a layer of rows: (blocks, heads, states, head_bytes)."""
        total = layer.max_tp_shards or layer.num_kv_heads
        shards = self.mesh.dcp if layer.dcp_sharded else 1
        states = layer.block_size // layer.tokens_per_state * shards
        return self._stream((layer.name, "rows"), (total, states, layer.head_bytes))

    def _stream(self, name: tuple[str | int, ...], shape: tuple[int, ...]) -> Bytes:
        """Return the bytes of this name, (blocks, *shape); the last one is kept for its sharers."""
        if self._last[0] != (name, shape):
            digest = hashlib.sha256(repr((self.seed, name)).encode()).digest()
            nbytes = self.blocks * int(np.prod(shape))
            words = np.random.SFC64(int.from_bytes(digest[:8], "little")).random_raw(
                -(-nbytes // 8)
            )
            content = np.asarray(words, np.uint64).view(np.uint8)[:nbytes]
            self._last = (name, shape), content.reshape(self.blocks, *shape)
        return self._last[1]
