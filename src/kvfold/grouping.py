"""Cache groups as the engine forms them: which layers share a block table, in pages of which size.

The engine gives every group's block the same bytes, those of the widest; kvfold stores each
group's own. These rules tell the engine's figure next to ours. Read from vLLM 0.32
(`v1/core/kv_cache_utils.py`, `get_kv_cache_groups`), without its host-side sparse caches and
without the marking of draft groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from kvfold.errors import ConfigError, PlanError
from kvfold.spec import (
    CHUNKED_LOCAL,
    CIRCULAR_BUFFER,
    FULL_ATTENTION,
    HIDDEN_STATE,
    INDEXER,
    MLA,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    STATE_KINDS,
    GroupSpec,
    Kind,
    LayerSpec,
    merge,
)

#: Kinds that keep every token: they may share a group, whatever their sizes.
_WHOLE = frozenset({FULL_ATTENTION, MLA, INDEXER, HIDDEN_STATE})
#: Kinds whose pages follow from token rows, which padding would break.
_ROWS = frozenset({MLA, INDEXER, HIDDEN_STATE})
#: What a recycled kind becomes when it is given blocks for all tokens.
_PROMOTED: Mapping[str, Kind] = {
    SLIDING_WINDOW: FULL_ATTENTION,
    CHUNKED_LOCAL: FULL_ATTENTION,
    SLIDING_WINDOW_MLA: MLA,
}
_Layers = list[LayerSpec]


def engine_groups(
    layers: Sequence[LayerSpec],
    stages: Sequence[int] = (),
    outside: Collection[str] = (),
    *,
    block_outermost: bool = False,
    hybrid_manager: bool = True,
) -> tuple[GroupSpec, ...]:
    """Return the engine's groups of `layers`, which are given in the order of the model.

    `stages` gives each layer's pipeline stage, `outside` the names outside prefix caching.
    `block_outermost` says that one block of all layers lies together, which lets groups differ in
    bytes; otherwise all pages are made one size. `hybrid_manager` off gives windows all tokens.
    A group's layers have the block size and `engine_page_bytes` that the engine gives them.

    Raises `PlanError` naming the layer where the engine would refuse to start.
    """
    stage_of = dict(zip((x.name for x in layers), stages or (0,) * len(layers), strict=True))
    members = list(layers)
    if not hybrid_manager:
        members = _without_windows(members)
    formed = _formed(members, frozenset(outside), block_outermost)
    return tuple(
        GroupSpec(
            i,
            tuple(group),
            tuple(stage_of[layer.name] for layer in group),
            not any(layer.name in outside for layer in group),
        )
        for i, group in enumerate(formed)
    )


def block_bytes(groups: Sequence[GroupSpec]) -> int:
    """Return the bytes of one block on one rank: the widest group's pages, of any one stage."""
    pages_bytes: Counter[tuple[int, int]] = Counter()
    for group in groups:
        for layer, stage in zip(group.layers, group.stages, strict=True):
            pages_bytes[group.index, stage] += layer.engine_page_bytes
    return max(pages_bytes.values(), default=0)


def _formed(layers: _Layers, outside: frozenset[str], block_outermost: bool) -> list[_Layers]:
    if not layers:
        return []
    if _uniform(layers, outside):  # the same spec, or a container of several
        return [layers]
    hidden = [x for x in layers if x.kind == HIDDEN_STATE]
    others = [x for x in layers if x.kind != HIDDEN_STATE]
    if not others:
        raise PlanError(
            f"layer {hidden[0].name!r} block_size",
            hidden[0].block_size,
            "one for hidden states alone",
        )
    if block_outermost and len({x.engine_page_bytes for x in others}) > 1:
        return _packed(others, outside) + [[x] for x in hidden]
    try:
        others = _one_page_size(others)
    except PlanError:
        promoted = _promoted_beside_mla(layers)
        if promoted is None:
            raise
        return [promoted]
    groups = _equal_counts(others)
    return _with_hidden(groups, hidden) if hidden else groups


def _uniform(layers: Sequence[LayerSpec], outside: frozenset[str]) -> bool:
    """Return whether all of `layers` always need the same token slots, as the first sees it."""
    first, *others = layers
    return all(_joins(first, other, outside) for other in others)


def _joins(first: LayerSpec, other: LayerSpec, outside: frozenset[str]) -> bool:
    """Return whether a group that `first` began takes `other`. Not symmetric: plain windows take
    windows of MLA rows, which take only their own kind.
    """
    if (first.block_size, first.dcp_sharded) != (other.block_size, other.dcp_sharded):
        return False
    if first.kind in _WHOLE:
        return other.kind in _WHOLE
    if first.kind in STATE_KINDS:
        alike = first.tp_replicated == other.tp_replicated
        return other.kind in STATE_KINDS and alike and _page(first) == _page(other)
    if first.kind == SLIDING_WINDOW and other.kind == SLIDING_WINDOW_MLA:
        return first.window == other.window
    if first.kind == SLIDING_WINDOW_MLA and (first.name in outside) != (other.name in outside):
        return False
    return first.kind == other.kind and first.window == other.window


