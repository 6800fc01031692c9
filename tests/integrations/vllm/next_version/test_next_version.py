"""Each kind of difference between two trees of source is found, and said with its verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integrations.vllm.next_version import __main__ as command
from tests.integrations.vllm.next_version import caches, hooks, names, report
from tests.integrations.vllm.next_version.findings import Finding, Section, judged
from tests.integrations.vllm.next_version.report import compared, open_findings, page
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


def found(section: Section) -> dict[str, str]:
    return {each.name: each.change for each in section.findings}


def hook(name: str, change: str) -> dict[str, dict[str, str]]:
    return {"Hooks of the connector": {f"KVConnectorBase_V1.{name}": change}}


def calls(change: str) -> dict[str, dict[str, str]]:
    return {"Calls of hooks": {f"{RUNNER}: Runner.step": change}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        (replaced(BASE, HOOK, NEW_HOOK), hook("slept", "new: `(self, level=1)`. Sleep.")),
        (
            replaced(BASE, "def wait_for_save(self)", "def wait_for_save(self, req: str)"),
            hook("wait_for_save", "parameters: `self` became `self, req`"),
        ),
        (
            replaced(BASE, "return None", "return 1"),
            hook("get_finished_count", "default: `return None` became `return 1`"),
        ),
        (replaced(BASE, "-> None", "-> int"), {}),
        (
            replaced(RUNNER, "if self.finish:", "if self.late:"),
            calls("`if self.finish: wait_for_save` became `if self.late: wait_for_save`"),
        ),
        (replaced(RUNNER, START, "pass"), calls("`start_load_kv` became nothing")),
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
            replaced(FLASH, "kv_cache.copy_(key)", "kv_cache.copy_(value)"),
            {
                "Functions that fill pages": {
                    FLASH: "changed: FlashAttentionImpl.do_kv_cache_update"
                }
            },
        ),
        (replaced(FLASH, "return query", "return 2 * query"), {}),
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
            {
                names.FACTORY: "KVConnectorFactory.register_connector('Other', 'vllm.o', 'Other')",
            },
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
                "Attributes that kvferry uses": {
                    "num_prompt_tokens": "gone from every class in ",
                    "swap_out_blocks_to_host": "gone from every class in ",
                }
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
    differences = {
        each.title: found(each)
        for each in compared(old, tree(tmp_path / "new", changes))
        if each.findings and each.title != "Kernels in C++"  # not both are source distributions
    }
    assert {title: set(each) for title, each in differences.items()} == {
        title: set(each) for title, each in expected.items()
    }
    for title, each in expected.items():
        for name, change in each.items():
            assert differences[title][name].startswith(change)


@pytest.mark.parametrize(
    ("text", "by", "own", "verdicts"),
    [
        ("return None", "return 1", set(), {"get_finished_count": ""}),
        (
            "return None",
            "return 1",
            {"get_finished_count"},
            {"get_finished_count": "`KVFerryConnector` does not use the default"},
        ),
        ("def wait_for_save(", "def _other(", set(), {"wait_for_save": "not used", "_other": ""}),
        (
            "def wait_for_save(",
            "def _other(",
            {"wait_for_save"},
            dict.fromkeys(("wait_for_save", "_other"), ""),
        ),
    ],
)
def test_hooks_matter_where_the_connector_uses_them(
    old: Source, tmp_path: Path, text: str, by: str, own: set[str], verdicts: dict[str, str]
) -> None:
    section = hooks.hook_section(old, tree(tmp_path / "new", replaced(BASE, text, by)), own)
    assert {e.name.rpartition(".")[2]: e.verdict for e in section.findings} == verdicts


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("FLASHINFER", "described: K, then V"),
        ("ULTRAQUANT", "opaque: not known"),
        ("SOMEBODYS", ""),
        ("FLASH_ATTN", ""),
    ],
)
def test_backends(old: Source, tmp_path: Path, name: str, verdict: str) -> None:
    """A class that is new under a known name has no verdict, since its pages may be other ones."""
    more = (
        "class Backend(AttentionBackend):\n    @staticmethod\n    def get_name():\n"
        f"        return {name!r}\n"
    )
    new = tree(tmp_path / "new", {"v1/attention/backends/more.py": more})
    [finding] = caches.backend_section(old, new).findings
    assert finding.name == name
    assert "more.Backend, orders any`" in finding.change
    assert finding.verdict.startswith(verdict)
    assert bool(finding.verdict) == bool(verdict)


def test_kernels_in_native_code(tmp_path: Path) -> None:
    sides = [tree(tmp_path / name) for name in ("old", "new")]
    assert list(found(caches.native_section(*sides))) == ["csrc"]  # it was not compared
    for side, text in zip(sides, ("old", "new"), strict=True):
        folder = side.root.parent / "csrc"
        folder.mkdir()
        (folder / "cache.cu").write_text(f"void {text}(int* slot_mapping);")
        (folder / "gemm.cu").write_text(f"void {text}();")
    assert found(caches.native_section(*sides)) == {"csrc/cache.cu": "changed"}


def test_verdicts_of_maintainers(old: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand beside differences that have none otherwise; one that nothing needs is named."""
    assert set(VERDICTS) <= {section.title for section in compared(old, old)}
    verdicts = {"Some": {"a": "read", "b": "no", "gone": "read"}, "Others": {"b": "read"}}
    monkeypatch.setattr(report, "VERDICTS", verdicts)
    findings = (
        Finding(name="a", change="new"),
        Finding(name="b", change="new", verdict="fine"),
        Finding(name="c", change="new"),
    )
    section = judged(Section(title="Some", look="there", findings=findings), verdicts["Some"])
    assert [each.verdict for each in section.findings] == ["read", "fine", ""]
    assert [each.name for each in open_findings([section])] == ["c"]
    assert report.unused_verdicts([section]) == ["Some: b", "Some: gone"]


def test_the_page(old: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = (Finding(name="a", change="`b | c`"), Finding(name="d", change="new", verdict="e"))
    sections = [
        Section(title="Some", look="there", findings=findings),
        Section(title="Others", look="here", findings=()),
    ]
    lines = page(old, old, sections).splitlines()
    assert lines[0].startswith("vLLM 1.0 beside 1.0: 2 differences, of which 1 have no verdict yet")
    assert "| `a` | `b \\| c` | **look** |" in lines
    assert "| `d` | new | e |" in lines
    assert lines[-1] == "No difference."
    versions = [str(tree(tmp_path / name).root) for name in ("old", "new")]
    assert command.main(["--base", *versions]) == 0
    assert "vLLM 1.0 beside 1.0: 1 differences" in capsys.readouterr().out
