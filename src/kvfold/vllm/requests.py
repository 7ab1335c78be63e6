"""What the scheduler's side knows of the engine's units and of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

MIN_PIN_SHARE, MAX_PIN_SHARE = 0.05, 0.5
"""Share of the engine's blocks that store jobs may hold: at least, and whatever a step needs."""


@dataclass(frozen=True)
class Geometry:
    """Units of the one cache group, in tokens and blocks."""

    tokens_per_hash: int
    tokens_per_block: int
    blocks_per_chunk: int
    hash_bytes: int
    world: int
    num_blocks: int
    max_step_tokens: int

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def hashes_per_chunk(self) -> int:
        return self.tokens_per_chunk // self.tokens_per_hash

    @property
    def max_pinned_blocks(self) -> int:
        """Blocks that jobs may hold: a share of the pool, but always one step's worth, as a
        prompt's blocks must be held in the step that computes them."""
        step = -(-self.max_step_tokens // self.tokens_per_block)
        share = int(MIN_PIN_SHARE * self.num_blocks)
        return min(int(MAX_PIN_SHARE * self.num_blocks), max(share, step))


class Lookup:
    """One question to the store; `tiers` is its answer, None until it is there."""

    __slots__ = ("epoch", "looked_s", "tiers")

    def __init__(self, epoch: bytes) -> None:
        self.epoch = epoch
        self.tiers: bytes | None = None
        self.looked_s = 0.0


class RequestState:
    """What is known of one request."""

    __slots__ = (
        "asked_s", "failed_ticket", "failures", "limit", "local_tokens", "lookup", "next_chunk",
        "next_tokens", "request", "ticket", "ticket_first",
    )  # fmt: skip

    def __init__(self, request: Request, first_tokens: int) -> None:
        self.request = request
        self.lookup: Lookup | None = None
        self.asked_s: float | None = None
        self.limit: int | None = None
        self.failures = 0
        self.failed_ticket: int | None = None
        self.local_tokens = 0
        self.ticket: int | None = None
        self.ticket_first = 0
        self.next_chunk = 0
        self.next_tokens = first_tokens


@dataclass
class SchedulerCounters:
    """Totals of this engine; they never go down."""

    lookups: int = 0
    lookups_late: int = 0
    offers: int = 0
    loads: int = 0
    tokens_offered: int = 0
    load_failures: int = 0
    chunks_scheduled: int = 0
    chunks_dropped: int = 0
