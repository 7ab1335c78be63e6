"""What a plan costs: bytes per token and per sequence, and what a tier of a given size holds.

*Growing* layers keep every token; windows and states are a fixed part per sequence: one window
before its end, one state at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from kvfold.plan import GroupPlan, LayerPlan, OffloadPlan
from kvfold.spec import STATE_KINDS, WINDOW_KINDS


@dataclass(frozen=True)
class Costs:
    """All in bytes. Per token of the growing layers: `unique_per_token` counts every distinct
    fragment once, `padded_per_token` the same with the engine's page padding,
    `rank_per_token` is one rank's pages of all its tokens' span, `copies_per_token` what keeping
    every rank's pages costs. Per sequence: `window_per_sequence`, `state_per_sequence`.

    `stored_per_token` and `stored_per_sequence` are ours in a tier, in whole slots.
    """

    unique_per_token: Fraction
    padded_per_token: Fraction
    rank_per_token: Fraction
    copies_per_token: Fraction
    window_per_sequence: Fraction
    state_per_sequence: int
    stored_per_token: Fraction
    stored_per_sequence: int


@dataclass(frozen=True)
class Holding:
    """What a tier holds: tokens of the growing layers, sequences of a length with all they need,
    and tokens if every rank's pages were kept instead.
    """

    tokens: int
    sequences: int
    tokens_of_copies: int


def is_growing(layer: LayerPlan) -> bool:
    """Return whether the layer keeps every token."""
    return layer.spec.kind not in WINDOW_KINDS | STATE_KINDS


def costs(plan: OffloadPlan) -> Costs:
    """Return what `plan` costs; groups outside prefix caching count nothing."""
    unique = padded = rank = copies = window = stored = Fraction(0)
    state = stored_fixed = 0
    for group, layer in _layers(plan.groups):
        tokens = group.tokens_per_block
        if is_growing(layer):
            fragments = layer.placement.fragments
            held_bytes = layer.spec.page_bytes * sum(f.replicas for f in fragments)
            unique += Fraction(layer.block_bytes, tokens)
            padded += Fraction(layer.spec.engine_page_bytes * len(fragments), tokens)
            rank += Fraction(layer.spec.page_bytes, tokens)
            copies += Fraction(held_bytes, tokens)
        elif layer.spec.window is not None:
            window += Fraction(layer.block_bytes * layer.spec.window, tokens)
        else:
            state += layer.block_bytes
    for group in plan.groups:
        if not group.participating:
            continue
        if any(is_growing(layer) for layer in group.layers):
            stored += Fraction(group.slot_bytes, group.tokens_per_chunk)
        else:
            needed = max(layer.spec.window or 1 for layer in group.layers)
            stored_fixed += -(-needed // group.tokens_per_chunk) * group.slot_bytes
    return Costs(unique, padded, rank, copies, window, state, stored, stored_fixed)


def holding(costs: Costs, tier_bytes: int, sequence_tokens: int) -> Holding:
    """Return what a tier of `tier_bytes` holds; a model that does not grow has 0 tokens."""
    sequence_bytes = costs.stored_per_token * sequence_tokens + costs.stored_per_sequence
    copies = costs.copies_per_token
    return Holding(
        int(tier_bytes / costs.stored_per_token) if costs.stored_per_token else 0,
        int(tier_bytes / sequence_bytes) if sequence_bytes else 0,
        int(tier_bytes / copies) if copies else 0,
    )


def replicas(group: GroupPlan, kind: str) -> int:
    """Return how many ranks hold each fragment of the group's layers of this kind."""
    return max(
        f.replicas for la in group.layers if la.spec.kind == kind for f in la.placement.fragments
    )


def _layers(groups: Iterable[GroupPlan]) -> Iterator[tuple[GroupPlan, LayerPlan]]:
    for group in groups:
        for layer in group.layers:
            yield group, layer
