"""What every family builds with: layers in, groups per kind out, for one mesh and KV dtype.

Groups are kvfold's simple ones: layers of one kind and shape go together. A family names the
group of each layer; a group's number is the order of appearance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvfold.errors import PlanError
from kvfold.grouping import engine_groups
from kvfold.mesh import Mesh
from kvfold.models.config import DTYPE_BYTES, Config
from kvfold.models.pages import attention_row, indexer_row, mla_row
from kvfold.spec import (
    CIRCULAR_BUFFER,
    FULL_ATTENTION,
    INDEXER,
    MLA,
    SLIDING_WINDOW,
    STATE_KINDS,
    GroupSpec,
    Kind,
    LayerSpec,
)

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Model:
    """A model's cache on one mesh: the groups to plan, and what the engine makes of them.

    `engine_declares` names the layers whose `max_tp_shards` the engine sets itself; of all others
    kvfold knows the shards and the engine does not.
    """

    config: Config
    architecture: str
    mesh: Mesh
    kv_cache_dtype: str
    block_size: int
    groups: tuple[GroupSpec, ...]
    engine_declares: frozenset[str]
    notes: tuple[str, ...]

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for group in self.groups for layer in group.layers)

    def engine_view(self, block_outermost: bool | None = None) -> tuple[GroupSpec, ...]:
        """Return the engine's own groups: blocks and pages as it makes them, without the shards
        that it does not declare.

        `block_outermost` is the engine's layout; None is the other one, unless the model's pages
        need this. Raises `PlanError` for a layout that the engine refuses.
        """
        members = [
            (x if x.name in self.engine_declares else replace(x, max_tp_shards=None), stage)
            for group in self.groups
            for x, stage in zip(group.layers, group.stages, strict=True)
        ]
        # A model's caches are numbered by layer; the engine goes through them in that order.
        members.sort(key=lambda member: int(member[0].name.split(".")[2]))
        layers, stages = zip(*members, strict=True)
        outside = {x.name for g in self.groups if not g.prefix_cacheable for x in g.layers}
        try:
            return engine_groups(layers, stages, outside, block_outermost=bool(block_outermost))
        except PlanError:
            if block_outermost is not None:
                raise
            return engine_groups(layers, stages, outside, block_outermost=True)


class Builder:
    """Collects the layers of one model. All sizes are bytes on one rank.

    Every method raises `PlanError` where the engine could not run the layer on this mesh.
    """

    def __init__(self, config: Config, mesh: Mesh, kv_dtype: str, block_size: int) -> None:
        self.config = config
        self.mesh = mesh
        self.kv_dtype = kv_dtype
        self.block_size = block_size
        self.model_dtype = config.model_dtype
        self.notes: list[str] = []
        self._groups: dict[str, list[tuple[LayerSpec, int]]] = {}
        self._outside: set[str] = set()
        self._declared: set[str] = set()
        self._ends = _stage_ends(config.layers, mesh.pp)
        if config.has("num_attention_heads"):
            self.divides("num_attention_heads")

    def divides(self, field: str, config: Config | None = None) -> int:
        """Return a count that tp must divide; the engine refuses the model otherwise."""
        value = (config or self.config).count(field)
        if value % self.mesh.tp:
            raise PlanError("tp", self.mesh.tp, f"a divisor of {field}={value}")
        return value

    def attention(
        self,
        index: int,
        heads_field: str = "num_key_value_heads",
        head_dim: int | None = None,
        *,
        window: int | None = None,
        kind: Kind | None = None,
        group: str = "attention",
    ) -> None:
        """Add ordinary attention with the KV heads that `heads_field` says."""
        heads, tp, dcp = self.config.count(heads_field), self.mesh.tp, self.mesh.dcp
        if heads % tp and tp % heads:
            raise PlanError("tp", tp, f"a divisor or a multiple of {heads_field}={heads}")
        if window is not None and dcp > 1:
            raise PlanError("dcp", dcp, "1: the engine does not shard windows over DCP")
        if dcp > 1 and self.config.has("num_attention_heads"):
            per_head = self.config.count("num_attention_heads") // heads
            if per_head % dcp:
                raise PlanError("dcp", dcp, f"a divisor of {per_head} query heads per KV head")
        dim = head_dim or self.config.head_dim()
        row = attention_row(dim, dim, self.kv_dtype, self.model_dtype)
        self.add(
            group,
            index,
            "self_attn.attn",
            kind=kind or (FULL_ATTENTION if window is None else SLIDING_WINDOW),
            num_kv_heads=max(1, heads // tp),
            head_bytes=row.nbytes,
            total_kv_heads=heads,
            max_tp_shards=heads,
            encoding=row.encoding,
            dtype=row.dtype,
            window=window,
        )

    def mla(self, index: int, rope_dim: int, *, sparse: bool = False) -> None:
        """Add an MLA layer: one latent row per token."""
        lora = self.config.count("kv_lora_rank")
        row = mla_row(lora, rope_dim, self.kv_dtype, self.model_dtype, sparse)
        self.add(
            "attention",
            index,
            "self_attn.attn",
            engine_declares=True,
            kind=MLA,
            head_bytes=row.nbytes,
            max_tp_shards=1,
            encoding=row.encoding,
            dtype=row.dtype,
        )

    def indexer(self, index: int, tokens_per_state: int = 1) -> None:
        """Add a DSA indexer's cache, in the group of the layer it belongs to."""
        row = indexer_row(self.config.count("index_head_dim"))
        self.add(
            "attention",
            index,
            "self_attn.indexer.k_cache",
            engine_declares=True,
            kind=INDEXER,
            head_bytes=row.nbytes,
            max_tp_shards=1,
            encoding=row.encoding,
            dtype=row.dtype,
            tokens_per_state=tokens_per_state,
        )

    def state(self, index: int, kind: Kind, parts: Mapping[str, int], name: str) -> None:
        """Add a recurrent state; `parts` gives the elements on one rank per dtype."""
        self.add(
            f"states {kind}",
            index,
            name,
            kind=kind,
            head_bytes=sum(DTYPE_BYTES[dtype] * count for dtype, count in parts.items()),
            dcp_sharded=False,
            tokens_per_state=self.block_size,
            encoding="opaque",
            dtype="+".join(parts),
        )

    def ring(self, index: int, part: str, slots: int, slot_bytes: int) -> None:
        """Add a request-local ring buffer: outside prefix caching, kept in position."""
        self.keep_outside("ring")
        self.add(
            "ring",
            index,
            part,
            kind=CIRCULAR_BUFFER,
            block_size=slots,
            head_bytes=slot_bytes,
            dcp_sharded=False,
        )

    def keep_outside(self, group: str) -> None:
        """Say that `group` is outside prefix caching."""
        self._outside.add(group)

    def stage(self, index: int) -> int:
        """Return the pipeline stage of layer number `index`."""
        return next(i for i, end in enumerate(self._ends) if index < end)

    def add(
        self, group: str, index: int, part: str, *, engine_declares: bool = False, **fields: Any
    ) -> None:
        """Add one layer cache of layer number `index` to `group`."""
        name = f"model.layers.{index}.{part}"
        shared: dict[str, Any] = {"name": name, "block_size": self.block_size, "num_kv_heads": 1}
        spec = LayerSpec(**(shared | fields))
        self._groups.setdefault(group, []).append((spec, self.stage(index)))
        if engine_declares:
            self._declared.add(name)

    def aligned_block_size(self) -> int:
        """Return the block size whose attention pages hold the widest state page.

        Engines keep both in pages of one size: block = a x cdiv(state page, a x bytes per token),
        a being the block size asked for, with MLA at least 128.
        """
        layers = [spec for group in self._groups.values() for spec, _ in group]
        states = [s.page_bytes for s in layers if s.kind in STATE_KINDS]
        rows = [s for s in layers if s.kind in (MLA, FULL_ATTENTION)]
        if not states or not rows:
            return self.block_size
        unit = max(self.block_size, 128 if rows[0].kind == MLA else 1)
        row_bytes = max(s.num_kv_heads * s.head_bytes for s in rows)
        return unit * -(-max(states) // (unit * row_bytes))

    def finish(self, architecture: str) -> Model:
        """Return the model; state pages are padded to those of the attention, as engines do."""
        pages = [s.page_bytes for g in self._groups.values() for s, _ in g if s.kind in _ATTENTION]
        groups = []
        for i, (name, members) in enumerate(self._groups.items()):
            layers = tuple(
                replace(s, engine_page_bytes=max([s.page_bytes, *pages]))
                if s.kind in STATE_KINDS
                else s
                for s, _ in members
            )
            stages = tuple(stage for _, stage in members)
            groups.append(GroupSpec(i, layers, stages, name not in self._outside))
        return Model(
            self.config,
            architecture,
            self.mesh,
            self.kv_dtype,
            self.block_size,
            tuple(groups),
            frozenset(self._declared),
            tuple(self.notes),
        )


_ATTENTION = frozenset({FULL_ATTENTION, MLA})


def _stage_ends(layers: int, pp: int) -> list[int]:
    """Return for each pipeline stage the number of the layer after its last.

    As vLLM deals them: what does not divide goes to the stages before the last, from the back.

    >>> _stage_ends(38, 4)
    [9, 19, 29, 38]
    """
    if pp > layers:
        raise PlanError("pp", pp, f"at most num_hidden_layers={layers}")
    sizes = [layers // pp] * pp
    for i in range(layers % pp):
        sizes[-i - 2] += 1
    return [sum(sizes[: i + 1]) for i in range(pp)]
