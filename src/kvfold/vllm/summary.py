"""One INFO line at start: what folds, how large slots are, how many tokens the tiers hold."""

from __future__ import annotations

from collections.abc import Iterator

from kvfold.sizes import format_bytes, parse_bytes
from kvfold.vllm.agreement import Agreed, copies_bytes
from kvfold.vllm.requests import Geometry
from kvfold.vllm.settings import ConnectorSettings


def summary(agreed: Agreed, geometry: Geometry, settings: ConnectorSettings) -> str:
    """The plan of an engine for its log."""
    return "\n".join(_lines(agreed, geometry, settings))


def _lines(agreed: Agreed, geometry: Geometry, settings: ConnectorSettings) -> Iterator[str]:
    plan = agreed.plan
    layers = sum(len(group.layers) for group in plan.stored)
    outside = len(plan.groups) - len(plan.stored)
    yield (
        f"kvfold: {layers} layers in {len(plan.stored)} groups, hits every {geometry.period} "
        f"tokens{f', {outside} groups outside prefix caching' if outside else ''}"
    )
    per_token = 0.0
    for number, group in enumerate(plan.stored):
        shape, copies = geometry.groups[number], copies_bytes(agreed, number)
        stored = group.slot_bytes
        folds = f", TP copies would take {format_bytes(copies)}" if copies > stored else ""
        what = f"{group.tokens_per_chunk} tokens"
        if shape.need == "state":
            what = "1 state"
        else:
            every = geometry.period if shape.need == "all" else geometry.window_interval
            per_token += stored / every
        count = len(group.layers)
        yield f"  {shape.label}: {count} layers, {what} in {format_bytes(stored)}{folds}"
    for tier, size in (("host", settings.host), ("disk", settings.disk)):
        nbytes = parse_bytes(tier, size)
        if nbytes and per_token:
            yield f"  {tier} {format_bytes(nbytes)}: up to {int(nbytes / per_token):,} tokens"
        else:
            yield f"  {tier} {format_bytes(nbytes) if nbytes else 'none'}"
    yield plan.explain()
