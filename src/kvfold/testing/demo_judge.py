"""What the demo's findings are worth: checks that must hold, and aims that are reported."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.testing.demo_ask import Asking, Pass
from kvfold.testing.demo_fold import Folded
from kvfold.testing.demo_measure import Difference

HOST_FACTOR, HOST_EXTRA_S = 1.2, 0.030
DISK_SHARE = 0.7
"""Share of the disk's own read rate that a load from disk should reach."""


@dataclass(frozen=True)
class Check:
    """Something that must hold; the demo fails otherwise."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Aim:
    """A time that should not be exceeded; missing it is told, no failure."""

    name: str
    value_s: float
    aim_s: float
    how: str

    @property
    def met(self) -> bool:
        return self.value_s <= self.aim_s


def aims(found: Asking) -> list[Aim]:
    """The aims for both warm passes, from the same run's own figures."""
    own_s = found.own.ttft_s
    host_s = HOST_FACTOR * own_s + HOST_EXTRA_S
    size = found.stored["disk"]["payload_bytes"]
    limit = statistics.median(found.read_limits)
    disk_s = host_s + size / (DISK_SHARE * limit)
    return [
        Aim("host", found.host.ttft_s, host_s, f"1.2 x own cache ({1e3 * own_s:.0f} ms) + 30 ms"),
        Aim(
            "disk",
            found.disk.ttft_s,
            disk_s,
            f"that + {size / 1e6:.0f} MB / (0.7 x {limit / 1e9:.2f} GB/s)",
        ),
    ]


def check_asking(found: Asking, stored_bytes: int) -> list[Check]:
    """Check hits, answers and bytes of the first part; `stored_bytes` is what one copy takes."""
    want = found.prompts.hit_tokens
    checks = [
        _check_hits(found.own, "device", want),
        _check_hits(found.again, "host", want),
        _check_hits(found.host, "host", want),
        _check_hits(found.disk, "disk", want),
    ]
    for one in found.passes[1:]:
        checks.append(check_answers(one.name, one.differences(found.cold), len(one.asked)))
    for tier in ("host", "disk"):
        size = found.stored[tier]["payload_bytes"]
        checks.append(
            Check(f"{tier} holds one copy", size == stored_bytes, f"{size:,} of {stored_bytes:,} B")
        )
    return checks


def _check_hits(one: Pass, tier: str, want: int) -> Check:
    """Every question of a pass must hit `want` tokens, all of them in `tier`."""
    external = 0 if tier == "device" else want
    wrong = [
        asked
        for asked in one.asked
        if asked.hit_tokens.get(tier) != want
        or sum(asked.hit_tokens.values()) != want
        or asked.external_hit_tokens != external
    ]
    detail = f"{want} tokens of {len(one.asked)} questions each"
    if wrong:
        first = wrong[0]
        hits = ", ".join(f"{count} from {name}" for name, count in first.hit_tokens.items())
        detail = (
            f"question {first.question + 1}: {hits}, {first.external_hit_tokens} by the connector; "
            f"expected {want} from {tier}"
        )
    return Check(f"{one.name}: hits from {tier}", not wrong, detail)


def check_answers(name: str, differences: Sequence[Difference], questions: int) -> Check:
    """Answers must agree token for token, ties excepted."""
    bad = [one for one in differences if not one.is_tie]
    detail = f"{questions} of {questions} equal"
    if differences:
        told = "; ".join(
            f"question {one.question + 1} from token {one.position} (gap {one.gap:.1e})"
            for one in differences
        )
        detail = f"{questions - len(differences)} of {questions} equal; differ: {told}"
    return Check(f"{name}: answers", not bad, detail)


def check_folded(one: Folded) -> list[Check]:
    """Check hits, bytes and answers of one checkpoint of the second part."""
    case, name = one.case, one.case.name
    want = case.hit_tokens
    ranks = "equal on all ranks" if case.folds else "different on every rank"
    return [
        Check(
            f"{name}: hits from disk",
            one.loaded_tokens == want and one.loaded_from.get("disk") == want,
            f"{one.loaded_tokens} tokens loaded, {one.loaded_from}; expected {want} from disk",
        ),
        Check(
            f"{name}: every byte stored once",
            one.stored_bytes == one.disk_bytes == case.distinct_bytes,
            f"host {one.stored_bytes:,} B, disk {one.disk_bytes:,} B, "
            f"expected {case.distinct_bytes:,} B",
        ),
        check_answers(name, [] if one.answer is None else [one.answer], 1),
        Check(
            f"{name}: bytes after the load",
            one.bytes.kept and one.bytes.chunks == want // case.span,
            one.bytes.trouble or f"{one.bytes.chunks} chunks on {one.bytes.ranks} ranks as stored",
        ),
        Check(
            f"{name}: bytes of the ranks",
            one.bytes.same_on_ranks if case.folds else one.bytes.distinct_on_ranks,
            f"expected {ranks}",
        ),
    ]
