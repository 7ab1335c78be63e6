"""What `kvfold why` prints of one request: a headline, then one line per fact."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

_LONGEST = 60

_OUTCOMES = {
    "failed": "the load failed",
    "late": "the store answered too late",
    "skipped": "the store was not asked",
    "no store": "no store was there",
    "disabled": "kvfold is switched off in this engine",
}


def lines(record: dict[str, Any]) -> list[str]:
    """The whole answer, a line each."""
    misses = record["misses"]
    told = [_headline(record, misses[0] if misses else None)]
    told += [f"  also missed: {_miss(miss)}" for miss in misses[1:]]
    told += _offers(record)
    for miss in misses:
        told += [f"  {line}" for line in _elsewhere(miss)]
    when = record.get("time_s") or record["told_s"]
    at = datetime.fromtimestamp(when).isoformat(" ", "seconds")
    told.append(f"  engine {record['engine']}, {at}")
    if record.get("epoch"):
        told.append("  after a reset of the cache: what was stored before cannot be served")
    return [plain(line) for line in dict.fromkeys(told)]


def hit(record: dict[str, Any]) -> tuple[str, str]:
    """A request's tokens, and how many of them came from the store, for a table."""
    return _count(record.get("tokens")), _count(record.get("loaded_tokens"))


def plain(text: str) -> str:
    """Without what a terminal would take for more than text: ids come from anybody."""
    return "".join(c if c.isprintable() else "?" for c in text)


def short(value: object) -> str:
    """A value in one short line."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = plain(" ".join(text.split()))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _count(value: object) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if whole else "?"


def _headline(record: dict[str, Any], miss: dict[str, Any] | None) -> str:
    tokens, loaded = hit(record)
    if loaded in ("0", "?"):
        came = f"none of {tokens} tokens came from the store"
    elif loaded == tokens:
        came = f"all of {tokens} tokens came from the store"
    else:
        came = f"{loaded} of {tokens} tokens came from the store"
    local = record.get("local_tokens")
    if local:
        came += f", {_count(local)} from the engine's own cache"
    text = f"request {record['request']}: {came}"
    outcome = record.get("outcome")
    if outcome in _OUTCOMES:
        text += f"; {_OUTCOMES[outcome]}"
    if miss is not None:
        text += f"; the next chunk missed: {_miss(miss)}"
    elif record.get("reason"):
        text += f": {record['reason']}"
    return text


def _miss(miss: dict[str, Any]) -> str:
    """One missing chunk: where it is, and why it was not there."""
    name = miss.get("group_name")
    group = f"group {miss.get('group')}" + (f" ({name})" if name else "")
    span = f"tokens {_count(miss.get('first_token'))} to {_count(miss.get('last_token'))}"
    return f"{group}, chunk {_count(miss.get('chunk'))} ({span}): {miss.get('reason')}"


def _offers(record: dict[str, Any]) -> list[str]:
    found, offered = record.get("found_tokens"), record.get("offered_tokens")
    loaded, local = record.get("loaded_tokens"), record.get("local_tokens") or 0
    told = []
    as_found = isinstance(offered, int) and found in (offered, offered + local)
    if offered != loaded or not as_found:
        told.append(
            f"  the store could serve {_count(found)} tokens; {_count(offered)} were offered to "
            f"the scheduler, {_count(loaded)} loaded"
        )
    misses = record["misses"]
    if record.get("reason") and misses and record["reason"] != misses[0].get("reason"):
        told.append(f"  {record['reason']}")
    return told


def _elsewhere(miss: dict[str, Any]) -> list[str]:
    told = []
    for place in miss["elsewhere"]:
        where = f"({'in host memory' if place['tier'] == 'host' else 'on disk'})"
        if place["differs"] == "epoch":
            told.append(
                f"the same tokens are stored {where} under the same identity in another epoch: "
                "before or after a reset of the cache"
            )
        elif place["differs"] is None:
            told.append(
                f"the same tokens are stored {where} under another identity, "
                f"{place['namespace'][:16]}, whose fields this store was not told"
            )
        else:
            told.append(
                f"the same tokens are stored {where} under another identity: {_differs(place)}"
            )
    for place in miss["near"]:
        told.append(
            f"nearly the same identity has {_count(place['chunks'])} chunks: {_differs(place)}"
        )
    for note in miss["notes"]:
        told.append(
            "the same identity is also used with other block hashes: "
            f"{note['field']} is {short(note['mine'])} here, {short(note['theirs'])} there"
        )
    return told


def _differs(place: dict[str, Any]) -> str:
    text = f"{place['differs']} differs ({short(place['mine'])} here, "
    text += f"{short(place['theirs'])} there)"
    if place["more"]:
        text += f", and {place['more']} more field" + ("s" if place["more"] > 1 else "")
    return text
