"""Draw mutants of kvferry at random and report those that its tests leave alive.

A mutant is the code with one small mistake in it. A mutant that no test notices is a missing test,
or does not change behaviour: somebody has to read it to say which.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AREAS = ("kvferry/core", "kvferry/drivers/loopback", "kvferry/integrations/vllm")

EPILOG = """\
examples:
  python -m tests.mutants --count 160 --seed 7
  python -m tests.mutants --count 40 --seed 7 kvferry/core/lifecycle kvferry/core/planner
  python -m tests.mutants --seed 7 --list            what would be tried, without trying it
  python -m tests.mutants --seed 7 --only 3,17       try two of that draw, once a test is written

The same seed, count, paths and code draw the same mutants. Each is applied alone, to a copy of the
working tree, and tried with the tests that likely test its module, then with all units, then with
those of tests/vllm or tests/faults that concern it: a survivor takes minutes. One process runs at a
time. Run the quick tests before: they have to pass without a mutant.
"""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
ELSEWHERE = {
    "kvferry/core/planner": "tests/vllm/geometry",
    "kvferry/core": "tests/faults",
    "kvferry/drivers/loopback": "tests/faults",
    "kvferry/integrations/vllm/caches": "tests/vllm/caches",
    "kvferry/integrations/vllm": "tests/vllm",
}
"""The tests beside the units that a mutant is tried with, by the first path that fits."""
MOST_SECONDS = 600.0
"""Of a run of pytest: a mutant may never end."""
ALIVE, NOTICED, TOO_LONG = "ALIVE", "noticed", "too long"
DROPPED = (ast.AugAssign, ast.Break, ast.Continue, ast.Delete, ast.Expr, ast.Raise)
ANNOTATIONS = ("annotation", "decorator_list", "returns", "type_comment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file: other text from byte ``start`` to before byte ``stop``."""

    path: Path
    line: int
    start: int
    stop: int
    text: str
    was: str
    code: str

    def __str__(self) -> str:
        was, text = (" ".join(part.split())[:90] for part in (self.was, self.text))
        return f"{self.path}:{self.line}: {was} -> {text}   in   {self.code}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]


def mutants_of(path: Path, source: bytes) -> list[Mutant]:
    """Return every mutant of a file, in the order of its lines.

    Types, decorators, texts, log calls and imports are left as they are.
    """
    text_lines = source.splitlines(keepends=True)
    lines = [0, *itertools.accumulate(map(len, text_lines))]
    found = []
    for node, text in _changes(ast.parse(source)):
        start = lines[node.lineno - 1] + node.col_offset
        stop = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        mutant = Mutant(
            path=path,
            line=node.lineno,
            start=start,
            stop=stop,
            text=text,
            was=source[start:stop].decode(),
            code=text_lines[node.lineno - 1].decode().strip(),
        )
        found.append(mutant)
    return sorted(found, key=lambda mutant: (mutant.start, mutant.stop, mutant.text))


Located = ast.expr | ast.stmt


def _changes(tree: ast.AST) -> Iterator[tuple[Located, str]]:
    """Yield each node that can be replaced, and by what."""
    for node in _code(tree):
        if isinstance(node, ast.expr):
            for changed in _expressions(node):
                yield node, f"({ast.unparse(changed)})"
        elif isinstance(node, ast.stmt) and (isinstance(node, DROPPED) or _stores(node)):
            yield node, "pass"
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not _is_not(node.test):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield test, f"(not ({ast.unparse(test)}))"
        if isinstance(node, ast.FunctionDef) and _returns_nothing(node):
            body = [each for each in node.body if not _is_text(each)]
            if len(body) > 1:
                yield body[0], "return"


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Yield what an expression may become."""
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.Compare):
        for index, operator in enumerate(changed.ops):
            changed.ops[index] = COMPARISONS[type(operator)]()
            yield changed
            changed.ops[index] = operator
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
        yield changed
    elif isinstance(changed, ast.BinOp) and type(changed.op) in OPERATORS:
        changed.op = OPERATORS[type(changed.op)]()
        yield changed
    elif isinstance(changed, ast.Constant):
        yield from _constants(changed.value)
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        yield changed.operand
    elif isinstance(changed, ast.Call) and ast.unparse(changed.func) in CALLS:
        changed.func = ast.Name(CALLS[ast.unparse(changed.func)])
        yield changed


def _constants(value: object) -> Iterator[ast.expr]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
        yield ast.Constant(value - 1)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no types, no decorators, no log calls."""
    if _is_text(node) or _is_log(node) or isinstance(node, ast.JoinedStr | ast.pattern):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ANNOTATIONS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _stores(node: ast.AST) -> bool:
    kinds = ast.Attribute | ast.Subscript
    return isinstance(node, ast.Assign) and all(isinstance(t, kinds) for t in node.targets)


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node.value).startswith("logger.")


