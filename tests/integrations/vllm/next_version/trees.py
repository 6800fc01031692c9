"""Small trees of source in the place of vLLM's, for tests."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from tests.integrations.vllm.next_version.source import Source

METADATA = "../PKG-INFO"
FILES = {
    METADATA: "Requires-Python: >=3.11\nRequires-Dist: torch==1.0; extra\nRequires-Dist: numpy\n",
    "_version.py": '__version__ = version = "1.0"',
    "distributed/kv_transfer/kv_connector/v1/base.py": """
        class KVConnectorBase_V1(ABC):
            @abstractmethod
            def start_load_kv(self, forward_context: "ForwardContext", **kwargs) -> None:
                \"\"\"Start the load. It must not block.\"\"\"

            def wait_for_save(self) -> None:
                \"\"\"Wait.\"\"\"
                return

            def get_finished_count(self):
                return None
    """,
    "v1/worker/runner.py": """
        class Runner:
            def step(self):
                self.kv_connector.start_load_kv(None)
                if self.finish:
                    self.kv_connector.wait_for_save()
    """,
    "v1/kv_cache_interface.py": """
        class KVQuantMode(IntEnum):
            NONE = 0
            FP8_PER_TENSOR = 1

        @dataclass
        class KVCacheSpec:
            block_size: int

        class FullAttentionSpec(KVCacheSpec):
            head_size: int = 64
    """,
    "v1/attention/backends/registry.py": """
        class AttentionBackendEnum(Enum):
            FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    """,
    "v1/attention/backends/flash_attn.py": """
        class FlashAttentionBackend(AttentionBackend):
            @staticmethod
            def get_name():
                return "FLASH_ATTN"

        class FlashAttentionImpl:
            def do_kv_cache_update(self, key, value, kv_cache):
                kv_cache.copy_(key)

            def forward(self, query):
                return query
    """,
    "config/cache.py": 'CacheDType = Literal["auto", "fp8"]',
    "distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py": """
        def finished(self, request, params):
            if params.get("do_remote_prefill"):
                host = params["remote_host"]
            return dict(remote_block_ids=[], remote_host=self.host)
    """,
    "distributed/kv_transfer/kv_connector/factory.py": """
        KVConnectorFactory.register_connector("NixlConnector", "vllm.nixl", "NixlConnector")
    """,
    "model_executor/layers/attention/attention.py": "class Attention(Base): pass",
    "model_executor/models/registry.py": """
        _TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}
    """,
    "model_executor/models/llama.py": "layer = Attention(1)",
    "v1/request.py": "class Request:\n    num_prompt_tokens: int\n    other = 1\n",
    "platforms/xpu.py": "class XPUPlatform:\n    def swap_out_blocks_to_host(cls): 1\n",
}
"""A vLLM with one of everything."""


def tree(folder: Path, changes: Mapping[str, str | None] | None = None) -> Source:
    """Write a tree like a source distribution's."""
    root = folder / "vllm"
    for path, text in {**FILES, **(changes or {})}.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(textwrap.dedent(text), encoding="utf-8")
    return Source(root)
