"""gpt-oss: windows and full attention in turn. The engine never replicates its KV heads:
`num_key_value_heads // tp` has no floor (`models/gpt_oss.py`), so tp is at most their number.
"""

from __future__ import annotations

from kvfold.errors import PlanError
from kvfold.models.builder import Builder


def build(builder: Builder) -> None:
    config, tp = builder.config, builder.mesh.tp
    heads = config.count("num_key_value_heads")
    if tp > heads:
        raise PlanError(
            "tp", tp, f"at most num_key_value_heads={heads}: gpt-oss does not replicate KV heads"
        )
    allowed = ("sliding_attention", "full_attention")
    for i, kind in enumerate(config.choices("layer_types", config.layers, allowed)):
        if kind == "full_attention":
            builder.attention(i)
        else:
            builder.attention(i, window=config.count("sliding_window"), group="window")