def _returns_nothing(node: ast.FunctionDef) -> bool:
    return isinstance(node.returns, ast.Constant) and node.returns.value is None


def draw(paths: Sequence[str], count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Return mutants of ``count`` places under ``paths``, or of all places if there are fewer."""
    files = sorted({file for path in paths for file in [*(root / path).rglob("*.py"), root / path]})
    places: dict[object, list[Mutant]] = {}
    for file in filter(Path.is_file, files):
        for mutant in mutants_of(file.relative_to(root), file.read_bytes()):
            places.setdefault((mutant.path, mutant.start, mutant.stop), []).append(mutant)
    chance = random.Random(seed)
    return [
        chance.choice(found)
        for found in chance.sample(list(places.values()), min(count, len(places)))
    ]


def stages(module: Path, root: Path = ROOT) -> list[list[str]]:
    """Return pytest's arguments for a module: the likely tests, all units, and the rest."""
    folder = root / Path("tests", *module.parent.parts[1:])
    while not folder.is_dir():
        folder = folder.parent
    dotted = ".".join(module.with_suffix("").parts).removesuffix(".__init__")
    likely = [
        test.relative_to(root)
        for test in sorted(folder.rglob("test_*.py"))
        if test.stem.startswith(f"test_{module.stem}") or f"{dotted} import" in test.read_text()
    ]
    elsewhere = next((ELSEWHERE[path] for path in ELSEWHERE if module.is_relative_to(path)), "")
    found = [[str(test) for test in likely], ["tests"], [elsewhere]]
    return [each for each in found if any(each)]


class Scratch:
    """A copy of the working tree in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.split("\0"):
            if name and (ROOT / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        subprocess.run([sys.executable, "-m", "compileall", "-q", folder / "kvferry"], check=True)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Have the mutant in the copy while in the context."""
        file = self._folder / mutant.path
        source, status = file.read_bytes(), file.stat()
        file.write_bytes(mutant.applied(source))
        try:
            yield
        finally:
            file.write_bytes(source)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(self, arguments: Sequence[str]) -> str:
        """Run pytest in the copy, and return one of ``ALIVE``, ``NOTICED`` and ``TOO_LONG``."""
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        environment = os.environ | {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(
            command,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as run:
            try:
                # 5: there was nothing to run.
                return ALIVE if run.wait(MOST_SECONDS) in (0, 5) else NOTICED
            except subprocess.TimeoutExpired:
                return TOO_LONG
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)


def verdict(scratch: Scratch, mutant: Mutant, *, near: bool) -> str:
    """Return what becomes of a mutant; with ``near``, only tests that likely test it are asked."""
    with scratch.mutated(mutant):
        found = (scratch.run(each) for each in stages(mutant.path)[: 1 if near else None])
        return next((word for word in found if word != ALIVE), ALIVE)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", nargs="*", default=AREAS, help=f"files or folders; otherwise {' '.join(AREAS)}"
    )
    parser.add_argument("--count", type=int, default=160, help="how many to draw (160)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument("--only", help="numbers of the draw, with commas between them")
    parser.add_argument(
        "--near", action="store_true", help="ask only the tests that likely test it: much faster"
    )
    parser.add_argument("--list", action="store_true", help="print the draw and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    drawn = dict(enumerate(draw(options.paths, options.count, options.seed), start=1))
    numbers = map(int, options.only.split(",")) if options.only else list(drawn)
    os.nice(5)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that nothing is left behind
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        scratch = None if options.list else Scratch(Path(folder).resolve())
        for number in numbers:
            started, word = time.monotonic(), "-"
            if scratch is not None:
                word = verdict(scratch, drawn[number], near=options.near)
            counts[word] += 1
            seconds = time.monotonic() - started
            print(f"{number:4} {word:8} {seconds:5.0f} s  {drawn[number]}", flush=True)  # noqa: T201
    print(*(f"{count} {word}" for word, count in counts.items()), sep=", ")  # noqa: T201


if __name__ == "__main__":
    main()
