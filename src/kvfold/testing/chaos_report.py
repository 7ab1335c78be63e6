"""What happened in a chaos run, and what was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvfold.testing.chaos_oracle import Judgement


@dataclass
class Report:
    """What happened in a run, and what was wrong."""

    model: str
    seed: int
    operations: int = 0
    requests: int = 0
    answered: int = 0
    aborted: int = 0
    stores: set[str] = field(default_factory=set)
    engines: int = 0
    resets: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    judged: Judgement = field(default_factory=Judgement)
    loaded: int = 0
    """Chunks whose bytes were compared after they had been loaded."""
    problems: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        """A counter, over all its labels."""
        return int(
            sum(n for key, n in self.counted.items() if key == name or key.startswith(f"{name}/"))
        )

    def count(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Add what an engine's counters have grown by."""
        self.counted.update({name: int(n - before.get(name, 0)) for name, n in after.items()})

    @property
    def restarts(self) -> int:
        """Stores that took another's place."""
        return max(0, len(self.stores) - self.engines)

    def happened(self) -> dict[str, int]:
        """What a run must have seen to prove anything."""
        return {
            "tokens hit in host": int(self.counted["kvfold_hit_tokens/host"]),
            "tokens hit on disk": int(self.counted["kvfold_hit_tokens/disk"]),
            "loads failed": self.total("kvfold_load_failures"),
            "preemptions": self.total("num_preemptions"),
            "store restarts": self.restarts,
            "requests aborted": self.aborted,
            "chunks compared": self.loaded,
            "answers compared": self.judged.answers,
        }

    def text(self) -> str:
        """The summary, some lines."""
        reasons = {
            key.partition("/")[2]: int(n)
            for key, n in sorted(self.counted.items())
            if key.startswith("kvfold_load_failures/") and n
        }
        dropped = {
            name.removeprefix("kvfold_"): self.total(name)
            for name in ("kvfold_store_jobs_dropped", "kvfold_chunks_no_room",
                         "kvfold_chunks_dropped")
        }  # fmt: skip
        lines = [
            f"{self.model}, seed {self.seed}: {self.operations} operations, {self.requests} "
            f"requests, {self.answered} answered, {self.aborted} aborted, {self.engines} engines",
            ", ".join(f"{n} {name}" for name, n in self.happened().items()),
            f"{self.total('kvfold_loads')} loads, failed: {_counts(reasons)}; {_counts(dropped)}",
            f"faults: {_counts(self.faults)}; resets: {_counts(self.resets)}",
            f"{self.judged.tokens} tokens of {self.judged.answers} answers compared: "
            f"{self.judged.ties} ties, widest difference {self.judged.widest:.1e}, "
            f"{len(self.judged.mismatches)} mismatches",
        ]
        return "\n".join([*lines, *(f"PROBLEM {problem}" for problem in self.problems)])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"
