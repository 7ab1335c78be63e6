"""A connector that believes every layer to have one KV head: the lie that an audit must catch."""

from kvfold.vllm import KvfoldConnector, translate_layers

translate_layers.total_heads = lambda config, layer, draft: 1


class LyingConnector(KvfoldConnector):
    """Claims replicas where ranks hold different heads."""
