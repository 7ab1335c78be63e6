"""The demo's second part: which bytes are stored at TP2, and that every rank gets its own back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.testing.checkpoints import prompt
from kvfold.testing.demo_measure import (
    PATIENT,
    Bytes,
    Difference,
    Stores,
    compare_bytes,
    difference,
    read_digests,
    serves,
)
from kvfold.testing.demo_show import Progress
from kvfold.testing.engines import Engine

TP = 2
PROMPT_TOKENS = 6 * 128 + 40
ANSWER_TOKENS = 8
_FLOAT32 = 4


@dataclass(frozen=True)
class Case:
    """One checkpoint of the second part."""

    name: str
    model: Path
    span: int
    """Tokens per block of the engine."""
    folds: bool
    """Whether both ranks hold the same bytes."""

    @property
    def hit_tokens(self) -> int:
        """What a second request loads: whole blocks, but never the last token."""
        return (PROMPT_TOKENS - 1) // self.span * self.span

    @property
    def rank_token_bytes(self) -> int:
        """Bytes of one token on one rank, from the checkpoint's config alone."""
        config = json.loads((self.model / "config.json").read_text())
        layers = config["num_hidden_layers"]
        if "kv_lora_rank" in config:
            return int(layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * _FLOAT32)
        heads = max(1, config["num_key_value_heads"] // TP)
        return int(layers * 2 * heads * config["head_dim"] * _FLOAT32)

    @property
    def copies_bytes(self) -> int:
        """What storing every rank's bytes would take."""
        return self.hit_tokens * self.rank_token_bytes * TP

    @property
    def distinct_bytes(self) -> int:
        """What must be stored: every distinct byte once."""
        return self.copies_bytes // (TP if self.folds else 1)


@dataclass(frozen=True)
class Folded:
    """What one checkpoint showed."""

    case: Case
    loaded_tokens: int
    loaded_from: dict[str, int]
    stored_bytes: int
    stored_chunks: int
    disk_bytes: int
    """Payload on disk when the second engine asked."""
    answer: Difference | None
    bytes: Bytes


def run_case(case: Case, work: Path, progress: Progress) -> Folded:
    """Store with one engine, load with another after both engine and store were restarted."""
    stores = Stores(work / "run")
    digests = work / "digests"
    connector = {
        "host": "64MiB",
        "disk": "128MiB",
        "disk_path": str(work / "disk"),
        "runtime_dir": str(stores.runtime),
        "digest_dir": str(digests),
        **PATIENT,
    }
    ids = prompt(PROMPT_TOKENS, seed=1)
    chunks = case.hit_tokens // case.span
    try:
        with progress.step(f"{case.name}: cold"):
            with _engine(case, connector, work) as engine:
                cold = _ask(engine, ids)["outputs"][0]
                stored = stores.wait(
                    f"{chunks} chunks are stored",
                    lambda status: status["host"]["chunks"] >= chunks and not status["jobs_open"],
                )
            stores.stop()
        with progress.step(f"{case.name}: engine and store restarted"):
            with _engine(case, connector, work) as engine:
                found = stores.wait("the disk is scanned", serves(1 + TP))
                warm = _ask(engine, ids)
            stores.stop()
    finally:
        stores.stop(drain=False)
    counted = warm["counters"]
    return Folded(
        case=case,
        loaded_tokens=counted.get("external_prefix_cache_hits", 0),
        loaded_from={
            tier: counted.get(f"prompt_tokens_cached_by_source/{tier}", 0)
            for tier in ("host", "disk")
        },
        stored_bytes=stored["host"]["payload_bytes"],
        stored_chunks=stored["host"]["chunks"],
        disk_bytes=found["disk"]["payload_bytes"],
        answer=difference(0, cold, warm["outputs"][0]),
        bytes=compare_bytes(read_digests(digests), TP),
    )


def _engine(case: Case, connector: dict[str, Any], work: Path) -> Engine:
    return Engine(
        case.model,
        log=work / "engine.log",
        tp=TP,
        connector=connector,
        # The scheduler in the front end's process: one process less to import, to wait and to spin.
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        start_timeout_s=300,
    )


def _ask(engine: Engine, ids: list[int]) -> dict[str, Any]:
    """Ask after an unrelated warm-up that is too short to leave a block."""
    engine.generate([prompt(8, seed=7)], max_tokens=4, logprobs=2)
    return engine.generate([ids], max_tokens=ANSWER_TOKENS, logprobs=2)
