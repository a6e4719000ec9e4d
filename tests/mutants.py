"""Random mutations of the package by cosmic-ray, each against the tests of its own subject. What survives lacks a test, or has a reason.

python tests/mutants.py --seed 28 --count 100 --out out/mutants     # again with the same words: goes on where it ended
python tests/mutants.py --seed 28 --count 100 --out out/mutants --show

A mutation is a line of ``comm``, ``policy``, ``integration`` or ``codecs``, drawn with equal chances, and one change of that line, drawn
too. The tests run in a clone of the commit. The test files that name the changed module and function most often run first, and further
files of the subject's folders until ``--seconds`` are over. Annotations are left out: the interpreter never evaluates them here.

A test that fails with the mutation runs again without it, so that a test that fails anyway catches nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from places import IMPORTED, ROOT
from tqdm import tqdm

#: Folders of tests by the folder of the package, the longest name that fits counts.
SUBJECTS = {
    "codecs": ("codec",),
    "policy": ("comm", "cli"),
    "comm": ("comm",),
    "comm/device": ("on_sim", "comm"),
    "comm/bases": ("comm", "integration"),
    "integration": ("integration",),
}
PACKAGE = Path("ds_zipccl")
#: Test files that start together: their processes share the time of imports.
AT_ONCE = 2
#: Seconds after which a test counts as hanging.
HANGS = 180


def annotated(source: str) -> set[int]:
    """Return the lines of a source that hold annotations of arguments and results, or import names for them alone."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.args, *node.args.posonlyargs, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            parts = [node.returns, *(one.annotation for one in every if one is not None)]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        for part in parts:
            if part is not None:
                lines.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return lines


