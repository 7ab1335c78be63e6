"""Fragments and their owners: which ranks hold which bytes of a layer.

A *fragment* is one layer's bytes for one head shard and one token shard of one block. Its owners
are all ranks that hold it, its replicas their number. Every owner reads a fragment; the owners
share the writing, spread by `deal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from kvfold.errors import PlanError
from kvfold.mesh import Mesh
from kvfold.spec import (
    HALVES,
    HEAD_KINDS,
    ROW_KINDS,
    STATE_KINDS,
    AnySpec,
    LayerSpec,
    iter_layer_specs,
)


@dataclass(frozen=True)
class Fragment:
    """One layer's bytes for one head shard and one token shard of a block, and who holds them.

    Owners are ascending global ranks. A layer whose placement is unknown has one fragment per
    rank of its stage, numbered by `head_shard`.
    """

    layer: str
    head_shard: int
    token_shard: int
    owners: tuple[int, ...]

    @property
    def replicas(self) -> int:
        return len(self.owners)


@dataclass(frozen=True)
class LayerPlacement:
    """How one layer is spread over its pipeline stage.

    `canonical` is True if bytes can be laid out by head and token; otherwise pages are kept whole
    and the topology belongs to their identity. `reason` says why a layer is folded, sharded, or
    neither; `warning` is set if folding may be lost because something was not declared.
    """

    stage: int
    head_shards: int
    token_shards: int
    fragments: tuple[Fragment, ...]
    canonical: bool
    reason: str
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One strided copy between this rank's page of `layer` for block `block` and the chunk's slot.

    For i in range(count): `nbytes` at page_offset + i * page_stride (bytes within the page of the
    chunk's `block`-th block) <-> slot_offset + i * slot_stride (bytes within the slot).
    """

    layer: str
    block: int
    page_offset: int
    slot_offset: int
    nbytes: int
    count: int = 1
    page_stride: int = 0
    slot_stride: int = 0


def tokens_per_block(spec: AnySpec, dcp: int) -> int:
    """Return the tokens one block spans over all ranks: `block_size`, x `dcp` if token-sharded.

    Containers are unwrapped; their layers share one span. The only place that answers this.
    """
    spans = {s.block_size * (dcp if s.dcp_sharded else 1) for s in iter_layer_specs(spec)}
    if len(spans) != 1:
        raise PlanError("tokens_per_block", sorted(spans), "one span for all layers of a group")
    return spans.pop()


