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
working tree, and tried with the tests that import its module, then with those of its folder and of
the folders in it, then with all other units, then with those of tests/vllm or tests/faults that
concern it: a survivor takes minutes. One process runs at a time.
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
    "kvferry/core/planner": ["tests/vllm/geometry"],
    "kvferry/core": ["tests/faults"],
    "kvferry/drivers/loopback": ["tests/faults"],
    "kvferry/integrations/vllm/caches": ["tests/vllm/caches"],
    "kvferry/integrations/vllm": ["tests/vllm"],
}
"""The tests beside the units that a mutant is tried with, by the first path that fits."""
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


def stages(module: Path, root: Path = ROOT, *, near: bool = False) -> list[list[str]]:
    """Return pytest's arguments for a module, likely tests first, and each test once.

    With ``near``, only tests right in its folder are among them.
    """
    folder = Path("tests", *module.parent.parts[1:])
    while not (root / folder).is_dir():
        folder = folder.parent

    def names(tests: Sequence[Path]) -> list[str]:
        return [str(test.relative_to(root)) for test in tests]

    dotted = ".".join(module.with_suffix("").parts).removesuffix(".__init__")
    beside = sorted((root / folder).glob("test_*.py"))
    likely = [
        test
        for test in beside
        if test.stem.startswith(f"test_{module.stem}") or f"{dotted} import" in test.read_text()
    ]
    others = [test for test in beside if test not in likely]
    of_folder = root / folder.parent / f"test_{folder.name}.py"
    above = [of_folder] if of_folder.is_file() else []
    ignored = [argument for test in names(beside) for argument in ("--ignore", test)]
    rest = [
        "tests",
        *(part for path in (str(folder), *names(above)) for part in ("--ignore", path)),
    ]
    elsewhere = next((ELSEWHERE[path] for path in ELSEWHERE if module.is_relative_to(path)), [])
    asked = [names([*likely, *above]), names(others)]
    if not near:
        asked += [[str(folder), *ignored], rest, elsewhere]
    return [each for each in asked if each]


class Scratch:
    """A copy of the working tree in which one mutant at a time is tried."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
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
                return ALIVE if run.wait(self._seconds) in (0, 5) else NOTICED
            except subprocess.TimeoutExpired:
                return TOO_LONG
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)


def verdict(scratch: Scratch, mutant: Mutant, *, near: bool) -> str:
    """Return what becomes of a mutant; with ``near``, only tests right in its folder are asked."""
    asked = stages(mutant.path, near=near)
    with scratch.mutated(mutant):
        found = (scratch.run(each) for each in asked)
        return next((word for word in found if word != ALIVE), ALIVE)


def _parser() -> argparse.ArgumentParser:
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
        "--near", action="store_true", help="leave out the tests of all other folders: much faster"
    )
    parser.add_argument("--nice", type=int, default=5, help="how much priority to give up (5)")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not ask first whether the tests pass now"
    )
    parser.add_argument("--list", action="store_true", help="print the draw and stop")
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="how long a run of pytest may take (600); a mutant may never end",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    drawn = list(enumerate(draw(options.paths, options.count, options.seed), start=1))
    if options.only:
        wanted = {int(number) for number in options.only.split(",")}
        drawn = [each for each in drawn if each[0] in wanted]
    if options.list:
        for number, mutant in drawn:
            print(f"{number:4} {mutant}")  # noqa: T201
        return
    os.nice(options.nice)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that nothing is left behind
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        scratch = Scratch(Path(folder).resolve(), options.seconds)
        near = {test for _, mutant in drawn for test in stages(mutant.path)[0]}
        if not options.unchecked and scratch.run(sorted(near)) != ALIVE:
            sys.exit("some tests fail without any mutant: run the quick tests first")
        _report(scratch, drawn, near=options.near)


def _report(scratch: Scratch, drawn: Sequence[tuple[int, Mutant]], *, near: bool) -> None:
    words: dict[str, list[str]] = {NOTICED: [], TOO_LONG: [], ALIVE: []}
    for number, mutant in drawn:
        started = time.monotonic()
        word = verdict(scratch, mutant, near=near)
        words[word].append(f"{number:4} {mutant}")
        seconds = time.monotonic() - started
        print(f"{number:4} {word:8} {seconds:5.0f} s  {mutant}", flush=True)  # noqa: T201
    counts = ", ".join(f"{len(found)} {word}" for word, found in words.items())
    print(f"\n{len(drawn)} tried: {counts}", *words[TOO_LONG], *words[ALIVE], sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
