"""kvfold's connector for vLLM: `kv_connector_module_path="kvfold.vllm"`,
`kv_connector="KvfoldConnector"`.
"""

from kvfold.vllm.connector import KvfoldConnector

__all__ = ["KvfoldConnector"]
