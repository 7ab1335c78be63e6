"""Wait for the last stores of an engine that runs inside the caller's process."""

from __future__ import annotations

from typing import Any

from kvfold.errors import KvfoldError


class NotDrained(KvfoldError):
    """An engine still held blocks for copies when time ran out, or has no kvfold connector."""


def drain(llm: Any, timeout_s: float = 30.0) -> None:
    """Return when no store job of an in-process `vllm.LLM` holds blocks any more.

    Nobody steps such an engine between calls, so what its last step ordered would wait for the next
    request. Afterwards `reset_prefix_cache` succeeds. Raises `NotDrained`.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    connector = None if core is None else core.scheduler.connector
    if connector is None or not hasattr(connector, "drain"):
        raise NotDrained("drain works for an engine in this process with the kvfold connector")
    if not connector.drain(timeout_s):
        raise NotDrained(f"store jobs still hold blocks after {timeout_s:g} s")
