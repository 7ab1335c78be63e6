"""How long things took: counts in fixed buckets, cheap enough for every event."""

from __future__ import annotations

from bisect import bisect_left

# Upper bounds in seconds, a third of a decade apart: from a lookup in memory to a slow ticket.
BOUNDS_S = tuple(
    round(scale * factor, 9)
    for scale in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    for factor in (1, 2.5, 5)
)


class Latency:
    """A histogram. `counts` has one bucket more than `BOUNDS_S`, for what is above the last."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def note(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def report(self) -> dict[str, object]:
        return {
            "count": sum(self.counts),
            "sum_s": self.sum_s,
            "bounds_s": list(BOUNDS_S),
            "counts": list(self.counts),
        }
