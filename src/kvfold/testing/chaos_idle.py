"""Counts what an engine does, to see that it does nothing when nobody asks it anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

_calls: Counter[str] = Counter()


class Counting:
    """Methods for vLLM's worker (`worker_extension_cls`), which in a TP1 engine shares the process
    of the engine's core."""

    def calls(self) -> dict[str, int]:
        """Scheduler steps and calls of the connector for each, since the first call of this."""
        if not _calls:
            from vllm.v1.core.sched.scheduler import Scheduler

            from kvfold.vllm.connector import KvfoldConnector

            _count("steps", Scheduler, "schedule")
            for name in ("build_connector_meta", "update_connector_output", "start_load_kv"):
                _count("connector", KvfoldConnector, name)
        return dict(_calls)


def _count(label: str, owner: type, name: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    _calls[label] += 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[label] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)
