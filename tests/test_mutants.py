"""``tests.mutants``: which mutants code has, and which tests are run for a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import draw, mutants_of, stages

HERE = Path("kvferry/core/made_up.py")


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


def test_the_tests_that_are_asked_first_and_last() -> None:
    asked = stages(Path("kvferry/core/planner/build_copies.py"))
    assert "tests/core/planner/test_build_copies.py" in asked[0]
    assert asked[1:] == [["tests"], ["tests/vllm/geometry"]]