def mutations(module: Path) -> Iterator[tuple[str, str, int, int, str]]:
    """Yield the mutations of a module: its path, the operator, its occurrence, the line, and the function or class around it."""
    source = module.read_text(encoding="utf-8")
    skipped, tree = annotated(source), get_ast(source)
    owners = [
        (node.lineno, node.end_lineno or 0, node.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments() or name.endswith("NoOp"):
            continue
        operator = kind()
        places = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, (line, _) in enumerate(places):
            if line not in skipped:
                around = " ".join(owner for first, last, owner in owners if first <= line <= last)
                yield str(module.relative_to(ROOT)), name, occurrence, line, around


def drawn(seed: int, count: int) -> list[tuple[str, str, int, int, str]]:
    """Return ``count`` mutations of different lines: a function of the seed and of the sources."""
    by_line: dict[tuple[str, int], list[tuple[str, str, int, int, str]]] = {}
    for folder in ("codecs", "comm", "integration", "policy"):
        for module in sorted((ROOT / PACKAGE / folder).rglob("*.py")):
            for one in mutations(module):
                by_line.setdefault((one[0], one[3]), []).append(one)
    chance = random.Random(seed)
    return [chance.choice(by_line[line]) for line in chance.sample(sorted(by_line), count)]


def test_files(module: str, around: str) -> list[Path]:
    """Return the files with tests of a module's subject, those that name it most often first."""
    within = Path(module).relative_to(PACKAGE)
    subject = max((name for name in SUBJECTS if within.is_relative_to(name)), key=len)
    dotted = ".".join((PACKAGE / within).with_suffix("").parts)
    imported = f"from {dotted.rpartition('.')[0]} import"
    words = set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", f"{within.stem} {around}").lower()))
    scores: list[tuple[int, str, Path]] = []
    for order, folder in enumerate(SUBJECTS[subject]):
        for path in (ROOT / "tests" / folder).glob("test_*.py"):
            text = path.read_text(encoding="utf-8")
            named = any(re.search(rf"\b{within.stem}\b", line) for line in text.splitlines() if imported in line)
            score = 40 * (path.stem == f"test_{within.stem}") + 20 * (named or dotted in text) - order
            score += 12 * len(words & set(path.stem.split("_")))
            score += min(10, len(re.findall(rf"\b{within.stem}\b", text)))
            for name in around.split():
                score += 0 if name.startswith("__") else min(5, len(re.findall(rf"\b{name}\b", text)))
            scores.append((-score, str(path), path))
    return [path for *_, path in sorted(scores)]


def run(tree: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """Run tests in a clone, up to the first failure. Returns ``failed`` with the test, ``passed``, or ``late`` when the time was over."""
    folders = os.pathsep.join(str(tree / folder.relative_to(ROOT)) for folder in IMPORTED)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={HANGS}", "-rf"]
    command += ["-m", "not full and not alone and not network", *tests]
    env = {**os.environ, "PYTHONPATH": folders, "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen(
        command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "late", ""
    if child.returncode in (0, 5):  # 5: no test
        return "passed", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::[^\n]*?)?)(?: - .*)?$", output, re.MULTILINE)
    return "failed", failed[0] if failed else output[-400:]


def judge(tree: Path, mutation: tuple[str, str, int, int, str], seconds: float) -> dict[str, Any]:
    """Apply a mutation in a clone, run the tests of its subject, and restore the file. Returns the outcome."""
    module, operator, occurrence, line, around = mutation
    path, began = tree / module, time.monotonic()
    source = path.read_text(encoding="utf-8")
    mutated = mutate_code(source, cosmic_ray.plugins.get_operator(operator)(), occurrence)
    changed = [pair for pair in zip(source.splitlines(), mutated.splitlines(), strict=False) if pair[0] != pair[1]]
    files = [str(file.relative_to(ROOT)) for file in test_files(module, around)]
    outcome, caught, ran = "survived", "", 0
    while files[ran:] and outcome == "survived" and (left := seconds - (time.monotonic() - began)) > 0:
        some, limit = files[ran : ran + AT_ONCE], max(left, 2 * HANGS if ran == 0 else 0)
        path.write_text(mutated, encoding="utf-8")
        try:
            result, test = run(tree, some, limit)
        finally:
            path.write_text(source, encoding="utf-8")
        if result == "failed":
            again, _ = run(tree, [test], limit) if "::" in test else ("passed", "")
            outcome, caught = (
                ("killed", test) if again == "passed" else ("unclear", f"{test} fails without the mutation too")
            )
        ran += len(some)
    return {
        "module": module,
        "line": line,
        "operator": operator,
        "occurrence": occurrence,
        "change": [list(pair) for pair in changed[:1]],
        "outcome": outcome,
        "test": caught,
        "files": ran,
        "seconds": round(time.monotonic() - began),
    }


def show(found: list[dict[str, Any]]) -> None:
    """Print the counts, and each mutation that no test caught."""
    counts = {name: sum(one["outcome"] == name for one in found) for name in ("killed", "survived", "unclear")}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    for one in found:
        if one["outcome"] != "killed":
            print(
                f"\n{one['module']}:{one['line']} {one['operator']}: {one['outcome']} {one['test']} ({one['files']} files)"
            )
            for before, after in one["change"]:
                print(f"  - {before.strip()}\n  + {after.strip()}")


def main() -> None:
    """Draw mutations, judge those that an earlier run has not judged, and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=240, help="of tests for a mutation")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants")
    parser.add_argument("--show", action="store_true", help="print what was found so far, and run nothing")
    options = parser.parse_args()

    results = options.out / f"seed-{options.seed}.jsonl"
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if not options.show:
        tree = options.out / "tree"
        if not tree.exists():
            subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(tree)], check=True)
        subprocess.run(
            ["git", "-C", str(tree), "checkout", "-q", "."], check=True
        )  # a run that was ended leaves its mutation
        known = {(one["module"], one["operator"], one["occurrence"]) for one in found}
        todo = [one for one in drawn(options.seed, options.count) if one[:3] not in known]
        for mutation in tqdm(todo, desc="mutations", file=sys.stderr):
            found.append(judge(tree.resolve(), mutation, options.seconds))
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")
    show(found)


if __name__ == "__main__":
    main()
