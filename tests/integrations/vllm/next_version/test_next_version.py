"""The command finds each kind of difference between two trees of source, and says its verdict."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.integrations.vllm.next_version import __main__ as command
from tests.integrations.vllm.next_version import names
from tests.integrations.vllm.next_version.verdicts import VERDICTS

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
RUNNER = "v1/worker/runner.py"
SPECS = "v1/kv_cache_interface.py"
FLASH = "v1/attention/backends/flash_attn.py"
TICKETS = "distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py"

FILES = {
    "_version.py": '__version__ = version = "1.0"',
    BASE: """
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
    RUNNER: """
        class Runner:
            def step(self):
                self.kv_connector.start_load_kv(None)
                if self.finish:
                    self.kv_connector.wait_for_save()
    """,
    SPECS: """
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
    FLASH: """
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
    TICKETS: """
        def finished(self, request, params):
            if params.get("do_remote_prefill"):
                host = params["remote_host"]
            return dict(remote_block_ids=[], remote_host=self.host)
    """,
    names.FACTORY: """
        KVConnectorFactory.register_connector("NixlConnector", "vllm.nixl", "NixlConnector")
    """,
}
"""A vLLM with one of everything."""

HOOK = "            def wait_for_save(self) -> None:"
REPLACED = [
    (BASE, HOOK, f"            def slept(self, level: int = 1):\n                pass\n\n{HOOK}"),
    (BASE, "def wait_for_save(self) -> None", "def wait_for_save(self, req: str) -> int"),
    (BASE, "return None", "return 1"),
    (RUNNER, "if self.finish:", "if self.late:"),
    (RUNNER, "start_load_kv(None)", "start_load_kv(None); self.ec_connector.wait_for_save()"),
    (SPECS, "head_size: int = 64\n", "head_size: int = 64\n            width: int = 0\n"),
    (SPECS, "class KVQuantMode", "def iter_layer_specs(s): 1\n\n        class KVQuantMode"),
    (FLASH, "kv_cache.copy_(key)", "kv_cache.copy_(value)"),
    (FLASH, "return query", "return 2 * query"),
    ("config/cache.py", '"fp8"', '"fp8", "fp4"'),
    (TICKETS, "remote_block_ids=[]", "remote_block_ids=[], more=1"),
    (names.FACTORY, "NixlConnector", "Other"),
]
ADDED = {
    "distributed/kv_transfer/kv_connector/utils.py": "class Merger:\n    def merge(self): return 1",
    "v1/attention/backends/more.py": """
        class Backend(AttentionBackend):
            @staticmethod
            def get_name():
                return "FLASHINFER"
    """,
    "../csrc/cache.cu": "int* slot_mapping",
    "../csrc/gemm.cu": "void gemm();",
    "v1/engine/core.py": 'a = kv_transfer_params.get("b"); c = params.get("d")',
}
FOUND = """
Hooks of the connector
| `KVConnectorBase_V1.get_finished_count` | changed: `return None` became `return 1` | **look** |
| `KVConnectorBase_V1.slept` | new: `(self, level=1)`, `pass` | **look** |
| `KVConnectorBase_V1.wait_for_save` | changed: `(self)` became `(self, req)` | **look** |
Calls of hooks
| `v1/worker/runner.py: Runner.step` | changed: `if self.finish: wait_for_save` became
What drives connectors
| `distributed/kv_transfer/kv_connector/utils.py: Merger.merge` | new | **look** |
Specs of caches
| `FullAttentionSpec.width` | new: `int = 0` | **look** |
Attention backends
| `FLASHINFER` | new: `more.Backend`, `orders any` | `halves` |
Functions that fill pages
| `v1/attention/backends/flash_attn.py` | changed: `FlashAttentionImpl.do_kv_cache_update
Kernels in C++
| `csrc/cache.cu` | new | **look** |
Quantised formats, orders and other values
| `CacheDType 'fp4'` | new: `'fp4'` | **look** |
Keys of tickets
| `b` | new: `v1/engine/core.py` | **look** |
| `more` | new: `NixlConnector` | **look** |
Connectors
| `NixlConnector` | gone: `vllm.nixl` | in `TICKET_CONNECTORS` |
| `Other` | new: `vllm.nixl` | read |
Names that kvferry imports
| `vllm.v1.kv_cache_interface.iter_layer_specs` | new: `iter_layer_specs(s)` | **look** |
verdicts.py has an entry that nothing needs: gone
""".strip().splitlines()
"""How the lines of the page begin."""


def tree(root: Path, *, changed: bool) -> str:
    """Write a tree like a source distribution's; return its path."""
    files = FILES | (ADDED if changed else {})
    for path, text, by in REPLACED if changed else []:
        assert text in files[path]
        files[path] = files[path].replace(text, by)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(textwrap.dedent(text), encoding="utf-8")
    return str(root)


def test_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "VERDICTS", {"Connectors": {"Other": "read", "gone": "read"}})
    old, new = (tree(tmp_path / name / "vllm", changed=name == "new") for name in ("old", "new"))
    assert command.main(["--base", old, new]) == 0
    first, *lines = capsys.readouterr().out.replace("### ", "").splitlines()
    assert first.startswith("vLLM 1.0 beside 1.0: 15 differences, of which 12 have no verdict yet")
    titles = {section.title for section in command.SECTIONS}
    said = [line for line in lines if line in titles or line.startswith(("| `", "verdicts.py"))]
    assert all(line.startswith(begin) for line, begin in zip(said, FOUND, strict=True))
    assert command.main(["--base", old, old]) == 0
    assert "vLLM 1.0 beside 1.0: 0 differences" in capsys.readouterr().out


def test_maintainers_verdicts_are_of_sections() -> None:
    assert set(VERDICTS) <= {section.title for section in command.SECTIONS}
