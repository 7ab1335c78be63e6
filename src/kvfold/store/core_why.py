"""What the store answers to `Why`: a request's record, and where its missing chunks are instead.

A chunk's key is its block hash XOR its namespace, so the same tokens under another namespace have
the key `key ^ namespace ^ other`. The identities go along in clear: the client compares them
(`whynot`), because the store's loop has better things to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.store.chunks import TIER_OF_STATE
from kvfold.store.messages import MAX_GROUPS, Why
from kvfold.store.records import Told

if TYPE_CHECKING:
    from kvfold.store.chunks import ChunkTable
    from kvfold.store.core import StoreCore
    from kvfold.store.tally import Tally

MAX_MATCHES = 100
# Identities in clear that a report has room for, in characters: JSON makes six bytes of the worst.
_TEXT_CHARS = 2 << 20
_SUMMARY = ("told_s", "time_s", "tokens", "local_tokens", "loaded_tokens", "outcome", "reason")


def report_why(core: StoreCore, why: Why, tally: Tally) -> dict[str, object]:
    """The report's content: `record` if exactly one request fits, `matches` of all that do."""
    records = core.records
    found = records.matching(why.request) if why.request else records.latest(why.last)
    names = {told.request for told in found}
    content: dict[str, object] = {
        "kept": len(records),
        "since_s": records.since_s(),
        "matching": len(found),
        "matches": [_summary(told) for told in found[: why.last or MAX_MATCHES]],
        "record": None,
    }
    if why.request and len(names) == 1:
        told = found[0]
        record = parsed(told)
        _add_elsewhere(core.table, record["misses"])
        left = _add_texts(told, record["misses"], _TEXT_CHARS)
        content["record"] = record
        content["namespaces"] = _namespaces(core, tally, left)
    return content


def parsed(told: Told) -> dict[str, Any]:
    """A record as the engine told it; one that is no JSON object says so."""
    try:
        record = json.loads(told.record)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        record = {"outcome": "unknown", "reason": "its record is malformed"}
    misses = record.get("misses")
    listed = misses[:MAX_GROUPS] if isinstance(misses, list) else []
    return {
        **_flat(record),
        "request": told.request,
        "engine": told.engine,
        "told_s": told.told_s,
        "misses": [_flat(miss) for miss in listed if isinstance(miss, dict)],
    }


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """Without what no record holds: anything nested."""
    return {k: v for k, v in content.items() if v is None or isinstance(v, str | int | float)}


def _summary(told: Told) -> dict[str, object]:
    record = parsed(told)
    misses = record["misses"]
    summary: dict[str, object] = {"request": told.request, "engine": told.engine}
    summary |= {name: record.get(name) for name in _SUMMARY}
    summary["miss"] = {k: misses[0].get(k) for k in ("group_name", "reason")} if misses else None
    return summary


def _digest(value: object) -> bytes | None:
    if not isinstance(value, str) or len(value) != 64:
        return None
    try:
        return bytes.fromhex(value)
    except ValueError:
        return None


def _add_elsewhere(table: ChunkTable, misses: Iterable[dict[str, Any]]) -> None:
    """Note for each miss under which other namespaces its block is stored, and in which tier."""
    others = np.frombuffer(b"".join(table.namespaces), "<u8").reshape(-1, 4)
    for miss in misses:
        miss["elsewhere"] = []
        key, mine = _digest(miss.get("key")), _digest(miss.get("namespace"))
        if key is None or mine is None or not len(others):
            continue
        block = np.frombuffer(key, "<u8") ^ np.frombuffer(mine, "<u8")
        entries = table.find(others ^ block)
        numbers = np.arange(len(others))
        right = (entries >= 0) & (table.namespace[entries] == numbers)
        tiers = TIER_OF_STATE[table.state[entries]]
        for number in np.flatnonzero(right & (tiers > 0))[:MAX_MATCHES].tolist():
            other = table.namespaces[number]
            if other != mine:
                tier = "host" if tiers[number] == 2 else "disk"
                miss["elsewhere"].append({"namespace": other.hex(), "tier": tier})


def _add_texts(told: Told, misses: Iterable[dict[str, Any]], left: int) -> int:
    """Give each miss its group's identity while there is room; return what is left."""
    for miss in misses:
        group = miss.get("group")
        text = ""
        if isinstance(group, int) and 0 <= group < len(told.texts):
            text = told.texts[group]
        miss["text"] = text if len(text) <= left else ""
        left -= len(miss["text"])
    return left


def _namespaces(core: StoreCore, tally: Tally, left: int) -> dict[str, object]:
    """Per namespace (hex) its identities in clear, whether a reset made it, and its chunks."""
    told: dict[str, object] = {}
    chunks = tally.namespace_chunks
    for namespace, known in core.namespaces.latest_first():
        texts = [] if sum(map(len, known.texts)) > left else known.texts
        left -= sum(map(len, texts))
        number = core.table.known_namespace(namespace)
        count = int(chunks[number]) if number is not None and number < len(chunks) else 0
        told[namespace.hex()] = {"texts": texts, "epoch": known.epoch, "chunks": count}
    return told
