"""Models with every kind of cache that this CPU runs, and what a hit loads of each.

All numbers of tokens and chunks are worked out from the rule of a hit, not taken from the code:
with 1,440 tokens and boundaries every 128, a resent prompt is loaded up to 1,408; of full attention
that needs all 11 chunks, of a window of 200 tokens two, of a state one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvfold.testing import checkpoints as models
from kvfold.testing.checkpoints import prompt

FULL = os.environ.get("KVFOLD_TEST_FULL") == "1"
PROMPT = prompt(1440, seed=1)
SAME = 1e-4
"""Logprobs differ by less, however many tokens a step computes: in float32, and as it happens also
for Qwen3-Next, which computes in bfloat16.
"""


@dataclass(frozen=True)
class Kind:
    """A model, its stored groups by label, and what a resent `PROMPT` loads: tokens, and chunks of
    each group. `restart`: the one of the two restarts that is tried in short runs.
    """

    make: Callable[[Path], Path]
    groups: dict[str, int]
    hit: int
    restart: Literal["engine", "store"]


KINDS = {
    "gemma3": Kind(
        models.gemma3,
        {"0 sliding_window": 1, "1 sliding_window": 1, "2 full_attention": 11},
        1408,
        "engine",
    ),
    "gpt_oss": Kind(models.gpt_oss, {"0 sliding_window": 2, "1 full_attention": 11}, 1408, "store"),
    "llama4": Kind(models.llama4, {"0 chunked_local": 1, "1 full_attention": 11}, 1408, "engine"),
    "qwen3_next": Kind(
        models.qwen3_next,
        {"0 gdn": 1, "1 gdn": 1, "2 gdn": 1, "3 full_attention": 11},
        1408,
        "store",
    ),
    "granite4": Kind(
        models.granite4,
        {"0 mamba2": 1, "1 mamba2": 1, "2 mamba2": 1, "3 full_attention": 11},
        1408,
        "engine",
    ),
    "mamba2": Kind(models.mamba2, {"0 mamba2": 1}, 1424, "store"),
    "deepseek_mla": Kind(models.deepseek_mla, {"0 mla": 89}, 1424, "store"),
    "deepseek_v3_mtp": Kind(
        models.deepseek_v3_mtp, {"0 mla": 89, "0 mla draft": 89}, 1424, "engine"
    ),
    "llama_eagle": Kind(
        models.llama_eagle, {"0 full_attention": 11, "0 full_attention draft": 11}, 1408, "store"
    ),
}
