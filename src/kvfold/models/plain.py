"""Llama, Qwen3, Mistral and MiniMax-M2: one kind of grouped-query attention in every layer."""

from __future__ import annotations

from kvfold.models.builder import Builder


def build(builder: Builder) -> None:
    config = builder.config
    if config.values.get("use_sliding_window") or (
        config.has("sliding_window") and "use_sliding_window" not in config.values
    ):
        config.refuse("sliding_window", "null: windows are not known for this architecture")
    for i in range(config.layers):
        builder.attention(i)
