"""Each kind of difference between two trees of source is found, and said with its verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.vllm.next_version import __main__ as command
from tests.integrations.vllm.next_version import caches, hooks, names, report
from tests.integrations.vllm.next_version.findings import Finding, Section, judged
from tests.integrations.vllm.next_version.report import (
    compared,
    connector_methods,
    open_findings,
    page,
)
from tests.integrations.vllm.next_version.source import Source
from tests.integrations.vllm.next_version.trees import FILES, tree
from tests.integrations.vllm.next_version.verdicts import VERDICTS

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"


@pytest.fixture
def old(tmp_path: Path) -> Source:
    return tree(tmp_path / "old")


def changed(folder: Path, path: str, text: str, by: str) -> Source:
    """A tree in which a text in one file was replaced."""
    assert text in FILES[path]
    return tree(folder, {path: FILES[path].replace(text, by)})


def found(section: Section) -> dict[str, str]:
    return {each.name: each.change for each in section.findings}


def test_equal_trees_do_not_differ(old: Source, tmp_path: Path) -> None:
    same = tree(tmp_path / "same")
    sections = compared(old, same)
    assert [each.title for each in sections if found(each)] == ["Kernels in C++"]
    assert found(caches.native_section(old, same)) == {
        "csrc": "not compared: not both are source distributions"
    }


HOOK = "            def wait_for_save(self) -> None:"


@pytest.mark.parametrize(
    ("text", "by", "name", "change"),
    [
        (
            HOOK,
            "            def slept(self, level: int = 1):\n"
            '                """Sleep. Well."""\n                return level\n\n' + HOOK,
            "slept",
            "new: `(self, level=1)`; by default `return level`. Sleep.",
        ),
        (
            "def wait_for_save(self) -> None:",
            "def wait_for_save(self, req: str) -> None:",
            "wait_for_save",
            "parameters: `self` became `self, req`",
        ),
        (
            "return None",
            "return 1",
            "get_finished_count",
            "default: `return None` became `return 1`",
        ),
        ("            @abstractmethod\n", "", "start_load_kv", "kind: "),
    ],
    ids=["new", "parameters", "default", "kind"],
)
def test_hooks(old: Source, tmp_path: Path, text: str, by: str, name: str, change: str) -> None:
    section = hooks.hook_section(old, changed(tmp_path / "new", BASE, text, by), set())
    [(hook, how)] = found(section).items()
    assert hook == f"KVConnectorBase_V1.{name}"
    assert how.startswith(change)


def test_annotations_of_hooks_do_not_count(old: Source, tmp_path: Path) -> None:
    new = changed(tmp_path / "new", BASE, "-> None", "-> int")
    assert found(hooks.hook_section(old, new, set())) == {}


@pytest.mark.parametrize(
    ("own", "verdict"),
    [(set(), ""), ({"get_finished_count"}, "`KVFerryConnector` does not use the default")],
)
def test_another_default_matters_only_where_it_is_used(
    old: Source, tmp_path: Path, own: set[str], verdict: str
) -> None:
    new = changed(tmp_path / "new", BASE, "return None", "return 1")
    [finding] = hooks.hook_section(old, new, own).findings
    assert finding.verdict == verdict


@pytest.mark.parametrize(("own", "verdict"), [(set(), "not used"), ({"wait_for_save"}, "")])
def test_a_hook_that_is_gone_matters_only_where_it_is_defined(
    old: Source, tmp_path: Path, own: set[str], verdict: str
) -> None:
    new = changed(tmp_path / "new", BASE, "def wait_for_save(", "def _other(")
    section = hooks.hook_section(old, new, own)
    verdicts = {each.name.rpartition(".")[2]: each.verdict for each in section.findings}
    assert verdicts == {"wait_for_save": verdict, "_other": ""}


def test_the_connector_defines_hooks() -> None:
    assert {"start_load_kv", "wait_for_save", "get_transfer_results"} <= connector_methods()


RUNNER = "v1/worker/runner.py"


@pytest.mark.parametrize(
    ("text", "by", "change"),
    [
        (
            "if self.finish:",
            "if self.late:",
            "`if self.finish: wait_for_save` became `if self.late: wait_for_save`",
        ),
        ("self.kv_connector.start_load_kv(None)", "pass", "`start_load_kv` became nothing"),
        (
            "self.kv_connector.start_load_kv(None)",
            "self.kv_connector.start_load_kv(None); self.kv_connector.wait_for_save()",
            "also `wait_for_save` after `start_load_kv`",
        ),
    ],
)
def test_the_order_of_calls(old: Source, tmp_path: Path, text: str, by: str, change: str) -> None:
    new = changed(tmp_path / "new", RUNNER, text, by)
    assert found(hooks.call_section(old, new)) == {f"{RUNNER}: Runner.step": change}


def test_calls_of_other_objects_do_not_count(old: Source, tmp_path: Path) -> None:
    new = changed(
        tmp_path / "new",
        RUNNER,
        "self.kv_connector.start_load_kv(None)",
        "self.kv_connector.start_load_kv(None); self.ec_connector.wait_for_save()",
    )
    assert found(hooks.call_section(old, new)) == {}


def test_what_drives_connectors(old: Source, tmp_path: Path) -> None:
    path = "distributed/kv_transfer/kv_connector/utils.py"
    new = tree(tmp_path / "new", {path: "class Aggregator:\n    def merge(self): return 1\n"})
    assert found(hooks.machinery_section(old, new)) == {f"{path}: Aggregator.merge": "new"}


def test_specs(old: Source, tmp_path: Path) -> None:
    new = changed(
        tmp_path / "new",
        "v1/kv_cache_interface.py",
        "            head_size: int = 64\n",
        "            head_size: int = 64\n            width: int = 0\n\n"
        "        class MambaSpec(KVCacheSpec): pass\n\n"
        "        class TheirSpec(KVCacheSpec): pass\n",
    )
    section = caches.spec_section(old, new)
    assert found(section) == {
        "FullAttentionSpec.width": "new: `int = 0`",
        "MambaSpec": "new: `class MambaSpec(KVCacheSpec)`",
        "TheirSpec": "new: `class TheirSpec(KVCacheSpec)`",
    }
    verdicts = {each.name: each.verdict for each in section.findings}
    assert verdicts == {
        "FullAttentionSpec.width": "",
        "MambaSpec": "state: one page per request",
        "TheirSpec": "",
    }


def backend(cls: str, name: str) -> str:
    return (
        f"class {cls}(AttentionBackend):\n    @staticmethod\n    def get_name():\n"
        f"        return {name!r}\n"
    )


@pytest.mark.parametrize(
    ("name", "change", "verdict"),
    [
        ("FLASHINFER", "new: `more.Backend, orders any`", "described: K, then V"),
        ("STEP5_DSA", "new: `more.Backend, orders any`", "described: K, then V"),
        ("ULTRAQUANT", "new: `more.Backend, orders any`", "opaque: not known"),
        ("SOMEBODYS", "new: `more.Backend, orders any`", ""),
        ("FLASH_ATTN", "`flash_attn.FlashAttentionBackend, orders any` became", ""),
    ],
)
def test_backends(old: Source, tmp_path: Path, name: str, change: str, verdict: str) -> None:
    """A class that is new under a known name has no verdict, since its pages may be other ones."""
    new = tree(tmp_path / "new", {"v1/attention/backends/more.py": backend("Backend", name)})
    [finding] = caches.backend_section(old, new).findings
    assert finding.name == name
    assert finding.change.startswith(change)
    assert finding.verdict.startswith(verdict)
    assert bool(finding.verdict) == bool(verdict)


@pytest.mark.parametrize(
    ("text", "by", "expected"),
    [
        ("kv_cache.copy_(key)", "kv_cache.copy_(value)", {"FlashAttentionImpl.do_kv_cache_update"}),
        ("return query", "return 2 * query", set()),
    ],
)
def test_functions_that_fill_pages(
    old: Source, tmp_path: Path, text: str, by: str, expected: set[str]
) -> None:
    path = "v1/attention/backends/flash_attn.py"
    section = caches.kernel_section(old, changed(tmp_path / "new", path, text, by))
    assert set(found(section).values()) == {f"changed: {name}" for name in expected}


def test_kernels_in_native_code(tmp_path: Path) -> None:
    sides = [tree(tmp_path / name) for name in ("old", "new")]
    for side, text in zip(sides, ("old", "new"), strict=True):
        folder = side.root.parent / "csrc"
        folder.mkdir()
        (folder / "cache.cu").write_text(f"void {text}(int* slot_mapping);")
        (folder / "gemm.cu").write_text(f"void {text}();")
    assert found(caches.native_section(*sides)) == {"csrc/cache.cu": "changed"}


def test_values_and_aliases(old: Source, tmp_path: Path) -> None:
    new = changed(
        tmp_path / "new",
        "v1/kv_cache_interface.py",
        "FP8_PER_TENSOR = 1\n",
        "FP8_PER_TENSOR = 1\n            CUSTOM = 1\n",
    )
    assert found(caches.value_section(old, new)) == {
        "KVQuantMode.CUSTOM": "new: `1`",
        "KVQuantMode.CUSTOM as an alias": "another name of `KVQuantMode.FP8_PER_TENSOR`: both "
        "have the same value",
    }
    more = changed(tmp_path / "more", "config/cache.py", '"fp8"', '"fp8", "fp4"')
    assert found(caches.value_section(old, more)) == {"CacheDType 'fp4'": "new: `'fp4'`"}


TICKETS = "distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py"


def test_keys_of_tickets(old: Source, tmp_path: Path) -> None:
    new = changed(tmp_path / "new", TICKETS, "remote_block_ids=[]", "remote_block_ids=[], more=1")
    assert found(names.ticket_section(old, new)) == {"more": "new: `NixlConnector`"}
    read = tree(
        tmp_path / "read",
        {"v1/engine/core.py": 'a = kv_transfer_params.get("b"); c = params.get("d")'},
    )
    assert found(names.ticket_section(old, read)) == {"b": "new: `v1/engine/core.py`"}


def test_connectors_and_architectures(old: Source, tmp_path: Path) -> None:
    new = tree(
        tmp_path / "new",
        {
            names.FACTORY: "KVConnectorFactory.register_connector('Other', 'vllm.other', 'Other')",
            names.MODELS: "_TEXT_GENERATION_MODELS = {'Other': ('other', 'Other')}",
            "model_executor/models/other.py": "",
        },
    )
    assert found(names.connector_section(old, new)) == {
        "NixlConnector": "gone: `vllm.nixl`",
        "Other": "new: `vllm.other`",
    }
    assert found(names.model_section(old, new)) == {
        "LlamaForCausalLM": "gone: `llama, makes Attention`",
        "Other": "new: `other, makes no layer with a cache itself`",
    }


def test_names_that_are_imported(old: Source, tmp_path: Path) -> None:
    path = "v1/kv_cache_interface.py"
    here = tree(
        tmp_path / "here", {path: f"{FILES[path]}\n        def iter_layer_specs(spec): 1\n"}
    )
    other = tree(
        tmp_path / "other", {path: f"{FILES[path]}\n        def iter_layer_specs(spec, deep): 1\n"}
    )
    name = "vllm.v1.kv_cache_interface.iter_layer_specs"
    assert found(names.import_section(here, other)) == {
        name: "`iter_layer_specs(spec)` became `iter_layer_specs(spec, deep)`"
    }
    assert found(names.import_section(here, old)) == {name: "gone"}


def test_attributes_that_are_used(tmp_path: Path) -> None:
    """One that is defined elsewhere is no loss, nor one that kvferry does not use."""
    text = "class Request:\n    num_prompt_tokens: int\n    other = 1\n"
    platform = {"platforms/xpu.py": "class XPUPlatform:\n    def swap_out_blocks_to_host(cls): 1\n"}
    old = tree(tmp_path / "old", {"v1/request.py": text} | platform)
    moved = tree(tmp_path / "moved", {"v1/outputs.py": text} | platform)
    assert found(names.attribute_section(old, moved)) == {}
    gone = found(names.attribute_section(old, tree(tmp_path / "gone")))
    assert list(gone) == ["num_prompt_tokens", "swap_out_blocks_to_host"]


def test_requirements() -> None:
    metadata = "Requires-Python: >=3.11\nRequires-Dist: torch=={}; extra\nRequires-Dist: numpy\n"
    old, new = (names.requirements_of(metadata.format(version)) for version in ("1.0", "2.0"))
    assert found(names.requirement_section(old, new)) == {
        "torch and Python": "`>=3.11; torch==1.0` became `>=3.11; torch==2.0`"
    }
    assert found(names.requirement_section(old, old)) == {}


def test_verdicts_that_nothing_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {"Some": {"a": "read", "gone": "read"}, "Others": {"b": "read"}}
    monkeypatch.setattr(report, "VERDICTS", verdicts)
    findings = (Finding(name="a", change="new", verdict="read"),)
    section = Section(title="Some", look="there", findings=findings)
    assert report.unused_verdicts([section]) == ["Some: gone"]


def test_verdicts_of_maintainers() -> None:
    findings = (Finding(name="a", change="new"), Finding(name="b", change="new", verdict="fine"))
    section = Section(title="Some", look="there", findings=findings)
    assert [each.verdict for each in judged(section, {"a": "read", "b": "no"}).findings] == [
        "read",
        "fine",
    ]
    assert [each.name for each in open_findings([section])] == ["a"]


def test_verdicts_are_on_sections_that_there_are(old: Source) -> None:
    assert set(VERDICTS) <= {section.title for section in compared(old, old)}


def test_the_page(old: Source) -> None:
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


def test_the_command_writes_below_the_marker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = [str(tree(tmp_path / name).root) for name in ("old", "new")]
    written = tmp_path / "page.md"
    written.write_text(f"# By hand\n\n{command.MARKER}\n\nold text\n")
    assert command.main(["--base", versions[0], versions[1], "--page", str(written)]) == 0
    head, below = written.read_text().split(command.MARKER)
    assert head == "# By hand\n\n"
    assert below.strip() in capsys.readouterr().out
    assert "old text" not in below
