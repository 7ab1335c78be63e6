"""Cache kinds: what one layer's block holds, and which layers belong together.

A *layer cache* is one layer name and one spec. Specs are frozen values; they know nothing
about ranks beyond the per-rank number of heads, and nothing about any engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

from kvfold.errors import ConfigError

Kind = Literal[
    "full_attention",
    "mla",
    "indexer",
    "sliding_window",
    "chunked_local",
    "sliding_window_mla",
    "mamba1",
    "mamba2",
    "gdn",
    "kda",
    "short_conv",
    "cross_attention",
    "encoder_only",
    "circular_buffer",
    "hidden_state",
    "other",
]
Encoding = Literal[
    "heads_first",
    "tokens_first",
    "halves_heads_first",
    "halves_tokens_first",
    "whole_page",
    "opaque",
]

FULL_ATTENTION: Final = "full_attention"
MLA: Final = "mla"
INDEXER: Final = "indexer"
SLIDING_WINDOW: Final = "sliding_window"
CHUNKED_LOCAL: Final = "chunked_local"
SLIDING_WINDOW_MLA: Final = "sliding_window_mla"
CROSS_ATTENTION: Final = "cross_attention"
ENCODER_ONLY: Final = "encoder_only"
CIRCULAR_BUFFER: Final = "circular_buffer"
HIDDEN_STATE: Final = "hidden_state"
OTHER: Final = "other"

#: Kinds split over TP by KV head.
HEAD_KINDS: Final = frozenset({FULL_ATTENTION, SLIDING_WINDOW, CHUNKED_LOCAL})
#: Kinds with one row per state and no heads, the same on every TP rank.
ROW_KINDS: Final = frozenset({MLA, INDEXER, SLIDING_WINDOW_MLA})
#: Recycled kinds: only the last `window` tokens before a boundary are needed.
WINDOW_KINDS: Final = frozenset({SLIDING_WINDOW, CHUNKED_LOCAL, SLIDING_WINDOW_MLA})
#: Kinds whose block is one recurrent state at a boundary.
STATE_KINDS: Final = frozenset({"mamba1", "mamba2", "gdn", "kda", "short_conv"})
#: Kinds whose blocks kvfold can store; a group of any other kind must be outside prefix caching.
STORABLE_KINDS: Final = HEAD_KINDS | ROW_KINDS | STATE_KINDS
#: Encodings of pages that hold K of all states, and then V of all states.
HALVES: Final = frozenset({"halves_heads_first", "halves_tokens_first"})


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer's cache on one rank.

    `block_size` is tokens per block on one rank; a block holds `block_size / tokens_per_state`
    states of `num_kv_heads` heads (this rank's) of `head_bytes` each (K and V together, or the
    MLA row). `encoding` is the order inside a page: heads_first [head, state, byte],
    tokens_first [state, head, byte], halves_heads_first and halves_tokens_first (the same, first of
    every state's K and then of every state's V), whole_page (one head whose rows are split up, such
    as all data before all scales: equal on every rank that holds all of it, but not divisible by
    token), or opaque (only its size is known).

    `key_bytes` is how much of `head_bytes` is K, for halves only (0: one half, derived). It says
    where V begins; the number of heads never does.

    `window` is the tokens a recycled kind needs before a boundary. A recurrent state is one state
    per block (`tokens_per_state == block_size`), is never token-sharded, and is split over TP
    unless `tp_replicated`.

    `max_tp_shards` is how many distinct shards the layer splits into across TP, whatever the TP
    size; None means unknown and is treated as "not replicated". `page_bytes` is one block without
    padding (derived unless the page is opaque), `engine_page_bytes` the same as the engine pads it.

    Raises `ConfigError` naming layer and field.
    """

    name: str
    kind: Kind
    block_size: int
    num_kv_heads: int
    head_bytes: int
    total_kv_heads: int | None = None
    max_tp_shards: int | None = None
    dcp_sharded: bool = True
    encoding: Encoding = "heads_first"
    dtype: str = "bfloat16"
    tokens_per_state: int = 1
    page_bytes: int = 0
    engine_page_bytes: int = 0
    window: int | None = None
    tp_replicated: bool = False
    key_bytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("layer name", self.name, "a non-empty text")
        self._check_choices()
        for field in ("block_size", "num_kv_heads", "head_bytes", "tokens_per_state"):
            self._check_count(field)
        for field in ("total_kv_heads", "max_tp_shards", "window"):
            if getattr(self, field) is not None:
                self._check_count(field)
        if self.block_size % self.tokens_per_state:
            self._refuse("tokens_per_state", f"a divisor of block_size={self.block_size}")
        self._check_kind()
        self._derive_key()
        self._derive_pages()

    def _check_kind(self) -> None:
        if (self.window is None) == (self.kind in WINDOW_KINDS):
            self._refuse(
                "window", "tokens, for a recycled kind" if self.window is None else "unset"
            )
        if self.kind in ROW_KINDS:
            if self.num_kv_heads != 1:
                self._refuse("num_kv_heads", f"1, because {self.kind} has one row per state")
            if self.total_kv_heads not in (None, 1):
                self._refuse("total_kv_heads", f"1 or unset for {self.kind}")
            if self.max_tp_shards not in (None, 1):
                self._refuse("max_tp_shards", f"1 or unset for {self.kind}")
        if None not in (self.total_kv_heads, self.max_tp_shards) and (
            self.kind in HEAD_KINDS and self.total_kv_heads != self.max_tp_shards
        ):
            self._refuse("max_tp_shards", f"total_kv_heads={self.total_kv_heads}, or unset")
        if self.kind in STATE_KINDS:
            self._check_state()
        elif self.tp_replicated:
            self._refuse("tp_replicated", f"false for {self.kind}: only states can say so")
        if self.encoding == "whole_page" and not (self.kind in ROW_KINDS or self.tp_replicated):
            self._refuse("encoding", "another one: the page is not the same on every rank")
        if self.encoding in HALVES and self.kind in ROW_KINDS:
            self._refuse("encoding", f"another one: {self.kind} has no K and V")

    def _check_state(self) -> None:
        if self.dcp_sharded:
            self._refuse("dcp_sharded", "false: a state belongs to all tokens before it")
        if self.tokens_per_state != self.block_size:
            self._refuse("tokens_per_state", f"block_size={self.block_size}: one state per block")
        if (self.num_kv_heads, self.total_kv_heads, self.max_tp_shards) != (1, None, None):
            self._refuse("max_tp_shards", "one head and nothing declared: see tp_replicated")
        if self.encoding not in ("opaque", "whole_page"):
            self._refuse("encoding", "opaque or whole_page for a state")

    @property
    def states_per_block(self) -> int:
        """States (rows per head) in one block on one rank."""
        return self.block_size // self.tokens_per_state

    def _check_choices(self) -> None:
        if self.kind not in get_args(Kind):
            self._refuse("kind", f"one of {', '.join(get_args(Kind))}")
        if self.encoding not in get_args(Encoding):
            self._refuse("encoding", f"one of {', '.join(get_args(Encoding))}")
        for field in ("dcp_sharded", "tp_replicated"):
            if not isinstance(getattr(self, field), bool):
                self._refuse(field, "true or false")
        if not isinstance(self.dtype, str):
            self._refuse("dtype", "a text")

    def _check_count(self, field: str) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(field, "a whole number of at least 1")

    def _derive_key(self) -> None:
        if self.encoding not in HALVES:
            if self.key_bytes != 0:
                self._refuse("key_bytes", f"0 for {self.encoding}: K and V lie together")
            return
        if self.key_bytes == 0 and self.head_bytes % 2 == 0:
            object.__setattr__(self, "key_bytes", self.head_bytes // 2)
        self._check_count("key_bytes")
        if self.key_bytes >= self.head_bytes:
            self._refuse("key_bytes", f"less than head_bytes={self.head_bytes}: the rest is V")

    def _derive_pages(self) -> None:
        content_bytes = self.num_kv_heads * self.states_per_block * self.head_bytes
        if self.page_bytes == 0:
            object.__setattr__(self, "page_bytes", content_bytes)
        self._check_count("page_bytes")
        if self.encoding != "opaque" and self.page_bytes != content_bytes:
            self._refuse(
                "page_bytes", f"heads x states x head_bytes = {content_bytes} (or an opaque page)"
            )
        if self.engine_page_bytes == 0:
            object.__setattr__(self, "engine_page_bytes", self.page_bytes)
        self._check_count("engine_page_bytes")
        if self.engine_page_bytes < self.page_bytes:
            self._refuse("engine_page_bytes", f"at least page_bytes={self.page_bytes}")

    def _refuse(self, field: str, expected: str) -> None:
        raise ConfigError(f"layer {self.name!r} {field}", getattr(self, field), expected)


@dataclass(frozen=True)
class UniformSpec:
    """A container: one spec per layer, all with the same token span.

    May mix MLA, indexer and ordinary attention layers. Raises `ConfigError` for an empty
    container, a name used twice, or layers of different spans.
    """

    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        check_same_span(self.layers)


@dataclass(frozen=True)
class GroupSpec:
    """One cache group of all pipeline stages: its layers, each with the stage that owns it.

    `index` is the engine's group number. A draft layer inside the target's own group is given as
    a second `GroupSpec` with the same index and `is_draft=True`. A group outside prefix caching
    keeps its position and takes part in nothing. `blocks_per_chunk` is this group's own, if it
    differs from the plan's.
    """

    index: int
    layers: tuple[LayerSpec, ...]
    stages: tuple[int, ...] = ()
    prefix_cacheable: bool = True
    is_draft: bool = False
    blocks_per_chunk: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "stages", tuple(self.stages) or (0,) * len(self.layers))
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise ConfigError("group index", self.index, "a whole number of at least 0")
        if len(self.stages) != len(self.layers):
            raise ConfigError(
                f"group {self.index} stages", self.stages, f"one of {len(self.layers)} layers each"
            )
        blocks = self.blocks_per_chunk
        if blocks is not None and (
            isinstance(blocks, bool) or not isinstance(blocks, int) or not 1 <= blocks <= 1 << 20
        ):
            raise ConfigError(
                f"group {self.index} blocks_per_chunk", blocks, "a whole number from 1 to 1,048,576"
            )
        if self.prefix_cacheable:
            check_same_span(self.layers)

    @classmethod
    def of(
        cls,
        index: int,
        spec: LayerSpec | UniformSpec | Sequence[LayerSpec],
        stages: int | Sequence[int] = 0,
        *,
        prefix_cacheable: bool = True,
        is_draft: bool = False,
    ) -> GroupSpec:
        """Return a group from one spec, a container or plain layers, on one or several stages."""
        layers = tuple(iter_layer_specs(spec))
        per_layer = (stages,) * len(layers) if isinstance(stages, int) else tuple(stages)
        return cls(index, layers, per_layer, prefix_cacheable, is_draft)


