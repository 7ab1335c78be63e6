"""Gemma 3 and 4: most layers see a window, some everything; Gemma 4's layers differ in heads."""

from __future__ import annotations

from kvfold.models.builder import Builder

_GEMMA3_PATTERN = 6
_WINDOW, _FULL = "sliding_attention", "full_attention"


def build(builder: Builder) -> None:
    config = builder.config
    if config.count("num_kv_shared_layers", 0, 0):
        config.refuse("num_kv_shared_layers", "0: layers that share a cache are not known")
    window = config.count("sliding_window")
    own_global = config.has("num_global_key_value_heads")
    for i, kind in enumerate(_layer_types(builder)):
        if kind == _WINDOW:
            builder.attention(i, window=window, group="window")
        elif own_global:
            dim = config.count("global_head_dim")
            builder.attention(i, "num_global_key_value_heads", dim)
        else:
            builder.attention(i)


def _layer_types(builder: Builder) -> list[str]:
    """Return each layer's kind, from layer_types or sliding_window_pattern; refuse both if they
    disagree.
    """
    config = builder.config
    derived = None
    # Published Gemma 3 configs say neither: then the pattern is the class's default.
    given = config.has("sliding_window_pattern") or config.has("layer_types")
    default = None if given or config.has("global_head_dim") else _GEMMA3_PATTERN
    if config.has("sliding_window_pattern") or default:
        period = config.count("sliding_window_pattern", default)
        derived = [_WINDOW if (i + 1) % period else _FULL for i in range(config.layers)]
    if not config.has("layer_types"):
        if derived is None:
            config.refuse("layer_types", f"a list of {_WINDOW!r} and {_FULL!r}")
        return derived
    kinds = config.choices("layer_types", config.layers, (_WINDOW, _FULL))
    for i, kind in enumerate(kinds):
        if derived is not None and kind != derived[i]:
            config.refuse(f"layer_types[{i}]", f"{derived[i]!r}, by sliding_window_pattern", kind)
    return kinds