def _page(layer: LayerSpec) -> int:
    return layer.engine_page_bytes


def _gathered(layers: _Layers, belongs: Callable[[LayerSpec, LayerSpec], bool]) -> list[_Layers]:
    """Return `layers` in lists: each joins the first list whose first layer it belongs to."""
    found: list[_Layers] = []
    for layer in layers:
        for members in found:
            if belongs(members[0], layer):
                members.append(layer)
                break
        else:
            found.append([layer])
    return found


def _packed(layers: _Layers, outside: frozenset[str]) -> list[_Layers]:
    """Return groups of different pages, packed into one block each.

    Kinds with as many layers of each page size are a pattern that repeats; all such kinds are split
    into groups of about equally many repeats. States, rings and windows are split further where
    they would widen the block that the others need anyway.
    """
    buckets = _gathered(layers, lambda first, other: _joins(first, other, outside))
    counts = [Counter(map(_page, bucket)) for bucket in buckets]
    repeats = [
        max(count.values()) if len(set(count.values())) == 1 else 0 for count in counts
    ]  # 0: no pattern
    # A pattern of several page sizes stays whole, and sets the least repeats of a group.
    least = max((r for r, count in zip(repeats, counts, strict=True) if len(count) > 1), default=0)
    per_group = _least_padding([r for r in repeats if r], least) if least else 0
    splits = [_groups_of(r, per_group) if r and per_group else 1 for r in repeats]
    free = [
        bucket[0].kind in STATE_KINDS | {CIRCULAR_BUFFER}
        or (not per_group and bucket[0].kind in (SLIDING_WINDOW, SLIDING_WINDOW_MLA))
        for bucket in buckets
    ]

    needed_bytes = 0
    for bucket, count, split, is_free in zip(buckets, counts, splits, free, strict=True):
        n = len(bucket) if is_free else split
        widest_bytes = sum(_groups_of(members, n) * page for page, members in count.items())
        needed_bytes = max(needed_bytes, widest_bytes)
    groups: list[_Layers] = []
    for bucket, split, is_free in zip(buckets, splits, free, strict=True):
        if is_free:
            fitting = max(needed_bytes // _page(bucket[0]), 1)
            split = max(split, _groups_of(len(bucket), fitting))
        groups += _dealt(bucket, split)
    return groups


def _groups_of(count: int, size: int) -> int:
    return -(-count // size)


def _least_padding(counts: Sequence[int], least: int) -> int:
    """Return the group size of at least `least` that pads `counts` least; of several the largest.

    >>> _least_padding([43, 21, 20], 21)
    22
    """
    sizes = range(least, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _dealt(layers: _Layers, groups: int) -> list[_Layers]:
    """Return `layers` dealt round-robin, those of each page size apart.

    Round-robin, so that every pipeline stage has its share of every group. (Where there are more
    groups than layers of a page size, vLLM 0.32 loses layers, or fails; no known model does this.)
    """
    dealt: list[_Layers] = [[] for _ in range(groups)]
    seen: Counter[int] = Counter()
    for layer in layers:
        page = _page(layer)
        dealt[seen[page] % groups].append(layer)
        seen[page] += 1
    return [group for group in dealt if group]


def _one_page_size(layers: _Layers) -> _Layers:
    """Return `layers` with the widest page: by more tokens in a block where exact, else padded.

    States are always padded; MLA rows never are, nor is what is padded already. Raises `PlanError`
    naming such a layer where its page does not fit.
    """
    widest_bytes = max(map(_page, layers))
    result: _Layers = []
    for layer in layers:
        page_bytes, padded = _page(layer), _page(layer) != layer.page_bytes
        divides = widest_bytes % page_bytes == 0
        if page_bytes == widest_bytes or layer.kind in STATE_KINDS:
            result.append(replace(layer, engine_page_bytes=widest_bytes))
        elif divides and not padded:
            result.append(_resized(layer, layer.block_size * (widest_bytes // page_bytes)))
        elif padded or layer.kind in _ROWS:
            raise PlanError(
                f"layer {layer.name!r} engine_page_bytes",
                page_bytes,
                f"a divisor of the widest page, {widest_bytes}, without padding of its own, unless "
                "the engine's layout is block-outermost",
            )
        else:
            result.append(replace(layer, engine_page_bytes=widest_bytes))
    return result


def _resized(layer: LayerSpec, block_size: int, **changes: Any) -> LayerSpec:
    """Return `layer` with other tokens per block, its page without padding."""
    page_bytes = layer.page_bytes * block_size // layer.block_size
    fields: dict[str, Any] = {"block_size": block_size, "page_bytes": page_bytes}
    return replace(layer, engine_page_bytes=0, **(fields | changes))


def _equal_counts(layers: _Layers) -> list[_Layers]:
    """Return groups of one spec and equally many layers, the last ones short.

    The rarest spec sets the size, unless the commonest has less than half as many again.
    """
    buckets = _gathered(layers, _merge)
    sizes = [len(bucket) for bucket in buckets]
    size = max(sizes) if 2 * max(sizes) < 3 * min(sizes) else min(sizes)
    return [group for b in buckets for group in _dealt(b, _groups_of(len(b), size))]


def _merge(first: LayerSpec, other: LayerSpec) -> bool:
    try:
        merge((first, replace(other, total_kv_heads=first.total_kv_heads)))
    except ConfigError:
        return False
    return True


def _promoted_beside_mla(layers: _Layers) -> _Layers | None:
    """Return one group with plain windows as full attention where MLA has no page for both."""
    kinds = {layer.kind for layer in layers}
    if kinds & {HIDDEN_STATE, SLIDING_WINDOW_MLA, CHUNKED_LOCAL}:
        return None
    if not (kinds & {MLA, INDEXER} and SLIDING_WINDOW in kinds):
        return None
    try:
        return _promoted(layers)
    except PlanError:
        return None


def _without_windows(layers: _Layers) -> _Layers:
    """Return `layers` as without a hybrid manager; those that DCP shards and others apart."""
    parts: dict[bool, _Layers] = defaultdict(list)
    for layer in layers:
        parts[layer.kind not in STATE_KINDS and not layer.dcp_sharded].append(layer)
    promoted = {x.name: x for part in parts.values() for x in _promoted(part)}
    return [promoted[layer.name] for layer in layers]


def _promoted(layers: _Layers) -> _Layers:
    """Return `layers` with blocks of all tokens for windows, beside layers that keep all tokens.

    Raises `PlanError` if they still need different slots.
    """
    if _uniform(layers, frozenset()):
        return layers
    whole = [layer for layer in layers if layer.kind in _WHOLE]
    spans = {layer.block_size for layer in whole}
    result = layers
    if whole:
        result = []
        for layer in layers:
            if layer.kind in _PROMOTED:
                block_size = spans.copy().pop() if len(spans) == 1 else layer.block_size
                layer = _promote(layer, block_size)
            result.append(layer)
    if not _uniform(result, frozenset()):
        odd = next(x for x in result if not _joins(result[0], x, frozenset()))
        raise PlanError(
            f"layer {odd.name!r} kind",
            odd.kind,
            f"blocks like those of layer {result[0].name!r}, or the hybrid cache manager",
        )
    return result


def _promote(layer: LayerSpec, block_size: int) -> LayerSpec:
    resized = _resized(layer, block_size, kind=_PROMOTED[layer.kind], window=None)
    if layer.engine_page_bytes == layer.page_bytes:
        return resized
    return replace(resized, engine_page_bytes=max(_page(layer), resized.page_bytes))


def _with_hidden(groups: list[_Layers], hidden: _Layers) -> list[_Layers]:
    """Return `groups` and one for each layer of hidden states, in pages of the common size.

    Where one token's hidden state exceeds the page, all blocks grow.
    """
    page_bytes = _page(groups[0][0])
    token_bytes = max(layer.num_kv_heads * layer.head_bytes for layer in hidden)
    if (scale := _groups_of(token_bytes, page_bytes)) > 1:
        page_bytes *= scale
        groups = [[_scaled(layer, scale) for layer in group] for group in groups]
    span = gcd(*(group[0].block_size for group in groups))
    for layer in hidden:
        most = max(page_bytes // (layer.num_kv_heads * layer.head_bytes), 1)
        block_size = next(n for n in range(min(span, most), 0, -1) if span % n == 0)
        groups.append([replace(_resized(layer, block_size), engine_page_bytes=page_bytes)])
    return groups


def _scaled(layer: LayerSpec, scale: int) -> LayerSpec:
    block_size, page_bytes = layer.block_size * scale, _page(layer) * scale
    if layer.kind in STATE_KINDS:
        return replace(
            layer,
            block_size=block_size,
            tokens_per_state=block_size,
            engine_page_bytes=page_bytes,
        )
    return replace(_resized(layer, block_size), engine_page_bytes=page_bytes)
