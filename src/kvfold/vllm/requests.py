"""What the scheduler's side knows of the engine's units and of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import PlanError
from kvfold.spans import is_state, look_back_tokens, window_interval_tokens
from kvfold.spec import CHUNKED_LOCAL
from kvfold.vllm.agreement import Agreed
from kvfold.vllm.metrics import group_label

if TYPE_CHECKING:
    from vllm.v1.request import Request

MIN_PIN_SHARE, MAX_PIN_SHARE = 0.05, 0.5
"""Share of the engine's blocks that store jobs may hold: at least, and whatever a step needs."""

Need = Literal["all", "window", "chunked", "state"]
NEVER = 1 << 60
"""More tokens than any request will have."""


@dataclass(frozen=True)
class GroupGeometry:
    """One stored group: `number` is the store's, `index` the engine's.

    `need` says what of it a hit needs: everything before the boundary, a window of `look_back`
    tokens (sliding, or chunked by that many), or the state there. `optional` groups (drafts) never
    limit a hit. `handed_over`: the engine says which block holds a state, no table does.
    """

    number: int
    index: int
    need: Need
    look_back: int
    tokens_per_block: int
    blocks_per_chunk: int
    optional: bool = False
    handed_over: bool = False
    label: str = ""

    def first_token(self, boundary: int) -> int:
        """The first token before `boundary` that a hit there needs of this group."""
        match self.need:
            case "all":
                return 0
            case "window":
                return max(0, boundary - self.look_back)
            case "chunked":
                return boundary // self.look_back * self.look_back
            case "state":
                return boundary - 1

    def first_tokens(self, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        """`first_token` of many boundaries."""
        match self.need:
            case "all":
                return np.zeros_like(boundaries)
            case "window":
                return np.maximum(0, boundaries - self.look_back)
            case "chunked":
                return boundaries // self.look_back * self.look_back
            case "state":
                return boundaries - 1


@dataclass(frozen=True)
class Geometry:
    """Units of an engine and its groups, in tokens and blocks. See `kvfold.spans`."""

    period: int
    """Tokens between two boundaries; chunk i of every group ends at (i + 1) x period."""
    tokens_per_hash: int
    hash_bytes: int
    groups: tuple[GroupGeometry, ...]
    world: int
    num_blocks: int
    max_step_tokens: int
    window_interval: int
    """Distance of the boundaries inside a long prompt at which windows are stored."""
    draft_lag: int = 0
    """Tokens that must follow a chunk before a draft's part of it is final."""

    @classmethod
    def of(
        cls,
        agreed: Agreed,
        *,
        hash_bytes: int,
        num_blocks: int,
        max_step_tokens: int,
        draft_lag: int = 0,
    ) -> Geometry:
        """The geometry of a plan that all workers agreed on.

        Raises `PlanError` if the engine has too few blocks to hold a chunk while it is copied.
        """
        groups = []
        for number, (group, mode) in enumerate(zip(agreed.plan.stored, agreed.modes, strict=True)):
            first = group.layers[0].spec
            look_back = max(look_back_tokens(layer.spec) for layer in group.layers)
            need: Need = "window" if look_back else "all"
            if first.kind == CHUNKED_LOCAL:
                need = "chunked"
            elif is_state(first):
                need = "state"
            groups.append(
                GroupGeometry(
                    number,
                    group.index,
                    need,
                    look_back,
                    group.tokens_per_block,
                    group.blocks_per_chunk,
                    optional=group.is_draft,
                    handed_over=mode == "align",
                    label=group_label(group),
                )
            )
        made = cls(
            agreed.period_tokens,
            agreed.plan.tokens_per_hash,
            hash_bytes,
            tuple(groups),
            agreed.plan.mesh.world_size,
            num_blocks,
            max_step_tokens,
            window_interval_tokens(agreed.plan.stored, agreed.period_tokens),
            draft_lag,
        )
        for shape in made.groups:
            if shape.blocks_per_chunk > made.max_pinned_blocks:
                raise PlanError(
                    f"blocks of a chunk of group {shape.label}",
                    shape.blocks_per_chunk,
                    f"at most {made.max_pinned_blocks}, half of the engine's {num_blocks} blocks: "
                    "set a smaller blocks_per_chunk or give the engine more blocks",
                )
        return made

    @property
    def hashes_per_chunk(self) -> int:
        return self.period // self.tokens_per_hash

    @property
    def max_pinned_blocks(self) -> int:
        """Blocks that jobs may hold: a share of the pool, but always one step's worth, as a
        prompt's blocks must be held in the step that computes them, and one chunk of each group."""
        step = sum(
            max(-(-self.max_step_tokens // g.tokens_per_block), g.blocks_per_chunk)
            for g in self.groups
        )
        share = int(MIN_PIN_SHARE * self.num_blocks)
        return min(int(MAX_PIN_SHARE * self.num_blocks), max(share, step))


class Lookup:
    """One question to the store; `tiers` is its answer, None until it is there.

    `tiers` has shape (groups, chunks): 0 absent, 1 disk, 2 host. What turns out to be lost is set
    to 0 in it.
    """

    __slots__ = ("asked_s", "boundary", "epoch", "local", "looked_s", "tiers")

    def __init__(self, epoch: bytes, asked_s: float) -> None:
        self.epoch = epoch
        self.tiers: NDArray[np.uint8] | None = None
        self.asked_s = asked_s
        self.looked_s = 0.0
        self.local = -1
        """The engine's own hit, in tokens, that `boundary` was found for."""
        self.boundary = 0


@dataclass
class Load:
    """A load that is under way: its number, end, and the (group, chunks) of each of its parts."""

    number: int
    end: int
    tokens: int
    started_s: float
    disk: int = 0
    """Tokens of it that come from disk."""
    draft_blocks: list[int] = field(default_factory=list)
    """Blocks whose draft part it fills."""
    draft_left_out: list[int] = field(default_factory=list)
    """Blocks whose draft part the store does not have."""
    parts: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)


class RequestState:
    """What is known of one request."""

    __slots__ = (
        "asked_s", "blocked", "cached", "draft_is_good", "failed_load", "failures", "full_s",
        "junction", "load", "loaded", "local", "lookup", "mask", "next", "next_tokens", "request",
        "retried", "stand_back", "told",
    )  # fmt: skip

    def __init__(self, request: Request, geometry: Geometry) -> None:
        self.request = request
        self.lookup: Lookup | None = None
        self.asked_s: float | None = None
        self.mask: bytes | None = b""
        """Mixed into the keys; None while, or if, the request's adapter is not known."""
        self.blocked = False
        """Nothing of it may be stored: blocks from before a reset, or an error."""
        self.failures = 0
        self.failed_load: int | None = None
        self.stand_back = False
        """Its load has just failed: the engine must take it out of its queue of loads."""
        self.retried = False
        """The shorter offer after a failure was made."""
        self.local = 0
        self.cached = 0
        """Tokens that it has not computed itself: hits of the engine's own, and loads."""
        self.draft_is_good = True
        """Its draft has looked back on nothing but proper blocks."""
        self.full_s: float | None = None
        """Since when an offer waits for blocks that other loads will need."""
        self.load: Load | None = None
        self.loaded = 0
        self.junction = 0
        """Others share the prefix up to here, in tokens; 0: not known."""
        self.next = [0] * len(geometry.groups)
        """Per group, the first chunk that is not dealt with."""
        self.next_tokens = geometry.period
        """Nothing is to be stored before so many tokens are computed."""
        self.told = ""
