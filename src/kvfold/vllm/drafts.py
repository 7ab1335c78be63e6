"""Which engine blocks hold no proper draft.

A hit never waits for draft layers: where the store lacks their part, a load leaves it as it is. The
target checks what a draft proposes, so no answer suffers; but such a block must not be stored as
the draft's, nor any later one of a request whose draft has looked back on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvfold.vllm.requests import RequestState

HOLE = 0
"""In the engine's tables: no block."""


class Drafts:
    """The blocks of one engine whose draft part is not that of their tokens."""

    def __init__(self) -> None:
        self._spoilt: set[int] = set()

    def loaded(self, state: RequestState, filled: Iterable[int], left_out: Sequence[int]) -> None:
        """A load fills the draft part of some blocks and leaves it out in others."""
        self._spoilt.difference_update(filled)
        self.spoil(state, left_out)

    def spoil(self, state: RequestState, blocks: Sequence[int]) -> None:
        """Blocks of a request have no proper draft part."""
        if len(blocks):
            self._spoilt.update(blocks)
            state.draft_is_good = False

    def are_good(self, state: RequestState, table: Sequence[int], cached: int) -> bool:
        """Whether the draft in `table` may be stored; the request computed all but the first
        `cached` blocks itself."""
        if state.draft_is_good and not self._spoilt.isdisjoint(table[:cached]):
            state.draft_is_good = False  # the engine's own hit
        if state.draft_is_good:
            self._spoilt.difference_update(table[cached:])
        else:
            self._spoilt.update(table[cached:])
            self._spoilt.discard(HOLE)
        return state.draft_is_good