def kv_cache_groups_tp_replicas(groups: Iterable[AnySpec], tp_size: int, dcp_size: int) -> int:
    """Return the field's one number for a whole configuration: the gcd over all layers.

    Seeded with `tp_size` (no layers: 1). A layer counts `max(1, tp_size // max_tp_shards)`, or 1
    if it is not attention, has no `max_tp_shards`, or is token-sharded under DCP > 1.
    """
    result, seen = tp_size, False
    for group in groups:
        for spec in iter_layer_specs(group):
            seen = True
            known = spec.kind in HEAD_KINDS | ROW_KINDS and spec.max_tp_shards is not None
            if known and not (spec.dcp_sharded and dcp_size > 1):
                result = gcd(result, max(1, tp_size // (spec.max_tp_shards or 1)))
            else:
                result = 1
    return result if seen else 1


def place(spec: LayerSpec, stage: int, mesh: Mesh) -> LayerPlacement:
    """Return where the fragments of `spec` live, a layer owned by pipeline stage `stage`.

    Raises `PlanError` naming the layer if the declared heads cannot be split over `mesh.tp`, or
    if DCP asks for token shards that no rank would hold.
    """
    ranks = mesh.stage_ranks(stage)
    token_shards = mesh.dcp if spec.dcp_sharded else 1
    interleave = mesh.dcp_interleave
    if token_shards > 1 and spec.block_size % interleave:
        raise PlanError(
            f"layer {spec.name!r} block_size",
            spec.block_size,
            f"a multiple of dcp_interleave={interleave}",
        )
    head_shards = 1 if spec.max_tp_shards is None else _head_shards(spec, mesh.tp)
    if len(ranks) == 1:
        fragment = Fragment(spec.name, 0, 0, (ranks[0],))
        canonical, why = _canonical(spec, 1, interleave)
        return LayerPlacement(stage, 1, 1, (fragment,), canonical, f"one rank holds it all{why}")
    if spec.kind in STATE_KINDS:
        return _place_state(spec, stage, ranks, mesh)
    if spec.max_tp_shards is None:
        return _place_undeclared(spec, stage, ranks)

    owners = _owners(mesh, stage, head_shards, token_shards)
    if missing := [key for key, held_by in owners.items() if not held_by]:
        raise PlanError(
            f"layer {spec.name!r} dcp",
            mesh.dcp,
            f"at least {mesh.dcp} ranks per head shard (nobody holds head shard {missing[0][0]}, "
            f"token shard {missing[0][1]}; tp={mesh.tp}, {head_shards} head shards)",
        )
    fragments = tuple(Fragment(spec.name, *key, held_by) for key, held_by in owners.items())
    canonical, why = _canonical(spec, token_shards, interleave)
    reason = _reason(head_shards, token_shards, fragments[0].replicas) + why
    return LayerPlacement(stage, head_shards, token_shards, fragments, canonical, reason)


def fragment_runs(spec: LayerSpec, placement: LayerPlacement, shard: int, mesh: Mesh) -> list[Run]:
    """Return the runs of `placement.fragments[shard]` for one block, merged as far as they go.

    `slot_offset` counts from the layer's first byte of that block. Canonical order is head,
    state, byte; local state j of token shard r sits at logical state
    `((j // i) * d + r) * i + j % i`, with d token shards and an interleave of i states. A state is
    K then V also where the page has all K before all V. A page that is not canonical is one run,
    in the order of the fragments.
    """
    name, fragment = spec.name, placement.fragments[shard]
    if not placement.canonical:
        return [Run(name, 0, 0, shard * spec.page_bytes, spec.page_bytes)]
    heads, states, row = spec.num_kv_heads, spec.states_per_block, spec.head_bytes
    d = placement.token_shards
    i = mesh.dcp_interleave // spec.tokens_per_state if d > 1 else states
    slot_head = states * d * row
    first = fragment.head_shard * heads * slot_head + fragment.token_shard * i * row
    if spec.encoding in HALVES:
        half, rest = spec.key_bytes, row - spec.key_bytes
        key = _rows(spec, half, 0, first, i, d)
        return key + _rows(spec, rest, heads * states * half, first + half, i, d)
    if spec.encoding == "heads_first" or heads == 1:
        if d == 1:
            return [Run(name, 0, 0, first, spec.page_bytes)]
        # Pieces of i states; those of the next head follow at the same strides.
        return [Run(name, 0, 0, first, i * row, heads * states // i, i * row, d * i * row)]
    return _rows(spec, row, 0, first, i, d)


def _rows(spec: LayerSpec, nbytes: int, page: int, slot: int, i: int, d: int) -> list[Run]:
    """Return the runs of rows of `nbytes` that lie [head, state] or [state, head] from `page` on.

    In the slot, from `slot` on, each is its state's `head_bytes` or a part of them. Per head (once
    where heads come first) and, under DCP, per interleave group or per place in it, whichever is
    fewer; `i` and `d` as in `fragment_runs`.
    """
    heads, states, row = spec.num_kv_heads, spec.states_per_block, spec.head_bytes
    # If heads come first, the groups of the next head follow at the same strides.
    starts = 1 if spec.encoding == "halves_heads_first" else heads
    groups, page_row = heads // starts * states // i, starts * nbytes
    far_page, far_slot, runs = i * page_row, d * i * row, []
    for head in range(starts):
        at, to = page + head * nbytes, slot + head * states * d * row
        if d == 1:
            runs.append(Run(spec.name, 0, at, to, nbytes, groups * i, page_row, row))
        elif i > groups:
            for g in range(groups):
                near_at, near_to = at + g * far_page, to + g * far_slot
                runs.append(Run(spec.name, 0, near_at, near_to, nbytes, i, page_row, row))
        else:
            for k in range(i):
                near_at, near_to = at + k * page_row, to + k * row
                runs.append(Run(spec.name, 0, near_at, near_to, nbytes, groups, far_page, far_slot))
    return runs


def deal(sizes_bytes: Sequence[int], owners: int) -> tuple[int, ...]:
    """Return for each segment the number of the owner that writes it, balanced by bytes.

    Neighbouring segments stay together (their copies are contiguous in the slot); an owner's
    share differs from the even one by at most one segment at either end.

    >>> deal([4, 4, 4, 4, 1, 1], 2), deal([9], 3)
    ((0, 0, 1, 1, 1, 1), (1,))
    """
    total_bytes, dealt, before_bytes = sum(sizes_bytes), [], 0
    for size_bytes in sizes_bytes:
        middle_twice = 2 * before_bytes + size_bytes
        dealt.append(middle_twice * owners // (2 * total_bytes))
        before_bytes += size_bytes
    return tuple(dealt)


@lru_cache(maxsize=256)
def _owners(
    mesh: Mesh, stage: int, head_shards: int, token_shards: int
) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Return the ranks that hold each (head shard, token shard); many layers ask the same."""
    owners: dict[tuple[int, int], list[int]] = {
        (head, token): [] for head in range(head_shards) for token in range(token_shards)
    }
    for rank in mesh.stage_ranks(stage):
        coords = mesh.coords(rank)
        token = coords.dcp if token_shards > 1 else 0
        owners[coords.tp * head_shards // mesh.tp, token].append(rank)
    return {key: tuple(held_by) for key, held_by in owners.items()}


def _head_shards(spec: LayerSpec, tp: int) -> int:
    """Return the distinct head shards of a declared layer at this TP size."""
    total = spec.max_tp_shards or 1
    if total % tp and tp % total:
        raise PlanError(
            f"layer {spec.name!r} KV heads",
            total,
            f"a divisor or a multiple of tp={tp}: heads cannot be split evenly over the ranks",
        )
    if spec.num_kv_heads != max(1, total // tp):
        raise PlanError(
            f"layer {spec.name!r} num_kv_heads",
            spec.num_kv_heads,
            f"{max(1, total // tp)}, from max_tp_shards={total} at tp={tp}",
        )
    return min(total, tp)


def _place_state(spec: LayerSpec, stage: int, ranks: range, mesh: Mesh) -> LayerPlacement:
    """One fragment per TP rank, or one for all: DCP and PCP never divide a recurrent state."""
    shards = 1 if spec.tp_replicated else mesh.tp
    owners: list[list[int]] = [[] for _ in range(shards)]
    for rank in ranks:
        owners[mesh.coords(rank).tp % shards].append(rank)
    fragments = tuple(Fragment(spec.name, i, 0, tuple(held)) for i, held in enumerate(owners))
    replicas = fragments[0].replicas
    canonical, why = _canonical(spec, 1, 1)
    split = "the same state on every TP rank" if shards == 1 else f"states split over tp={shards}"
    folding = f"folded {replicas}:1" if replicas > 1 else "not folded: every rank's state differs"
    return LayerPlacement(stage, shards, 1, fragments, canonical, f"{folding} ({split}){why}")


def _place_undeclared(spec: LayerSpec, stage: int, ranks: range) -> LayerPlacement:
    """One fragment per rank: a layer that declares nothing loses folding, never correctness."""
    if spec.total_kv_heads is None:
        cause = "max_tp_shards is not declared"
    else:
        cause = f"{spec.total_kv_heads} total heads do not explain {spec.num_kv_heads} per rank"
    fragments = tuple(Fragment(spec.name, i, 0, (rank,)) for i, rank in enumerate(ranks))
    reason = f"not folded: {cause}, so every rank's page is kept whole"
    warning = f"layer {spec.name!r} is not folded: {cause}"
    return LayerPlacement(stage, len(fragments), 1, fragments, False, reason, warning)


def _canonical(spec: LayerSpec, token_shards: int, interleave: int) -> tuple[bool, str]:
    """Return whether bytes can be laid out by head and token, and what to add to the reason."""
    if spec.encoding == "opaque":
        return False, "; pages are opaque, kept whole per shard"
    if token_shards > 1 and spec.encoding == "whole_page":
        return False, "; rows lie apart within a page, kept whole per DCP shard"
    if token_shards > 1 and interleave % spec.tokens_per_state:
        # Which rank holds a state that summarises tokens of several ranks is not known.
        return False, "; states span DCP shards, pages kept whole per shard"
    return True, ""


def _reason(head_shards: int, token_shards: int, replicas: int) -> str:
    parts = []
    if head_shards > 1:
        parts.append(f"{head_shards} head shards")
    if token_shards > 1:
        parts.append(f"{token_shards} token shards")
    split = " x ".join(parts) or "same bytes on every rank of the stage"
    if replicas > 1:
        return f"folded {replicas}:1 ({split})"
    return f"not folded: every rank holds different bytes ({split})"
