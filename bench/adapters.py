"""Rows for benchmark modules that return plain figures, so that they get names, units and aims."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

Row = Callable[[], dict[str, Any] | list[dict[str, Any]]]


def rows(module: ModuleType) -> list[Row]:
    """The module's `ROWS`, or else the rows that are known for a module of its name."""
    own: list[Row] | None = getattr(module, "ROWS", None)
    return own if own is not None else _ADAPTED[module.__name__](module)


def _index(module: ModuleType) -> list[Row]:
    def lookups() -> list[dict[str, Any]]:
        found = module.lookups()
        return [
            {
                "name": f"lookups, all {which}, 1,000,000 keys, random order",
                "value": found[f"{which}_keys_per_s"] / 1e6,
                "unit": "M keys/s",
                "aim": 2 if which == "present" else None,
                "better": "higher",
                "detail": f"worst batch of {module.LOOKUP_BATCH}: "
                f"{found[f'{which}_worst_batch_ms']:.1f} ms",
            }
            for which in ("present", "absent")
        ]

    def evicting_calls() -> dict[str, Any]:
        found = module.evicting_calls()
        return {
            "name": f"worst of {module.CALLS:,} evicting calls of {module.CHUNKS} chunks",
            "value": found["worst_ms"],
            "unit": "ms",
            "aim": 5,
            "better": "lower",
            "detail": f"{found['worst_thread_ms']:.2f} ms of its own thread; "
            f"median {found['median_ms']:.2f} ms",
        }

    return [lookups, evicting_calls]


_ADAPTED: dict[str, Callable[[ModuleType], list[Row]]] = {"bench_index": _index}
