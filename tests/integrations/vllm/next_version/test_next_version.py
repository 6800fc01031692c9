"""Each kind of difference between two trees of source is found, and said with its verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integrations.vllm.next_version import __main__ as command
from tests.integrations.vllm.next_version import caches, names
from tests.integrations.vllm.next_version.comparison import Finding, Section, findings, page
from tests.integrations.vllm.next_version.hooks import hook_verdict
from tests.integrations.vllm.next_version.source import Source
from tests.integrations.vllm.next_version.verdicts import VERDICTS

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
RUNNER = "v1/worker/runner.py"
MACHINERY = "distributed/kv_transfer/kv_connector/utils.py"
SPECS = "v1/kv_cache_interface.py"
FLASH = "v1/attention/backends/flash_attn.py"
TICKETS = "distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py"

START = "self.kv_connector.start_load_kv(None)"
HOOK = "            def wait_for_save(self) -> None:"
NEW_HOOK = (
    f'            def slept(self, level: int = 1):\n                """Sleep. Well."""\n\n{HOOK}'
)
BACKEND = """
    class Backend(AttentionBackend):
        @staticmethod
        def get_name():
            return "FLASHINFER"
"""
MORE_SPECS = """            head_size: int = 64
            width: int = 0

        class TheirSpec(KVCacheSpec): pass
"""


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
    "v1/request.py": "class Request:\n    num_prompt_tokens: int\n    other = 1\n",
    "platforms/xpu.py": "class XPUPlatform:\n    def swap_out_blocks_to_host(cls): 1\n",
}
"""A vLLM with one of everything."""


def tree(folder: Path, changes: Mapping[str, str] | None = None) -> Source:
    """Write a tree like a source distribution's."""
    root = folder / "vllm"
    for path, text in {**FILES, **(changes or {})}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(textwrap.dedent(text), encoding="utf-8")
    return Source(root)


@pytest.fixture
def old(tmp_path: Path) -> Source:
    return tree(tmp_path / "old")


def differences(old: Source, new: Source) -> list[str]:
    return [
        f"{section.title}: {each.name}: {each.change}"
        for section in command.SECTIONS
        for each in findings(section, old, new, {})
    ]


BASE_CLASS = "Hooks of the connector: KVConnectorBase_V1"
STEP = f"Calls of hooks: {RUNNER}: Runner.step"