AnySpec = LayerSpec | UniformSpec | GroupSpec | Sequence[LayerSpec]


def iter_layer_specs(spec: AnySpec) -> Iterator[LayerSpec]:
    """Yield every layer's own spec: a container is unwrapped, a single spec yields itself."""
    if isinstance(spec, LayerSpec):
        yield spec
    elif isinstance(spec, UniformSpec | GroupSpec):
        yield from spec.layers
    else:
        yield from spec


def check_same_span(layers: Sequence[LayerSpec]) -> None:
    """Raise `ConfigError` unless `layers` have distinct names and one token span."""
    if not layers:
        raise ConfigError("layers", (), "at least one layer")
    first = layers[0]
    seen: set[str] = set()
    for layer in layers:
        if layer.name in seen:
            raise ConfigError("layer name", layer.name, "each layer once")
        seen.add(layer.name)
        for field in ("block_size", "dcp_sharded"):
            if getattr(layer, field) != getattr(first, field):
                raise ConfigError(
                    f"layer {layer.name!r} {field}",
                    getattr(layer, field),
                    f"{getattr(first, field)} as in layer {first.name!r} of the same group",
                )


def merge(specs: Iterable[LayerSpec]) -> LayerSpec:
    """Return the one spec that all of `specs` share, under the first one's name.

    `max_tp_shards` is passed through like every other field. Raises `ConfigError` naming both
    layers and the first field in which they disagree: a merged value would be wrong for one.
    """
    first, *others = specs
    for other in others:
        if replace(other, name=first.name) == first:
            continue
        for field in fields(LayerSpec):
            mine, theirs = getattr(first, field.name), getattr(other, field.name)
            if field.name != "name" and mine != theirs:
                raise ConfigError(
                    f"layer {other.name!r} {field.name}",
                    theirs,
                    f"{mine!r} as in layer {first.name!r}, or a layer that is not merged with it",
                )
    return first


def declared_shards(num_kv_heads: int, tp: int, total_heads: int | None) -> int | None:
    """Return `max_tp_shards` of a full-attention layer whose model has `total_heads` KV heads.

    `total_heads` counts only if the layer's per-rank heads are what an engine makes of it:
    `num_kv_heads == max(1, total_heads // tp)`, one of `total_heads` and `tp` dividing the other.
    Otherwise None: unknown, so the layer is not folded and the plan warns by name.

    >>> declared_shards(1, 8, 2), declared_shards(2, 4, 8), declared_shards(1, 8, 6)
    (2, 8, None)
    """
    if total_heads is None or total_heads < 1:
        return None
    divides = total_heads % tp == 0 or tp % total_heads == 0
    return total_heads if divides and num_kv_heads == max(1, total_heads // tp) else None
