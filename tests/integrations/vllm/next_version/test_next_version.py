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


@pytest.fixture
def old(tmp_path: Path) -> Source:
    return tree(tmp_path / "old")


def replaced(path: str, text: str, by: str) -> dict[str, str]:
    """A file in which a text was replaced."""
    assert text in FILES[path]
    return {path: FILES[path].replace(text, by)}


def hook(name: str, change: str) -> dict[str, dict[str, str]]:
    return {"Hooks of the connector": {f"KVConnectorBase_V1.{name}": change}}


def calls(change: str) -> dict[str, dict[str, str]]:
    return {"Calls of hooks": {f"{RUNNER}: Runner.step": change}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        (replaced(BASE, HOOK, NEW_HOOK), hook("slept", "new: `(self, level=1)`")),
        (
            replaced(BASE, "def wait_for_save(self)", "def wait_for_save(self, req: str)"),
            hook("wait_for_save", "changed: `(self)` became `(self, req)`"),
        ),
        (
            replaced(BASE, "return None", "return 1"),
            hook("get_finished_count", "changed: `return None` became `return 1`"),
        ),
        (replaced(BASE, "-> None", "-> int"), {}),
        (
            replaced(RUNNER, "if self.finish:", "if self.late:"),
            calls("changed: `if self.finish: wait_for_save` became `if self.late: wait_for_save`"),
        ),
        (replaced(RUNNER, START, "pass"), calls("changed: `start_load_kv` became nothing")),
        (
            {RUNNER: FILES[RUNNER].replace(f"{START}\n" + 16 * " ", "") + f"            {START}\n"},
            calls("changed: the order is `if self.finish: wait_for_save`, `start_load_kv`"),
        ),
        (replaced(RUNNER, START, f"{START}; self.ec_connector.wait_for_save()"), {}),
        (
            {MACHINERY: "class Aggregator:\n    def merge(self): return 1\n"},
            {"What drives connectors": {f"{MACHINERY}: Aggregator.merge": "new"}},
        ),
        (
            replaced(SPECS, "            head_size: int = 64\n", MORE_SPECS),
            {
                "Specs of caches": {
                    "FullAttentionSpec.width": "new: `int = 0`",
                    "TheirSpec": "new: `class TheirSpec(KVCacheSpec)`",
                }
            },
        ),
        (
            {"v1/attention/backends/more.py": BACKEND},
            {"Attention backends": {"FLASHINFER": "new: `more.Backend`, `orders any`"}},
        ),
        (
            replaced(FLASH, "kv_cache.copy_(key)", "kv_cache.copy_(value)"),
            {
                "Functions that fill pages": {
                    FLASH: "changed: `FlashAttentionImpl.do_kv_cache_update "
                }
            },
        ),
        (replaced(FLASH, "return query", "return 2 * query"), {}),
        ({"../csrc/cache.cu": "int* slot_mapping"}, {"Kernels in C++": {"csrc/cache.cu": "new"}}),
        ({"../csrc/gemm.cu": "void gemm();"}, {}),
        (
            replaced("config/cache.py", '"fp8"', '"fp8", "fp4"'),
            {"Quantised formats, orders and other values": {"CacheDType 'fp4'": "new: `'fp4'`"}},
        ),
        (
            replaced(TICKETS, "remote_block_ids=[]", "remote_block_ids=[], more=1"),
            {"Keys of tickets": {"more": "new: `NixlConnector`"}},
        ),
        (
            {"v1/engine/core.py": 'a = kv_transfer_params.get("b"); c = params.get("d")'},
            {"Keys of tickets": {"b": "new: `v1/engine/core.py`"}},
        ),
        (
            {names.FACTORY: "KVConnectorFactory.register_connector('Other', 'vllm.o', 'Other')"},
            {"Connectors": {"NixlConnector": "gone: `vllm.nixl`", "Other": "new: `vllm.o`"}},
        ),
        (
            {SPECS: f"{FILES[SPECS]}\n        def iter_layer_specs(spec): 1\n"},
            {
                "Names that kvferry imports": {
                    "vllm.v1.kv_cache_interface.iter_layer_specs": "new: `iter_layer_specs(spec)`"
                }
            },
        ),
        (
            {"v1/request.py": "class Request:\n    other = 1\n", "platforms/xpu.py": ""},
            {
                "Attributes that kvferry uses": dict.fromkeys(
                    ("num_prompt_tokens", "swap_out_blocks_to_host"), "gone"
                )
            },
        ),
    ],
)
def test_differences(
    old: Source,
    tmp_path: Path,
    changes: Mapping[str, str],
    expected: Mapping[str, Mapping[str, str]],
) -> None:
    """What is expected of a change is how its text begins."""
    new = tree(tmp_path / "new", changes)
    differences = {
        section.title: {each.name: each.change for each in some}
        for section in command.SECTIONS
        if (some := findings(section, old, new, {}))
    }
    assert {title: set(each) for title, each in differences.items()} == {
        title: set(each) for title, each in expected.items()
    }
    for title, each in expected.items():
        for name, change in each.items():
            assert differences[title][name].startswith(change)


@pytest.mark.parametrize(
    ("name", "was", "now", "verdict"),
    [
        ("theirs", None, "()", ""),
        ("theirs", "()", None, "not used"),
        ("theirs", "()\nreturn 1", "()\nreturn 2", ""),
        ("shutdown", None, "()", "`KVFerryConnector` defines it"),
        ("request_finished", "()", None, ""),
        ("request_finished", "()\nreturn 1", "()\nreturn 2", "`KVFerryConnector` does not use"),
        ("request_finished", "()", "(a)", ""),
    ],
)
def test_hooks_matter_where_the_connector_uses_them(
    name: str, was: str | None, now: str | None, verdict: str
) -> None:
    found = hook_verdict(f"SupportsHMA.{name}", was, now)
    assert found.startswith(verdict)
    assert bool(found) == bool(verdict)


@pytest.mark.parametrize(
    ("name", "was", "verdict"),
    [
        ("FLASHINFER", None, "`halves`"),
        ("GDN_ATTN", None, "`delta`"),
        ("SOMEBODYS", None, ""),
        ("FLASH_ATTN", "another class", ""),  # its pages may be other ones
    ],
)
def test_backends(name: str, was: str | None, verdict: str) -> None:
    assert caches.backend_verdict(name, was, "a class") == verdict


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
