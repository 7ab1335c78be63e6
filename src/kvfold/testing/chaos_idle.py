"""Counts what an engine does, to see that it does nothing when nobody asks it anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

_calls: Counter[str] = Counter()


class Counting:
    """Methods for vLLM's worker (`worker_extension_cls`), which takes part in every step, also in
    those that compute nothing."""

    def calls(self) -> dict[str, int]:
        """Steps, and calls of the connector in this process, since the first call of this."""
        if not _calls:
            from kvfold.vllm.connector import KvfoldConnector

            _count("steps", type(self), "execute_model")
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
