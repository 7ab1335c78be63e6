"""The connector of a virtual engine: kvfold's own, with a scheduler side that is handed to it.

vLLM imports this module by its path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvfold.vllm.connector import KvfoldConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class VirtualConnector(KvfoldConnector):
    """Delegates as the real one does; without a side it stores and offers nothing."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.asked: dict[str, bool] = {}
        """Requests that were asked for since the last step, and whether they must ask again."""
        self.accepted: dict[str, tuple[int, int]] = {}
        """Tokens of the engine's own hit and of the last load of each request."""
        self._local: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Delegate, and keep who has to wait."""
        tokens, loads = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.asked[request.request_id] = tokens is None
        self._local[request.request_id] = num_computed_tokens
        return tokens, loads

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Delegate, and keep what was accepted."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            local = self._local[request.request_id]
            self.accepted[request.request_id] = (local, num_external_tokens)
