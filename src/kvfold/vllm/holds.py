"""References that keep the source blocks of running store jobs alive.

A block that a job copies from is held from the step that orders the job until every worker has
reported it; only then may the engine give the block to somebody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

FREES_WAIT_S = 1.0
"""How long running copies may make the scheduler wait for their blocks instead of preempting."""


@dataclass
class _Job:
    blocks: list[KVCacheBlock]
    left: int
    started_s: float


class Holds:
    """The blocks of all running jobs of one engine."""

    def __init__(
        self, world: int, max_blocks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._world, self._max_blocks, self._clock = world, max_blocks, clock
        self._jobs: dict[int, _Job] = {}
        self._blocks = 0
        self.pool: BlockPool | None = None

    @property
    def jobs(self) -> int:
        """Jobs that still hold blocks."""
        return len(self._jobs)

    @property
    def blocks(self) -> int:
        """Blocks that jobs hold; a block of two jobs counts twice."""
        return self._blocks

    @property
    def room(self) -> int:
        """Blocks that may still be held."""
        return max(0, self._max_blocks - self._blocks)

    def hold(self, job: int, block_ids: Sequence[int]) -> None:
        """Take a reference on each block, until all workers have reported `job`."""
        assert self.pool is not None
        blocks = [self.pool.blocks[i] for i in block_ids]
        self.pool.touch(blocks)
        self._blocks += len(blocks)
        self._jobs[job] = _Job(blocks, self._world, self._clock())

    def reported(self, job: int, workers: int) -> bool:
        """`workers` more of them have ended `job`; unknown jobs are ignored. True if it was the
        last."""
        held = self._jobs.get(job)
        if held is None:
            return False
        held.left -= workers
        if held.left > 0:
            return False
        assert self.pool is not None
        del self._jobs[job]
        self._blocks -= len(held.blocks)
        self.pool.free_blocks(reversed(held.blocks))
        return True

    def free_soon(self) -> bool:
        """Whether waiting shortly is better than preempting: running copies hold blocks."""
        if not self._jobs:
            return False
        oldest = next(iter(self._jobs.values()))
        return self._clock() - oldest.started_s < FREES_WAIT_S
