"""kvfold's connector for vLLM: `kv_connector_module_path="kvfold.vllm"`,
`kv_connector="KvfoldConnector"`.
"""

from kvfold.vllm.translate_versions import check_version

try:
    from kvfold.vllm.connector import KvfoldConnector
except ImportError:
    check_version()  # says so if this vLLM is another than kvfold was written for
    raise

__all__ = ["KvfoldConnector"]
