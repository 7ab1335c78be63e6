"""The plan: which bytes of a chunk lie where in its slot, who writes and who reads them.

`plan(groups, mesh, options)` turns the unflattened per-layer configuration of all stages into an
`OffloadPlan`: frozen data that every process can rebuild and compare by `fingerprint`.

A slot is laid out by logical coordinates: layer (in plan order), block within the chunk, head,
token within the logical block (`block_size x dcp` tokens), byte. Layers whose pages cannot be read
that way are laid out by layer, block, fragment, page byte instead, and bind the group to its
topology.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from math import gcd, lcm
from typing import Any, NamedTuple, TypeVar, cast

from kvfold.errors import ConfigError, FormatError, PlanError
from kvfold.mesh import Mesh
from kvfold.placement import (
    Fragment,
    LayerPlacement,
    Run,
    deal,
    fragment_runs,
    kv_cache_groups_tp_replicas,
    place,
    tokens_per_block,
)
from kvfold.sizes import format_bytes
from kvfold.spec import STORABLE_KINDS, GroupSpec, LayerSpec

T = TypeVar("T")

#: Raised whenever the same inputs would give another slot layout.
FORMAT = 1
#: Slots are rounded up to this, once: the unit of pages and of direct I/O.
SLOT_ALIGNMENT_BYTES = 4096


class Owned(NamedTuple):
    """A fragment that a rank holds: its number in `GroupPlan.fragments` and all its runs."""

    id: int
    fragment: Fragment
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class PlanOptions:
    """What shapes chunks: blocks per chunk, and the span of one block hash (None: the gcd)."""

    blocks_per_chunk: int = 1
    tokens_per_hash: int | None = None

    def __post_init__(self) -> None:
        for name in ("blocks_per_chunk", "tokens_per_hash"):
            value = getattr(self, name)
            if value is None and name == "tokens_per_hash":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
                raise ConfigError(name, value, "a whole number from 1 to 1,048,576")


@dataclass(frozen=True)
class LayerPlan:
    """One layer in a group's slot: `slot_offset` of its first byte, `block_bytes` per block."""

    spec: LayerSpec
    placement: LayerPlacement
    slot_offset: int
    block_bytes: int
    first_fragment: int


