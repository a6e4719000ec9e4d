"""Runs steps one after another: each with a limit of time, its output in a log, and its result in a JSON file at once.

A step ends with its whole process group. A step that fails does not stop the next ones, unless they need its result.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import figures

PASSED, SLOW, FAILED, HUNG, NOT_RUN = "passed", "slow", "failed", "hung", "not run"
#: Beginning of the reason of a step that was not run because the machine lacks a part; reason of one that no time was left for.
MISSING, NO_TIME = "missing: ", "no time is left"
#: Seconds between the signal that makes Python show where it is, and the signal that no process survives.
GRACE = 3.0
#: Bytes of a step's output that go to the log; a broken program can write for ever.
MOST_OUTPUT = 1 << 20
#: Last lines of a step that did not pass, for the JSON.
TAIL_LINES = 60


@dataclass
class Result:
    """The result of a step."""

    step: str
    outcome: str
    seconds: float = 0.0
    limit_seconds: float = 0.0
    status: int | None = None
    reason: str = ""
    command: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    tail: list[str] = field(default_factory=list)

    def line(self) -> str:
        """For people."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.step:12} {self.outcome:9} {self.seconds:4.0f} of {self.limit_seconds:.0f} s{reason}"


Results = Mapping[str, Result]


def nothing(results: Results) -> str:
    """The reason why a step cannot run that needs no other step."""
    return ""


def nothing_more(results: Results) -> tuple[str, ...]:
    """No further words of a command."""
    return ()


@dataclass(frozen=True)
class Step:
    """A command with a time limit.

    Args:
        seconds: the least time that the step may take. It gets the time too that earlier steps left.
        needs: returns the reason why the step cannot run after these results, or "".
        more: returns further figures when the step has ended.
        words: returns further words of the command, from the results.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: Callable[[Results], str] = nothing
    more: Callable[[], dict[str, Any]] = dict
    words: Callable[[Results], tuple[str, ...]] = nothing_more


class Runner:
    """Runs steps in a folder.

    Args:
        total: seconds for all steps.
        log: gets the output of every step.
        save: called with the results so far, after every step.
    """

    def __init__(
        self,
        total: float,
        folder: Path,
        log: Path,
        environment: Mapping[str, str],
        save: Callable[[list[Result]], None],
    ) -> None:
        self._total, self._folder, self._log, self._save = total, folder, log, save
        self._environment = dict(environment)

    def run(self, steps: Sequence[Step]) -> list[Result]:
        """Run all steps, and return a result for each."""
        begin, results = time.monotonic(), dict[str, Result]()
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with self._log.open("a") as log:
            for at, step in enumerate(steps):
                later = sum(step.seconds for step in steps[at + 1 :])
                left = self._total - (time.monotonic() - begin)
                limit = min(left, max(step.seconds, left - later))
                results[step.name] = self._result(step, limit, results, log)
                _say(results[step.name].line(), log)
                self._save(list(results.values()))
        return list(results.values())

    def _result(self, step: Step, limit: float, results: Results, log: IO[str]) -> Result:
        result = Result(step.name, NOT_RUN, limit_seconds=round(limit, 1), command=shlex.join(step.command))
        result.reason = step.needs(results) or ("" if limit > 1 else NO_TIME)
        if result.reason:
            return result
        command = (*step.command, *step.words(results))
        result.command = shlex.join(command)
        _say(f"\n# {step.name}, {limit:.0f} s: {result.command}", log)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ds_zipccl-gpu-") as scratch:
            path = Path(scratch) / "figures.json"
            try:
                self._watch(command, limit, path, log, result)
            except OSError as error:
                result.outcome, result.reason = FAILED, f"the step could not be started: {error}"
            result.figures = figures.read(path)
        result.seconds = round(time.monotonic() - start, 2)
        try:
            result.figures |= step.more()
        except Exception as error:  # a figure less, and no step less
            result.figures["unread"] = f"{type(error).__name__}: {error}"
        if result.outcome == PASSED:
            result.tail = []
        return result

    def _watch(self, command: Sequence[str], limit: float, path: Path, log: IO[str], result: Result) -> None:
        process = subprocess.Popen(
            command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, env=self._environment | {figures.VARIABLE: str(path), figures.LIMIT: f"{limit:.1f}"},
        )  # fmt: skip
        tail, start = deque[str](maxlen=TAIL_LINES), time.time()
        said = [start]
        reader = threading.Thread(target=_copy, args=(process.stdout, log, tail, said), daemon=True)
        reader.start()
        try:
            result.status = process.wait(limit)
            result.outcome = {0: PASSED, figures.SLOW: SLOW}.get(result.status, FAILED)
            if result.outcome == SLOW:
                result.reason = "a floor or a budget of time was missed"
            elif result.status:
                result.reason = f"status {result.status}"
        except subprocess.TimeoutExpired:
            wrote = path.stat().st_mtime if path.exists() else start
            hangs, result.reason = figures.overdue(time.time() - max(said[0], wrote), limit)
            result.outcome = HUNG if hangs else SLOW
        finally:
            end_tree(process)  # also what a step left behind
        reader.join(GRACE)  # a process that escaped could hold the pipe open
        result.tail = list(tail)


def end_tree(process: subprocess.Popen[Any]) -> None:
    """End a process, its descendants and the groups of all of them. Python programs first show where they are."""
    running = process.poll() is None
    everyone = {process.pid, *descendants(process.pid)} if running else set()
    groups = {group for pid in everyone if (group := _group(pid)) not in (None, os.getpgrp())} | {process.pid}
    if running:
        _signal(everyone, groups, signal.SIGABRT)  # Python's faulthandler prints the stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    _signal(everyone, groups, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> set[int]:
    """Processes that ``pid`` started, and those that these started, which still run."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _group(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


def _signal(processes: set[int], groups: set[int], number: int) -> None:
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, number)
    for pid in processes:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) not in groups:
                os.kill(pid, number)


def _copy(output: IO[str], log: IO[str], tail: deque[str], said: list[float]) -> None:
    """Copy lines to the log and to the terminal until the output ends. ``said`` gets the time of the last one."""
    written = 0
    for line in output:
        said[0] = time.time()
        tail.append(line.rstrip("\n")[:500])
        written += len(line)
        if written <= MOST_OUTPUT:
            _say(line.rstrip("\n"), log)
        elif written - len(line) <= MOST_OUTPUT:
            _say("... more output than the log takes", log)


def _say(line: str, log: IO[str]) -> None:
    print(line, flush=True)
    log.write(line + "\n")
    log.flush()


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results for a JSON file; without the parts that are empty."""
    return [
        {key: value for key, value in asdict(result).items() if value not in ("", None, [], {})} for result in results
    ]
