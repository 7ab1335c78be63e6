"""Why chunks are missing that others have: identities of the same tokens, compared field by field.

Runs where the question was asked: the store only says what it has, and sends the identities (JSON
texts of {"fields": ..., "notes": ...}) along.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# An identity is near another if so few fields differ, those of one name counted once.
NEAR_FIELDS = 2
MAX_NEAR = 8
# Groups of one engine share block hashes: a block that another group has tells nothing.
_OTHER_LAYERS = "group.layers[0].name"
_ABSENT = "(absent)"

Difference = tuple[str, Any, Any]


def explain(report: dict[str, Any]) -> dict[str, Any]:
    """Complete what a store answered to `Why`; takes the identities out of it.

    Each miss gets `elsewhere`: where the same block is stored under another namespace, closest
    identity first, each {"namespace", "tier", "differs", "mine", "theirs", "more", "chunks"};
    `differs` is the path of the first field that differs, "epoch" if none does, None if the other
    identity is not known; `more`, how many others differ. `near` has the same for namespaces whose
    identity is nearly the asker's, without a tier, and `notes` [{"field", "mine", "theirs"}] what
    differs within the asker's own namespace: how block hashes are made.
    """
    namespaces = report.pop("namespaces", {})
    record = report.get("record")
    for miss in (record or {}).get("misses", []):
        own = namespaces.get(miss.get("namespace"), {}).get("texts", [])
        mine = _parsed(miss.pop("text", None) or (own[-1] if own else ""))
        found = [
            {**place, **told}
            for place in miss["elsewhere"]
            if (told := _compared(mine, namespaces.get(place["namespace"], {}))) is not None
        ]
        miss["elsewhere"] = sorted(found, key=_distance)
        miss["near"] = [] if found else _near(mine, miss.get("namespace"), namespaces)
        miss["notes"] = [
            {"field": path, "mine": one, "theirs": other}
            for text in own
            for path, one, other in differences(mine.get("notes"), _parsed(text).get("notes"))
        ]
    return report


def differences(mine: Any, theirs: Any, path: str = "") -> Iterator[Difference]:
    """All leaves in which two JSON values differ: (path, mine, theirs), in order of the keys."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted({*mine, *theirs}):
            here = f"{path}.{key}" if path else key
            yield from differences(mine.get(key, _ABSENT), theirs.get(key, _ABSENT), here)
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{i}]")
    elif mine != theirs or type(mine) is not type(theirs):
        yield path or "value", mine, theirs


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _compared(mine: dict[str, Any], known: dict[str, Any]) -> dict[str, Any] | None:
    """How a namespace's identity differs from mine; None if it is of other layers."""
    texts, chunks = known.get("texts", []), known.get("chunks", 0)
    if not texts or not mine:
        return {"differs": None, "mine": None, "theirs": None, "more": 0, "chunks": chunks}
    found = list(differences(mine.get("fields", mine), _fields(texts[-1])))
    if not found:
        return {"differs": "epoch", "mine": None, "theirs": None, "more": 0, "chunks": chunks}
    if any(path == _OTHER_LAYERS for path, _, _ in found):
        return None
    path, one, other = found[0]
    names = {path.rpartition(".")[2] for path, _, _ in found}
    return {
        "differs": path,
        "mine": one,
        "theirs": other,
        "more": len(names) - 1,
        "chunks": chunks,
    }


def _fields(text: str) -> Any:
    theirs = _parsed(text)
    return theirs.get("fields", theirs)


def _distance(told: dict[str, Any]) -> tuple[bool, int]:
    return told["differs"] is None, told["more"]


def _near(mine: dict[str, Any], own: object, namespaces: dict[str, Any]) -> list[dict[str, Any]]:
    compared = (
        {"namespace": name, **told}
        for name, known in namespaces.items()
        if name != own and known["chunks"] and (told := _compared(mine, known)) is not None
    )
    near = [t for t in compared if t["differs"] not in (None, "epoch") and t["more"] < NEAR_FIELDS]
    return sorted(near, key=_distance)[:MAX_NEAR]
