"""The longest hit: the last boundary at which every mandatory group has what it needs.

Works on whole arrays: a prompt of a million tokens takes a few array operations per group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvfold.vllm.requests import Geometry, GroupGeometry

Tiers = NDArray[np.uint8]


def longest(geometry: Geometry, tiers: Tiers, local: int, limit: int) -> int:
    """The last boundary in tokens, at most `limit`, that loads can reach beyond `local` tokens.

    `tiers` has shape (groups, chunks), 0 for absent chunks. The engine has the first `local` tokens
    in every group, so chunks that end there or before are not needed. 0 if there is no such
    boundary.
    """
    first, last = local // geometry.period, min(tiers.shape[1], limit // geometry.period)
    if last <= first:
        return 0
    chunks = np.arange(first, last)
    good = np.ones(last - first, dtype=bool)
    for group in geometry.groups:
        if group.optional:
            continue
        present = tiers[group.number, first:last] != 0
        if group.need == "all":
            good &= np.logical_and.accumulate(present)
        else:
            absent = np.maximum.accumulate(np.where(present, -1, chunks))
            good &= absent < needed_from(geometry, group, chunks, first)
    found = np.flatnonzero(good)
    return int(chunks[found[-1]] + 1) * geometry.period if len(found) else 0


def needed_from(
    geometry: Geometry, group: GroupGeometry, chunks: NDArray[np.int64], first: int = 0
) -> NDArray[np.int64]:
    """For hits at the ends of `chunks`: the first chunk needed of `group`, at least `first`."""
    boundaries = (chunks + 1) * geometry.period
    return np.maximum(first, group.first_tokens(boundaries) // geometry.period)


def whole_prefix(geometry: Geometry, tiers: Tiers, local: int, limit: int) -> int:
    """The boundary in tokens up to which the groups that need every token have all of them."""
    first, last = local // geometry.period, min(tiers.shape[1], limit // geometry.period)
    rows = [group.number for group in geometry.groups if group.need == "all" and not group.optional]
    if last <= first or not rows:
        return 0
    whole = np.logical_and.accumulate((tiers[rows, first:last] != 0).all(axis=0))
    return (first + int(whole.sum())) * geometry.period


def missing(
    geometry: Geometry, tiers: Tiers, local: int, limit: int
) -> Iterator[tuple[GroupGeometry, int]]:
    """The first absent chunk of each mandatory group for a hit at the last boundary up to `limit`.

    The groups that need every token come first, the shortest of them in front: they limit most.
    """
    first, last = local // geometry.period, min(tiers.shape[1], limit // geometry.period)
    found: list[tuple[bool, int, GroupGeometry]] = []
    for group in geometry.groups:
        if group.optional or last <= first:
            continue
        start = max(first, group.first_token(last * geometry.period) // geometry.period)
        absent = np.flatnonzero(tiers[group.number, start:last] == 0)
        if len(absent):
            found.append((group.need != "all", start + int(absent[0]), group))
    for _, chunk, group in sorted(found, key=lambda entry: entry[:2]):
        yield group, chunk


def wanted(
    geometry: Geometry,
    group: GroupGeometry,
    chunks: NDArray[np.int64],
    prompt: int,
    junctions: Sequence[int],
) -> NDArray[np.bool_]:
    """Which of a window's or states' `chunks` can ever serve a hit, for a prompt of `prompt`
    tokens.

    Those that a hit needs at one of the boundaries where hits are likely: every `window_interval`
    tokens of the prompt, its end (also one token before: a resent prompt stops there), `junctions`
    with other requests, and everything that is generated.
    """
    period = geometry.period
    every = geometry.window_interval // period
    if group.need == "all" or every == 1:
        return np.ones(len(chunks), dtype=bool)
    end = prompt // period
    interval = -(-(chunks + 1) // every) * every  # the next such boundary, as a number of chunks
    good = (needed_from(geometry, group, interval - 1) <= chunks) & (interval <= end)
    good |= chunks >= end
    for tokens in (prompt - 1, prompt, *junctions):
        boundary = tokens // period
        start = group.first_token(boundary * period) // period
        good |= (chunks >= start) & (chunks < boundary)
    return good
