"""Cache kinds: what one layer's block holds, and which layers belong together.

A *layer cache* is one layer name and one spec. Specs are frozen values; they know nothing
about ranks beyond the per-rank number of heads, and nothing about any engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

from kvfold.errors import ConfigError

Kind = Literal["full_attention", "mla", "hidden_state", "other"]
Encoding = Literal["heads_first", "tokens_first", "opaque"]

FULL_ATTENTION: Final = "full_attention"
MLA: Final = "mla"
HIDDEN_STATE: Final = "hidden_state"
OTHER: Final = "other"

#: Kinds whose blocks kvfold can store; a group of any other kind must be outside prefix caching.
STORABLE_KINDS: Final = frozenset({FULL_ATTENTION, MLA})


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer's cache on one rank.

    `block_size` is tokens per block on one rank; a block holds `block_size / tokens_per_state`
    states of `num_kv_heads` heads (this rank's) of `head_bytes` each (K and V together, or the
    MLA row). `encoding` is the order inside a page: heads_first [head, state, byte],
    tokens_first [state, head, byte], or opaque (only its size is known).

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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("layer name", self.name, "a non-empty text")
        self._check_choices()
        for field in ("block_size", "num_kv_heads", "head_bytes", "tokens_per_state"):
            self._check_count(field)
        for field in ("total_kv_heads", "max_tp_shards"):
            if getattr(self, field) is not None:
                self._check_count(field)
        if self.block_size % self.tokens_per_state:
            self._refuse("tokens_per_state", f"a divisor of block_size={self.block_size}")
        if self.kind == MLA:
            if self.num_kv_heads != 1:
                self._refuse("num_kv_heads", "1, because an MLA layer has one row per state")
            if self.total_kv_heads not in (None, 1):
                self._refuse("total_kv_heads", "1 or unset for an MLA layer")
            if self.max_tp_shards not in (None, 1):
                self._refuse("max_tp_shards", "1 or unset for an MLA layer")
        if None not in (self.total_kv_heads, self.max_tp_shards) and (
            self.kind == FULL_ATTENTION and self.total_kv_heads != self.max_tp_shards
        ):
            self._refuse("max_tp_shards", f"total_kv_heads={self.total_kv_heads}, or unset")
        self._derive_pages()

    @property
    def states_per_block(self) -> int:
        """States (rows per head) in one block on one rank."""
        return self.block_size // self.tokens_per_state

    def _check_choices(self) -> None:
        if self.kind not in get_args(Kind):
            self._refuse("kind", f"one of {', '.join(get_args(Kind))}")
        if self.encoding not in get_args(Encoding):
            self._refuse("encoding", f"one of {', '.join(get_args(Encoding))}")
        if not isinstance(self.dcp_sharded, bool):
            self._refuse("dcp_sharded", "true or false")
        if not isinstance(self.dtype, str):
            self._refuse("dtype", "a text")

    def _check_count(self, field: str) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(field, "a whole number of at least 1")

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
    keeps its position and takes part in nothing.
    """

    index: int
    layers: tuple[LayerSpec, ...]
    stages: tuple[int, ...] = ()
    prefix_cacheable: bool = True
    is_draft: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "stages", tuple(self.stages) or (0,) * len(self.layers))
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise ConfigError("group index", self.index, "a whole number of at least 0")
        if len(self.stages) != len(self.layers):
            raise ConfigError(
                f"group {self.index} stages", self.stages, f"one of {len(self.layers)} layers each"
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