@pytest.mark.parametrize(
    ("path", "text", "by", "expected"),
    [
        (BASE, HOOK, NEW_HOOK, [f"{BASE_CLASS}.slept: new: `(self, level=1)`"]),
        (
            BASE,
            "def wait_for_save(self)",
            "def wait_for_save(self, req: str)",
            [f"{BASE_CLASS}.wait_for_save: changed: `(self)` became `(self, req)`"],
        ),
        (
            RUNNER,
            "if self.finish:",
            "if self.late:",
            [
                f"{STEP}: changed: `if self.finish: wait_for_save` became "
                "`if self.late: wait_for_save`"
            ],
        ),
        (
            RUNNER,
            FILES[RUNNER],
            FILES[RUNNER].replace(f"{START}\n" + 16 * " ", "") + f"            {START}\n",
            [f"{STEP}: changed: the order is `if self.finish: wait_for_save`, `start_load_kv`"],
        ),
        (RUNNER, START, f"{START}; self.ec_connector.wait_for_save()", []),
        (
            MACHINERY,
            "",
            "class Aggregator:\n    def merge(self): return 1\n",
            [f"What drives connectors: {MACHINERY}: Aggregator.merge: new"],
        ),
        (
            SPECS,
            "            head_size: int = 64\n",
            MORE_SPECS,
            [
                "Specs of caches: FullAttentionSpec.width: new: `int = 0`",
                "Specs of caches: TheirSpec: new: `class TheirSpec(KVCacheSpec)`",
            ],
        ),
        (
            "v1/attention/backends/more.py",
            "",
            BACKEND,
            ["Attention backends: FLASHINFER: new: `more.Backend`, `orders any`"],
        ),
        (
            FLASH,
            "kv_cache.copy_(key)",
            "kv_cache.copy_(value)",
            [
                f"Functions that fill pages: {FLASH}: changed: "
                "`FlashAttentionImpl.do_kv_cache_update "
            ],
        ),
        (FLASH, "return query", "return 2 * query", []),
        ("../csrc/cache.cu", "", "int* slot_mapping", ["Kernels in C++: csrc/cache.cu: new"]),
        ("../csrc/gemm.cu", "", "void gemm();", []),
        (
            "config/cache.py",
            '"fp8"',
            '"fp8", "fp4"',
            ["Quantised formats, orders and other values: CacheDType 'fp4': new: `'fp4'`"],
        ),
        (
            TICKETS,
            "remote_block_ids=[]",
            "remote_block_ids=[], more=1",
            ["Keys of tickets: more: new: `NixlConnector`"],
        ),
        (
            names.FACTORY,
            "NixlConnector",
            "Other",
            ["Connectors: NixlConnector: gone: `vllm.nixl`", "Connectors: Other: new: `vllm.nixl`"],
        ),
        (
            SPECS,
            "        class KVQuantMode",
            "        def iter_layer_specs(spec): 1\n\n        class KVQuantMode",
            [
                "Names that kvferry imports: vllm.v1.kv_cache_interface.iter_layer_specs: "
                "new: `iter_layer_specs(spec)`"
            ],
        ),
        (
            "v1/request.py",
            "    num_prompt_tokens: int\n",
            "",
            ["Attributes that kvferry uses: num_prompt_tokens: gone"],
        ),
    ],
)
def test_differences(
    old: Source, tmp_path: Path, path: str, text: str, by: str, expected: list[str]
) -> None:
    """What is expected of a change is how its line begins."""
    before = FILES.get(path, "")
    assert text in before
    new = tree(tmp_path / "new", {path: before.replace(text, by) if text else by})
    found = differences(old, new)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (hook_verdict("SupportsHMA.theirs", None, "()"), ""),
        (hook_verdict("SupportsHMA.theirs", "()", None), "not used"),
        (hook_verdict("SupportsHMA.theirs", "()\nreturn 1", "()\nreturn 2"), ""),
        (hook_verdict("SupportsHMA.shutdown", None, "()"), "`KVFerryConnector` defines it"),
        (hook_verdict("SupportsHMA.request_finished", "()", None), ""),
        (
            hook_verdict("SupportsHMA.request_finished", "()\nreturn 1", "()\nreturn 2"),
            "`KVFerryConnector` does not use the default",
        ),
        (hook_verdict("SupportsHMA.request_finished", "()", "(a)"), ""),
        (caches.backend_verdict("FLASHINFER", None, "a class"), "`halves`"),
        (caches.backend_verdict("GDN_ATTN", None, "a class"), "`delta`"),
        (caches.backend_verdict("SOMEBODYS", None, "a class"), ""),
        (caches.backend_verdict("FLASH_ATTN", "another class", "a class"), ""),
    ],
)
def test_what_follows_from_our_own_code(found: str, verdict: str) -> None:
    assert found == verdict


def test_verdicts_of_maintainers(old: Source, tmp_path: Path) -> None:
    """They stand beside differences of which our tables say nothing."""
    assert set(VERDICTS) <= {section.title for section in command.SECTIONS}
    facts = {old: {"a": "1", "b": "1"}}
    section = Section(
        title="Some",
        look="there.",
        facts=lambda source: facts.get(source, {}),
        verdict=lambda name, was, now: "fine" if name == "b" else "",
    )
    new = Source(tmp_path)
    found = findings(section, old, new, {"a": "read", "b": "no"})
    assert [(each.name, each.verdict) for each in found] == [("a", "read"), ("b", "fine")]


def test_the_page(
    old: Source,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some, others = (
        Section(title=title, look="there.", facts=lambda source: {}) for title in ("Some", "Others")
    )
    found = [
        Finding(name="a", change="`b | c`", verdict=""),
        Finding(name="d", change="new", verdict="e"),
    ]
    lines = page({some: found, others: []}, "1.0 beside 0.9").splitlines()
    assert lines[0].startswith("vLLM 1.0 beside 0.9: 2 differences, of which 1 have no verdict yet")
    assert "| `a` | `b \\| c` | **look** |" in lines
    assert "| `d` | new | e |" in lines
    assert lines[-1] == "No difference."
    monkeypatch.setattr(command, "VERDICTS", {"Connectors": {"gone": "read"}})
    versions = [str(tree(tmp_path / name).root) for name in ("old", "new")]
    assert command.main(["--base", *versions]) == 0
    said = capsys.readouterr().out
    assert "vLLM 1.0 beside 1.0: 0 differences" in said
    assert said.endswith("verdicts.py has an entry that nothing needs: gone\n")
