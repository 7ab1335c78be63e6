"""Conformance of cache kinds: what one layout writes it reads back, and so does another.

`check(groups, written, read)` runs two virtual clusters over one shelf and says everything that is
wrong. Whoever adds a cache kind calls it with layers of that kind:

    report = check(groups, Layout(Mesh(tp=8)), Layout(Mesh(tp=4, pp=2), "BLNHC"))
    assert report.ok, report.problems()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from kvfold.errors import ConfigError
from kvfold.identity import first_difference
from kvfold.mesh import Mesh
from kvfold.plan import LayerPlan, PlanOptions
from kvfold.spec import HEAD_KINDS, GroupSpec, LayerSpec
from kvfold.testing.cluster import Cluster, Difference
from kvfold.testing.cluster_copy import Loaded, Stored
from kvfold.testing.cluster_process import ProcessCluster
from kvfold.testing.cluster_store import MemoryShelf, Shelf, store_shelf

Groups = Sequence[GroupSpec] | Callable[[Mesh], Sequence[GroupSpec]]


@dataclass(frozen=True)
class Layout:
    """A mesh, and the engine's name for the order of its pages (one of `cluster.LAYOUTS`)."""

    mesh: Mesh
    order: str = "LBHNC"

    def __str__(self) -> str:
        axes = {name: n for name, n in asdict(self.mesh).items() if n > 1 and name != "tp"}
        return " ".join([f"tp {self.mesh.tp}", *(f"{k} {n}" for k, n in axes.items()), self.order])


@dataclass(frozen=True)
class Row:
    """Layers of one kind that are placed alike. Bytes are those of all blocks of all layers.

    `distinct_bytes` is what must be stored by the rules alone, `planned_bytes` what the plan
    stores, `copies_bytes` what all ranks hold together.
    """

    group: int
    kind: str
    layers: int
    pages: int
    distinct_bytes: int
    planned_bytes: int
    copies_bytes: int
    reason: str


@dataclass(frozen=True)
class Reading:
    """A second layout that read what the first one wrote.

    `apart` says per group (by position) which field of its identity keeps it from doing so.
    """

    layout: str
    loaded: Loaded
    differences: tuple[Difference, ...]
    apart: dict[int, str]


