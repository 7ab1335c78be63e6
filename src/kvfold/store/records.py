"""What engines told of their requests, for `kvfold why`: the latest ones, in memory only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvfold.store.messages import MAX_RECORDS


class Told(NamedTuple):
    """One request's record (JSON, not yet looked at), and the identities of its engine's groups.

    `told_s` is unix time.
    """

    engine: str
    request: str
    record: bytes
    texts: Sequence[str]
    told_s: float


class RecordBook:
    """The latest `MAX_RECORDS` records; of an engine's request the last one told."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], Told] = OrderedDict()

    def __len__(self) -> int:
        return len(self._told)

    def tell(self, engine: str, request: str, record: bytes, texts: Sequence[str]) -> None:
        key = engine, request
        self._told.pop(key, None)
        self._told[key] = Told(engine, request, record, texts, time.time())
        while len(self._told) > MAX_RECORDS:
            self._told.popitem(last=False)

    def since_s(self) -> float | None:
        """Unix time of the oldest record that is kept."""
        return next((told.told_s for told in self._told.values()), None)

    def latest(self, count: int) -> list[Told]:
        """The latest records, newest first."""
        newest = reversed(self._told.values())
        return [told for told, _ in zip(newest, range(count), strict=False)]

    def matching(self, wanted: str) -> list[Told]:
        """Records of the request of that name, else of those that contain it; newest first.

        A name that begins with `wanted` is a better match than one that merely contains it.
        """
        newest = list(reversed(self._told.values()))
        for fits in (
            lambda name: name == wanted,
            lambda name: name.startswith(wanted),
            lambda name: wanted in name,
        ):
            if found := [told for told in newest if fits(told.request)]:
                return found
        return []
