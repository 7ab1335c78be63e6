"""Whether the engine's blocks suffice for one more load.

A loaded request holds its blocks until it runs, and cannot be preempted before. The engine admits
loads by what earlier ones still need, but counts too little for windows (holes in their tables pass
for blocks) and too much for a request whose load failed (its former blocks stay reserved until it
runs). Two loaded requests could then wait for each other's blocks for ever, with nothing running.
So a load is only offered if all requests in that state can have all that they need at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

STATE_BLOCKS = 4
"""Blocks that a request has of a state at a time: two, and checkpoints of a prompt."""


@dataclass(frozen=True)
class EngineGroup:
    """One cache group of the engine, stored or not: what a request holds of it at a time."""

    need: Literal["all", "window", "state", "ring"]
    tokens_per_block: int
    look_back: int = 0


class Room:
    """The requests that hold blocks of a load, or are reserved some, and have not run since."""

    def __init__(
        self, groups: Sequence[EngineGroup], num_blocks: int, max_step_tokens: int
    ) -> None:
        self._groups, self._max_step_tokens = tuple(groups), max_step_tokens
        self._blocks = num_blocks - 1  # one is the engine's hole
        self._held: dict[str, int] = {}

    def most_blocks(self, tokens: int, computed: int) -> int:
        """Blocks that a request of `tokens`, with `computed` of them there, holds at most at a
        time."""
        left = min(tokens - computed, self._max_step_tokens)
        total = 1
        for group in self._groups:
            span = group.tokens_per_block
            whole = -(-tokens // span)
            match group.need:
                case "all":
                    total += whole
                case "state":
                    total += STATE_BLOCKS
                case "ring":
                    total += 1
                case "window":
                    total += min(whole, -(-group.look_back // span) + -(-left // span) + 2)
        return total

    def has(self, request: str, tokens: int, end: int, *, again: bool) -> bool:
        """Whether a request of `tokens` may load the first `end`; `again`: after a failed load."""
        others = sum(blocks for name, blocks in self._held.items() if name != request)
        own = self.most_blocks(tokens, end) * (2 if again else 1)
        return others + own <= self._blocks

    @property
    def empty(self) -> bool:
        """Whether no request holds blocks of a load without having run."""
        return not self._held

    def hold(self, request: str, tokens: int, computed: int) -> None:
        """A load of a request is ordered, or has failed (`computed` 0: still reserved)."""
        self._held[request] = self.most_blocks(tokens, computed)

    def release(self, request: str) -> None:
        """A request runs, or is no more."""
        self._held.pop(request, None)
