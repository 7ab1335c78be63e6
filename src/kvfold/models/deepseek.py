"""DeepSeek V2 to V3.2, Kimi-K2, Mistral Large 3 and GLM-5: MLA, some with DSA indexers.

An indexer's layer is told by `indexer_types`, or by `index_topk_freq` and
`index_skip_topk_offset` (`models/deepseek_v32/attention.py`); without either every layer owns one.
"""

from __future__ import annotations

from kvfold.models.builder import Builder
from kvfold.models.config import Config


def build(builder: Builder) -> None:
    config = builder.config
    rope = config.count("qk_rope_head_dim", minimum=0)
    sparse = config.has("index_topk") or config.has("index_head_dim")
    owners = index_owners(config) if sparse else [False] * config.layers
    for i, owns in enumerate(owners):
        builder.mla(i, rope, sparse=sparse)
        if owns:
            builder.indexer(i)


def index_owners(config: Config) -> list[bool]:
    """Return for each layer whether it owns an indexer; the others read an earlier layer's.

    Raises `ConfigError` if `indexer_types` contradicts frequency and offset.
    """
    if config.has("index_topk_pattern"):
        config.refuse("index_topk_pattern", "null: only index_topk_freq is understood")
    derived = None
    if config.has("index_topk_freq"):
        freq = config.count("index_topk_freq")
        offset = config.count("index_skip_topk_offset", 1, 0)
        derived = [max(i - offset + 1, 0) % freq == 0 for i in range(config.layers)]
    if not config.has("indexer_types"):
        return derived if derived is not None else [True] * config.layers
    types = config.choices("indexer_types", config.layers, ("full", "shared"))
    given = [kind == "full" for kind in types]
    for i, owns in enumerate(given):
        if derived is not None and owns != derived[i]:
            expected = "full" if derived[i] else "shared"
            config.refuse(
                f"indexer_types[{i}]",
                f"{expected!r}, by index_topk_freq={freq} and index_skip_topk_offset={offset}",
                types[i],
            )
    return given
