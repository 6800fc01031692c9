"""``tests.mutants``: which mutants code has, and which tests are run for a module."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.mutants import ROOT, draw, mutants_of, stages

HERE = Path("kvferry/core/made_up.py")
APART = ("engines", "faults", "long", "nixl", "ray", "ucx", "vllm")
"""The folders of tests that a plain ``pytest`` does not run."""


def changed(body: str) -> set[str]:
    """Return the source with each mutant of some lines."""
    return {m.applied(body.encode()).decode() for m in mutants_of(HERE, body.encode())}


@pytest.mark.parametrize(
    ("body", "mutants"),
    [
        ("a < b", {"(a <= b)"}),
        ("a < b == c", {"(a <= b == c)", "(a < b != c)"}),
        ("x = a and b", {"x = (a or b)"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x = not a", {"x = (a)"}),
        ("x = 7", {"x = (8)", "x = (6)"}),
        ("x = True", {"x = (False)"}),
        ("x = min(a, b)", {"x = (max(a, b))"}),
        ("self.x = y", {"pass"}),
        ("x.append(y)", {"pass"}),
        ("raise E", {"pass"}),
        ("y = a if b else c", {"y = a if (not (b)) else c"}),
        ("def f() -> None:\n    x.y()\n    z = a\n", {"def f() -> None:\n    return\n    z = a\n"}),
    ],
)
def test_code_has_these_mutants(body: str, mutants: set[str]) -> None:
    assert mutants <= changed(body)


@pytest.mark.parametrize(
    "body",
    [
        "x: Annotated[int, Meta(ge=1)]",
        "@dataclass(frozen=True)\nclass A:\n    'Text.'\n",
        "if TYPE_CHECKING:\n    x = 1\n",
        "logger.info('%d', 1 + 2)",
        "x = f'{a + 1}'",
        "from a import b",
    ],
)
def test_code_without_behaviour_has_no_mutants(body: str) -> None:
    assert changed(body) == set()


def test_mutants_of_lines_with_non_ascii_text() -> None:
    """Positions of ``ast`` are in bytes."""
    assert "x = 'ä', (a <= b)" in changed("x = 'ä', a < b")


def test_the_same_seed_draws_the_same_mutants() -> None:
    first, second, other = (
        draw(["kvferry/core/planner/coalesce.py"], 5, seed) for seed in (1, 1, 2)
    )
    assert first == second != other
    assert len({(m.start, m.stop) for m in first}) == 5


@pytest.mark.parametrize(
    "module",
    [
        "kvferry/core/planner/coalesce.py",
        "kvferry/core/lifecycle/worker_holds.py",
        "kvferry/core/side_channel/server.py",
        "kvferry/integrations/vllm/caches/pages.py",
    ],
)
def test_every_unit_is_in_exactly_one_stage(module: str) -> None:
    stage_arguments = stages(Path(module))
    apart = [ROOT / "tests" / name for name in APART]
    turns = {
        path: 0 for path in (ROOT / "tests").rglob("test_*.py") if not {*path.parents} & {*apart}
    }
    for arguments in stage_arguments:
        ignored = {b for a, b in itertools.pairwise(arguments) if a == "--ignore"}
        chosen = [
            ROOT / each for each in arguments if each.startswith("tests") and each not in ignored
        ]
        left_out = [ROOT / each for each in ignored]
        for path in turns:
            under = {path, *path.parents}
            turns[path] += bool(under & {*chosen}) and not under & {*left_out}
    assert set(turns.values()) == {1}