@dataclass(frozen=True)
class Report:
    """What `check` found; `problems()` is empty if every byte was in its place."""

    layout: str
    rows: tuple[Row, ...]
    stored: Stored
    loaded: Loaded
    differences: tuple[Difference, ...]
    reading: Reading | None = None

    @property
    def ok(self) -> bool:
        return not self.problems()

    @property
    def copies_bytes(self) -> int:
        return sum(row.copies_bytes for row in self.rows)

    def problems(self) -> list[str]:
        """Return everything that is wrong, one line each, with layer and rank."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        for suspect in self.stored.suspects:
            others = ", ".join(map(str, suspect.others))
            yield (
                f"layer {suspect.layer!r} rank {suspect.rank}: differs from rank {others}, said to "
                "hold the same"
            )
        if self.stored.no_room:
            yield f"{self.stored.no_room} chunks found no room in the store"
        distinct = sum(row.distinct_bytes for row in self.rows)
        for row in self.rows:
            if row.planned_bytes != row.distinct_bytes:
                yield (
                    f"{row.layers} layers of kind {row.kind} in group {row.group}: the plan stores "
                    f"{row.planned_bytes:,} bytes, {row.distinct_bytes:,} are distinct"
                )
        if not (self.stored.suspects or self.stored.no_room) and self.stored.nbytes != distinct:
            yield f"{self.stored.nbytes:,} bytes were stored, {distinct:,} are distinct"
        for layer, chunk in self.stored.misplaced:
            yield f"layer {layer!r}: its bytes in the slot of chunk {chunk} are not in their order"
        yield from self.loaded.failures
        yield from map(_different, self.differences)
        if self.reading is not None:
            for failure in self.reading.loaded.failures:
                yield f"reading at {self.reading.layout}: {failure}"
            for difference in self.reading.differences:
                yield f"reading at {self.reading.layout}: {_different(difference)}"


def check(
    groups: Groups,
    written: Layout,
    read: Layout | None = None,
    *,
    options: PlanOptions | None = None,
    blocks: int = 2,
    seed: int = 0,
    unlike: Collection[str] = (),
    shelf: Shelf | None = None,
    process: bool = False,
    rank_processes: bool = False,
) -> Report:
    """Store at `written`, drop, load and compare; then load at `read` and compare.

    `groups` are those of `written`, which `respread` fits to `read`, or a function that returns
    them for any mesh. `shelf` keeps the chunks: by default memory, or a store process of its own
    if `process`. With `rank_processes` every rank is a process too, and the store one. Layers in
    `unlike` are filled differently on every rank. Raises `PlanError` or `ConfigError` for what
    cannot be planned, `StoreError` if the store fails, `RankLost` if a rank's process does.
    """
    make = ProcessCluster if rank_processes else Cluster
    first = groups(written.mesh) if callable(groups) else groups
    cluster = make(first, written.mesh, options, written.order, blocks, seed, unlike)
    other = None
    if read is not None:
        second = groups(read.mesh) if callable(groups) else respread(first, written.mesh, read.mesh)
        other = make(second, read.mesh, options, read.order, blocks, seed, unlike)
    slots_bytes = sum(g.slot_bytes for g in cluster.groups) * len(cluster.chunks())
    with ExitStack() as stack:
        if shelf is None:
            real = (process or rank_processes) and stack.enter_context(store_shelf(slots_bytes))
            shelf = real or MemoryShelf(slots_bytes)
        for one in (cluster, other):  # before their store
            if isinstance(one, ProcessCluster):
                stack.enter_context(one)
        cluster.fill()
        stored = cluster.store(shelf)
        cluster.wipe()
        kept = [] if stored.suspects else list(range(len(cluster.groups)))
        loaded = cluster.load(shelf, kept)
        differences = tuple(cluster.differences(kept))
        reading = None
        if other is not None and read is not None and not stored.suspects:
            reading = _read(cluster, other, str(read), shelf)
    return Report(str(written), tuple(_rows(cluster)), stored, loaded, differences, reading)


def respread(groups: Sequence[GroupSpec], old: Mesh, new: Mesh) -> tuple[GroupSpec, ...]:
    """Return `groups`, given for the mesh `old`, as a model has them on the mesh `new`.

    Heads per rank follow from the total, block sizes keep `block_size x dcp`, layers are spread
    over the stages in order, padding is kept. Raises `ConfigError` naming the layer whose block
    cannot be divided so.
    """
    spread = []
    for group in groups:
        count = len(group.layers)
        layers = tuple(_respread_layer(layer, old, new) for layer in group.layers)
        stages = tuple(i * new.pp // count for i in range(count))
        spread.append(replace(group, layers=layers, stages=stages))
    return tuple(spread)


def _respread_layer(layer: LayerSpec, old: Mesh, new: Mesh) -> LayerSpec:
    heads, block_size, per_state = layer.num_kv_heads, layer.block_size, layer.tokens_per_state
    if layer.kind in HEAD_KINDS and layer.max_tp_shards is not None:
        heads = max(1, layer.max_tp_shards // new.tp)
    if layer.dcp_sharded:
        block_size, rest = divmod(block_size * old.dcp, new.dcp)
        if rest or block_size % per_state:
            expected = f"a block_size x dcp that dcp={new.dcp} divides into whole states"
            raise ConfigError(f"layer {layer.name!r} block_size", layer.block_size, expected)
    if (heads, block_size) == (layer.num_kv_heads, layer.block_size):
        return layer
    page_bytes = layer.page_bytes * heads * block_size // (layer.num_kv_heads * layer.block_size)
    padding_bytes = layer.engine_page_bytes - layer.page_bytes
    return replace(
        layer,
        num_kv_heads=heads,
        block_size=block_size,
        page_bytes=max(1, page_bytes),
        engine_page_bytes=max(1, page_bytes) + padding_bytes,
    )


def _read(written: Cluster, reader: Cluster, layout: str, shelf: Shelf) -> Reading:
    """Load at a second layout every group whose identity is that of the first."""
    apart = {}
    for i, (a, b) in enumerate(zip(written.identities(), reader.identities(), strict=True)):
        if field := first_difference(a, b):
            apart[i] = field
    alike = [i for i in range(len(reader.groups)) if i not in apart]
    if not alike:
        return Reading(layout, Loaded(), (), apart)
    reader.wipe()
    loaded = reader.load(shelf, alike)
    return Reading(layout, loaded, tuple(reader.differences(alike)), apart)


def _rows(cluster: Cluster) -> Iterator[Row]:
    for group in cluster.groups:
        alike: dict[tuple[str, str], list[LayerPlan]] = {}
        for layer in group.layers:
            alike.setdefault((layer.spec.kind, layer.placement.reason), []).append(layer)
        for (kind, reason), layers in alike.items():
            distinct = sum(
                cluster.truth.distinct_bytes(la.spec, la.placement.stage) for la in layers
            )
            held = sum(la.spec.page_bytes for la in layers) * cluster.mesh.stage_size
            yield Row(
                group.index,
                kind,
                len(layers),
                len(layers) * cluster.mesh.stage_size * cluster.blocks,
                distinct * cluster.blocks,
                sum(la.block_bytes for la in layers) * cluster.blocks,
                held * cluster.blocks,
                reason,
            )


def _different(difference: Difference) -> str:
    where = f"block {difference.block}" if difference.block >= 0 else "a page of no chunk"
    return (
        f"layer {difference.layer!r} rank {difference.rank}: {where} differs from byte "
        f"{difference.byte} on"
    )
