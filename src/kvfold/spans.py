"""Hit boundaries and chunks: one period for all groups of a model, and what each stores per period.

Stored prefixes end at *boundaries*, the multiples of a period that every group's blocks and the
engine's own hits divide. For each boundary a group has at most one chunk, which ends there and has
the key of the block hash there:

* full attention: the whole period, as every token before the boundary is needed;
* a window: the part of the period that a hit at the boundary can look back on, so that a block of
  4 tokens does not cost a slot per 4 tokens; windows longer than the period need several chunks;
* a state: the one state at the boundary.

So all groups are looked up by the same hashes, and all restore to the same boundary or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from kvfold.errors import PlanError
from kvfold.placement import tokens_per_block
from kvfold.plan import GroupPlan
from kvfold.spec import CHUNKED_LOCAL, STATE_KINDS, WINDOW_KINDS, GroupSpec, LayerSpec

MAX_PERIOD_TOKENS = 1 << 20


def with_chunks(
    groups: Sequence[GroupSpec], dcp: int, alignment_tokens: int, blocks_per_chunk: int
) -> tuple[int, tuple[GroupSpec, ...]]:
    """Return the period in tokens, and `groups` with their blocks per chunk.

    `alignment_tokens` is what the engine's own hits are multiples of, `blocks_per_chunk` how many
    such units make a period. States bind the period only through the alignment: an engine that
    hits inside their blocks hands over states inside their blocks.

    Raises `PlanError` for a period over 1,048,576 tokens.
    """
    unit = alignment_tokens
    for group in groups:
        if group.prefix_cacheable and not is_state(group.layers[0]):
            unit = lcm(unit, tokens_per_block(group, dcp))
    period = unit * blocks_per_chunk
    if period > MAX_PERIOD_TOKENS:
        raise PlanError(
            "blocks_per_chunk", blocks_per_chunk, f"at most {MAX_PERIOD_TOKENS // unit}"
        )
    return period, tuple(
        replace(group, blocks_per_chunk=_blocks(group, dcp, period))
        if group.prefix_cacheable
        else group
        for group in groups
    )


def _blocks(group: GroupSpec, dcp: int, period: int) -> int:
    layer = group.layers[0]
    if is_state(layer):
        return 1
    block = tokens_per_block(group, dcp)
    look_back = max((look_back_tokens(layer) for layer in group.layers), default=0) or period
    return max(1, min(period // block, -(-look_back // block)))


def is_state(layer: LayerSpec) -> bool:
    return layer.kind in STATE_KINDS


def look_back_tokens(layer: LayerSpec) -> int:
    """Tokens before a boundary that a window needs at most; 0: all of them, or a state.

    The token after the boundary sees itself too, so a window of n looks back n - 1.
    """
    if layer.kind not in WINDOW_KINDS:
        return 0
    assert layer.window is not None
    return max(1, layer.window if layer.kind == CHUNKED_LOCAL else layer.window - 1)


def window_interval_tokens(groups: Sequence[GroupPlan], period: int) -> int:
    """How far apart window boundaries inside a long prompt are stored, a multiple of `period`.

    So far that windows take no more bytes than the groups that store every token; without such
    groups every period. The ends of prompts and junctions of shared prefixes are stored besides.
    """
    whole = tails = 0
    look_back = 0
    for group in groups:
        if not group.participating or group.is_draft or is_state(group.layers[0].spec):
            continue
        looks = max(look_back_tokens(layer.spec) for layer in group.layers)
        per_token = group.chunk_bytes / group.tokens_per_chunk
        if looks == 0:
            whole += int(per_token * period)
        else:
            tails += int(per_token * -(-looks // group.tokens_per_block) * group.tokens_per_block)
            look_back = max(look_back, looks)
    if whole == 0 or tails == 0:
        return period
    periods = max(1, -(-tails // whole))
    return period if periods * period <= look_back else periods * period