@dataclass(frozen=True)
class GroupPlan:
    """One group: spans, sizes, fragments and runs. All sizes are 0 if it does not participate.

    `chunk_bytes` is the sum of the distinct fragments of `blocks_per_chunk` blocks, `slot_bytes`
    that rounded up to 4,096. `rotations` is the number of distinct ways to spread the writers;
    pick one per chunk from its key (`key[0] % rotations`).
    """

    index: int
    is_draft: bool
    participating: bool
    mesh: Mesh
    blocks_per_chunk: int
    tokens_per_block: int
    chunk_bytes: int
    slot_bytes: int
    rotations: int
    layers: tuple[LayerPlan, ...]
    _cache: dict[tuple[object, ...], object] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def name(self) -> str:
        return f"group {self.index}{' (draft)' if self.is_draft else ''}"

    @property
    def topology_bound(self) -> bool:
        """True if some page is kept whole per rank, so the mesh is part of the bytes' identity."""
        return any(not layer.placement.canonical for layer in self.layers)

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """All fragments of the group; a fragment's id is its position."""
        return tuple(f for layer in self.layers for f in layer.placement.fragments)

    @cached_property
    def base_writers(self) -> tuple[tuple[int, ...], ...]:
        """For each fragment id and block: the number, among its owners, of its first writer.

        The segments (a fragment in one block) of each replica group are dealt over its owners in
        slot order.
        """
        blocks = self.blocks_per_chunk
        base: list[tuple[int, ...]] = [(0,) * blocks] * len(self.fragments)
        shared: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for layer in self.layers:
            for i, fragment in enumerate(layer.placement.fragments, layer.first_fragment):
                if len(fragment.owners) > 1:
                    shared.setdefault(fragment.owners, []).append((i, layer.spec.page_bytes))
        deals: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        for owners, held in shared.items():
            # A rank holds one fragment of a layer: its blocks are neighbours among the segments.
            key = len(owners), tuple(page_bytes for _, page_bytes in held for _ in range(blocks))
            dealt = deals.get(key)
            if dealt is None:
                dealt = deals[key] = deal(key[1], len(owners))
            for n, (i, _) in enumerate(held):
                base[i] = dealt[n * blocks : (n + 1) * blocks]
        return tuple(base)

    def owned(self, rank: int) -> tuple[Owned, ...]:
        """Return the fragments `rank` holds, in slot order, with their runs."""
        return self._cached(("owned", rank), lambda: tuple(self._owned(rank)))

    def audited(self, rank: int) -> tuple[Owned, ...]:
        """Return the fragments of `rank` that others hold too: their bytes must be equal."""
        return tuple(o for o in self.owned(rank) if o.fragment.replicas > 1)

    def reads(self, rank: int) -> tuple[Run, ...]:
        """Return the runs that fill all of `rank`'s pages of a chunk from its slot."""
        return self._cached(
            ("reads", rank), lambda: tuple(run for o in self.owned(rank) for run in o.runs)
        )

    def writes(self, rank: int, rotation: int) -> tuple[Run, ...]:
        """Return the runs `rank` writes into the slot of a chunk with this rotation."""
        self._check_rotation(rotation)
        return self._cached(
            ("writes", rank, rotation),
            lambda: tuple(
                run
                for o in self.owned(rank)
                for run in o.runs
                if self.writer(o.id, run.block, rotation) == rank
            ),
        )

    def writers(self, rotation: int) -> frozenset[int]:
        """Return the ranks that have something to write for a chunk with this rotation."""
        self._check_rotation(rotation)
        return self._cached(
            ("writers", rotation),
            lambda: frozenset(
                self.writer(i, block, rotation)
                for i in range(len(self.fragments))
                for block in range(self.blocks_per_chunk)
            ),
        )

    def writer(self, fragment: int, block: int, rotation: int) -> int:
        """Return the one rank that writes block `block` of the fragment with this id."""
        owners = self.fragments[fragment].owners
        return owners[(self.base_writers[fragment][block] + rotation) % len(owners)]

    def _owned(self, rank: int) -> Iterator[Owned]:
        stage = self.mesh.coords(rank).pp
        for layer in self.layers:
            if layer.placement.stage != stage:
                continue
            for i, fragment in enumerate(layer.placement.fragments):
                if rank in fragment.owners:
                    runs = tuple(self._runs(layer, i))
                    yield Owned(layer.first_fragment + i, fragment, runs)

    def _runs(self, layer: LayerPlan, shard: int) -> Iterator[Run]:
        shapes = fragment_runs(layer.spec, layer.placement, shard, self.mesh)
        for block in range(self.blocks_per_chunk):
            start = layer.slot_offset + block * layer.block_bytes
            for run in shapes:
                yield replace(run, block=block, slot_offset=start + run.slot_offset)

    def _cached(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        if key not in self._cache:
            self._cache[key] = make()
        return cast(T, self._cache[key])

    def _check_rotation(self, rotation: int) -> None:
        if not 0 <= rotation < self.rotations:
            raise ConfigError("rotation", rotation, f"0 to {self.rotations - 1}")


@dataclass(frozen=True)
class OffloadPlan:
    """Everything both sides must agree on: mesh, options, groups (in the order given)."""

    mesh: Mesh
    options: PlanOptions
    sources: tuple[GroupSpec, ...]
    groups: tuple[GroupPlan, ...]
    tokens_per_hash: int
    kv_tp_replicas: int

    @property
    def replicated_layout(self) -> bool:
        """True if one host copy serves every rank: the field's own, coarser word for folding."""
        mesh = self.mesh
        return (
            mesh.tp > 1
            and self.kv_tp_replicas == mesh.tp
            and (mesh.pp, mesh.pcp, mesh.dcp) == (1, 1, 1)
        )

    @cached_property
    def stored(self) -> tuple[GroupPlan, ...]:
        """The groups that take part, in order; a group's number in the store is its place here."""
        return tuple(group for group in self.groups if group.participating)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What may cost folding, one text per layer that declares too little."""
        found = (la.placement.warning for g in self.groups for la in g.layers)
        return tuple(text for text in found if text)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the inputs and everything derived, as lines of JSON."""
        digest = hashlib.sha256()
        for line in _lines(self):
            digest.update(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()

    def engine_slot_bytes(self, copies: int) -> int:
        """Return the engine's own slot: padded pages of the widest group, times `copies`.

        Rounded up to 4,096 once, at the end.
        """
        pages_bytes: dict[tuple[int, int], int] = {}
        for group in self.groups:  # a draft split off its group still lies in the engine's
            for layer in group.layers:
                key = group.index, layer.placement.stage
                pages_bytes[key] = pages_bytes.get(key, 0) + layer.spec.engine_page_bytes
        widest_bytes = max(pages_bytes.values(), default=0)
        return round_up(widest_bytes * copies * self.options.blocks_per_chunk)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data: the inputs, and what was derived from them."""
        return {
            "format": FORMAT,
            "mesh": asdict(self.mesh),
            "options": asdict(self.options),
            "groups": [
                {
                    "index": source.index,
                    "is_draft": source.is_draft,
                    "prefix_cacheable": source.prefix_cacheable,
                    "stages": list(source.stages),
                    "blocks_per_chunk": source.blocks_per_chunk,
                    "layers": [asdict(layer) for layer in source.layers],
                    "derived": _derived(group),
                }
                for source, group in zip(self.sources, self.groups, strict=True)
            ],
            "tokens_per_hash": self.tokens_per_hash,
            "kv_tp_replicas": self.kv_tp_replicas,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OffloadPlan:
        """Rebuild a plan from `to_dict()`'s data.

        Raises `FormatError` if the data is malformed, or was derived by other rules than ours.
        """
        try:
            if data["format"] != FORMAT:
                raise FormatError(f"plan format {data['format']!r}, expected {FORMAT}")
            groups = [
                GroupSpec(
                    g["index"],
                    tuple(LayerSpec(**layer) for layer in g["layers"]),
                    tuple(g["stages"]),
                    g["prefix_cacheable"],
                    g["is_draft"],
                    g["blocks_per_chunk"],
                )
                for g in data["groups"]
            ]
            rebuilt = plan(groups, Mesh(**data["mesh"]), PlanOptions(**data["options"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"not a plan: {error}") from error
        if rebuilt.to_dict() != data:
            raise FormatError("the plan's derived part does not follow from its inputs")
        return rebuilt

    def explain(self) -> str:
        """Return the plan for people: per group its spans and sizes, per layer where and why."""
        return "\n".join(_explain(self))


def plan(
    groups: Sequence[GroupSpec], mesh: Mesh, options: PlanOptions | None = None
) -> OffloadPlan:
    """Plan the groups of all stages on `mesh`.

    Raises `PlanError` naming group or layer: a prefix-cacheable layer of a kind that cannot be
    stored, a layer on two stages, heads or spans that do not divide.
    """
    options = options or PlanOptions()
    seen: set[Any] = set()
    for group in groups:
        if (group.index, group.is_draft) in seen:
            raise PlanError("group index", group.index, "each group once (and once as draft)")
        seen.add((group.index, group.is_draft))
        for layer in group.layers:
            if layer.name in seen:
                raise PlanError("layer name", layer.name, "each layer in one group, on one stage")
            seen.add(layer.name)
    planned = tuple(_plan_group(group, mesh, options) for group in groups)
    participating = [s for s, p in zip(groups, planned, strict=True) if p.participating]
    return OffloadPlan(
        mesh,
        options,
        tuple(groups),
        planned,
        _tokens_per_hash(planned, options.tokens_per_hash),
        kv_cache_groups_tp_replicas(participating, mesh.tp, mesh.dcp),
    )


def round_up(nbytes: int) -> int:
    """Return `nbytes` rounded up to the slot alignment."""
    return -(-nbytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def _plan_group(group: GroupSpec, mesh: Mesh, options: PlanOptions) -> GroupPlan:
    blocks = group.blocks_per_chunk or options.blocks_per_chunk
    if not group.prefix_cacheable:
        return GroupPlan(group.index, group.is_draft, False, mesh, blocks, 0, 0, 0, 1, ())
    layers: list[LayerPlan] = []
    offset = fragments = 0
    for spec, stage in zip(group.layers, group.stages, strict=True):
        if spec.kind not in STORABLE_KINDS:
            raise PlanError(
                f"layer {spec.name!r} kind (group {group.index})",
                spec.kind,
                f"one of {', '.join(sorted(STORABLE_KINDS))} in a group that takes part in "
                "prefix caching",
            )
        placement = place(spec, stage, mesh)
        block_bytes = spec.page_bytes * len(placement.fragments)
        layers.append(LayerPlan(spec, placement, offset, block_bytes, fragments))
        offset += block_bytes * blocks
        fragments += len(placement.fragments)
    replicas = {f.replicas for layer in layers for f in layer.placement.fragments}
    return GroupPlan(
        group.index,
        group.is_draft,
        True,
        mesh,
        blocks,
        tokens_per_block(group, mesh.dcp),
        offset,
        round_up(offset),
        lcm(*replicas),
        tuple(layers),
    )


def _tokens_per_hash(groups: Sequence[GroupPlan], wanted: int | None) -> int:
    """Return the span of a block hash; it must divide every participating group's span."""
    spans = [g.tokens_per_block for g in groups if g.participating]
    result = wanted or gcd(*spans) or 1
    for group in groups:
        if group.participating and group.tokens_per_block % result:
            raise PlanError(
                f"{group.name} tokens_per_block",
                group.tokens_per_block,
                f"a multiple of tokens_per_hash={result}",
            )
    return result


def _lines(plan: OffloadPlan) -> Iterator[object]:
    """Yield what the fingerprint covers: all that `to_dict` tells, without its repetitions.

    Many layers are placed and written alike, so each distinct placement (head shard, token shard
    and owners of each fragment) and each distinct table of writers is given once, when it first
    occurs, and then by its number.
    """
    names = [f.name for f in fields(LayerSpec)]
    yield [FORMAT, names, plan.tokens_per_hash, plan.kv_tp_replicas]
    yield [asdict(plan.mesh), asdict(plan.options)]
    for source, group in zip(plan.sources, plan.groups, strict=True):
        yield [source.index, source.is_draft, source.prefix_cacheable, _totals(group)]
        for spec, stage in zip(source.layers, source.stages, strict=True):
            yield [stage, *(getattr(spec, name) for name in names)]
        seen: dict[object, int] = {}
        for layer in group.layers:
            placed, first = layer.placement, layer.first_fragment
            tables = (
                tuple((f.head_shard, f.token_shard, f.owners) for f in placed.fragments),
                ("writers", group.base_writers[first : first + len(placed.fragments)]),
            )
            for table in tables:
                if table not in seen:
                    seen[table] = len(seen)
                    yield table
            yield [layer.slot_offset, placed.canonical, *(seen[table] for table in tables)]


def _totals(group: GroupPlan) -> dict[str, Any]:
    return {
        "participating": group.participating,
        "tokens_per_block": group.tokens_per_block,
        "tokens_per_chunk": group.tokens_per_chunk,
        "chunk_bytes": group.chunk_bytes,
        "slot_bytes": group.slot_bytes,
        "rotations": group.rotations,
    }


def _derived(group: GroupPlan) -> dict[str, Any]:
    """Return what the planner decided for a group, for comparison between processes."""
    return {
        **_totals(group),
        "slot_offsets": [layer.slot_offset for layer in group.layers],
        "canonical": [layer.placement.canonical for layer in group.layers],
        "fragments": [
            [f.layer, f.head_shard, f.token_shard, list(f.owners), list(writers)]
            for f, writers in zip(group.fragments, group.base_writers, strict=True)
        ],
    }


def _explain(plan: OffloadPlan) -> Iterator[str]:
    mesh = ", ".join(f"{f.name} {getattr(plan.mesh, f.name)}" for f in fields(plan.mesh))
    yield f"mesh: {mesh} ({plan.mesh.world_size} ranks)"
    yield (
        f"one block hash: {plan.tokens_per_hash} tokens; kv_tp_replicas {plan.kv_tp_replicas}; "
        f"replicated_layout {str(plan.replicated_layout).lower()}"
    )
    for group, source in zip(plan.groups, plan.sources, strict=True):
        if not group.participating:
            count = len(source.layers)
            yield f"{group.name}: outside prefix caching, takes no part ({count} layers)"
            continue
        yield (
            f"{group.name}: {group.tokens_per_block} tokens per block, {group.tokens_per_chunk} "
            f"per chunk; chunk {group.chunk_bytes:,} B in a slot of {group.slot_bytes:,} B "
            f"({format_bytes(group.slot_bytes)}); {group.rotations} writer rotations"
        )
        if group.topology_bound:
            yield "  bound to this topology: some pages are kept whole per rank"
        for alike in _alike(group.layers):
            spec, placed = alike[0].spec, alike[0].placement
            more = f" .. {alike[-1].spec.name} ({len(alike)} layers)" if len(alike) > 1 else ""
            yield (
                f"  {spec.name}{more}: {spec.kind}, stage {placed.stage}, "
                f"{len(placed.fragments)} x {spec.page_bytes:,} B per block, owners of the first: "
                f"{', '.join(map(str, placed.fragments[0].owners))}; {placed.reason}"
            )
    for warning in plan.warnings:
        yield f"warning: {warning}"


def _alike(layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """Return `layers` gathered by what a person would read about them, in order of appearance."""
    found: dict[object, list[LayerPlan]] = {}
    for layer in layers:
        placed = layer.placement
        looks = (
            layer.spec.kind,
            layer.spec.page_bytes,
            placed.stage,
            placed.reason,
            tuple(f.owners for f in placed.fragments),
        )
        found.setdefault(looks, []).append(layer)
    return list(found.values())
