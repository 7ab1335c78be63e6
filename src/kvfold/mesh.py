"""Ranks and their coordinates. Data-parallel replicas are separate engines and not in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvfold.errors import ConfigError


class Coords(NamedTuple):
    """Where a rank sits; `dcp` is its token shard, derived from `pcp` and `tp`."""

    pp: int
    pcp: int
    tp: int
    dcp: int


@dataclass(frozen=True)
class Mesh:
    """The axes of one engine: `rank = (pp_rank * pcp + pcp_rank) * tp + tp_rank`.

    `dcp` shards token positions over existing ranks and adds none: it divides `tp`, and with
    `pcp` > 1 it is 1, `pcp` or `tp * pcp`. `dcp_interleave` is how many neighbouring tokens stay
    together on one token shard. Raises `ConfigError` for anything else.
    """

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    pp: int = 1
    dcp_interleave: int = 1

    def __post_init__(self) -> None:
        for field in ("tp", "dcp", "pcp", "pp", "dcp_interleave"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(field, value, "a whole number of at least 1")
        if self.pcp == 1 and self.tp % self.dcp:
            raise ConfigError("dcp", self.dcp, f"a divisor of tp={self.tp}")
        if self.pcp > 1 and self.dcp not in (1, self.pcp, self.tp * self.pcp):
            raise ConfigError(
                "dcp", self.dcp, f"1, pcp={self.pcp} or tp * pcp={self.tp * self.pcp}"
            )

    @property
    def world_size(self) -> int:
        return self.pp * self.pcp * self.tp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.pcp * self.tp

    def rank(self, pp: int, pcp: int, tp: int) -> int:
        """Return the rank at the given coordinates."""
        for axis, value, size in (("pp", pp, self.pp), ("pcp", pcp, self.pcp), ("tp", tp, self.tp)):
            if not 0 <= value < size:
                raise ConfigError(f"{axis}_rank", value, f"0 to {size - 1}")
        return (pp * self.pcp + pcp) * self.tp + tp

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of `rank`.

        >>> Mesh(tp=4, pcp=2, dcp=2, pp=2).coords(13)
        Coords(pp=1, pcp=1, tp=1, dcp=1)
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError("rank", rank, f"0 to {self.world_size - 1}")
        outer, tp = divmod(rank, self.tp)
        pp, pcp = divmod(outer, self.pcp)
        return Coords(pp, pcp, tp, (tp * self.pcp + pcp) % self.dcp)

    def stage_ranks(self, stage: int) -> range:
        """Return the ranks of pipeline stage `stage`, in order."""
        first = self.rank(stage, 0, 0)
        return range(first, first + self.stage_size)
