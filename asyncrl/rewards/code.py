"""The reward part `code`: whether a program that the model wrote passes the tests of its row."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from asyncrl.config.rewards import Code, part_name
from asyncrl.config.sizes import size_bytes
from asyncrl.rewards.base import BadRow, Finding
from asyncrl.rewards.code_tests import RowTests, read_tests
from asyncrl.rewards.exact import CUT_OFF
from asyncrl.rewards.sandbox import Ended, Sandbox, SandboxError
from asyncrl.rewards.sandbox_calls import ENDED
from asyncrl.rewards.sandbox_tests import FORBIDDEN, GONE, MEMORY, RUNTIME_ERROR, UNFIT, WRONG_OUTPUT

NO_CODE = "no_code"
SYNTAX_ERROR = "syntax_error"
TIMEOUT = "timeout"
TESTS_NOT_RUN = "tests_not_run"

FENCE = re.compile(r" {0,3}(?P<marks>`{3,})[ \t]*+(?P<language>[\w+-]*+)[^`\n]*+")  # what it took it keeps: linear
LINE_END = re.compile(r"\r\n|\r|\n")  # not those that a string of the program may contain, as U+2028
PYTHON = ("python", "py", "python3", "")

LAST_LINE = {
    "SyntaxError": SYNTAX_ERROR,
    "IndentationError": SYNTAX_ERROR,
    "TabError": SYNTAX_ERROR,
    "MemoryError": MEMORY,
    "PermissionError": FORBIDDEN,
    "OSError: [Errno 27]": "disk_flood",  # EFBIG
}
"""What the last line of a traceback says of the kind of error. A program can print what it likes: it is a class to be
counted by, and no test passes or fails by it."""

Result = tuple[str, str]
"""Of one test: class of what is wrong, "" if it passed, and a detail."""


class CodeTests:
    """Runs the last block of Python of an answer in a sandbox. A Verifier.

    Only tests that ran to their end and passed count. The tests are in no process that runs a line of the answer's.
    Raises Unprotected when it is built on a machine that cannot shut programs in.
    """

    def __init__(self, part: Code) -> None:
        self._name = part_name(part)
        self._part = part
        self._sandbox = Sandbox(memory_bytes=size_bytes(part.memory_limit), modules=part.modules)

    def check(self, row: Mapping[str, Any]) -> None:
        self._tests(row)

    def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        tests = self._tests(row)
        if answer["finish_reason"] != "stop":
            return Finding({self._name: 0.0}, CUT_OFF)
        code = last_block(answer["text"])
        if code is None:
            return Finding({self._name: 0.0}, NO_CODE, "no closed block ```python")
        results = list(self._results(code, tests))
        passed = sum(not wrong for wrong, _ in results)
        failed = next(((wrong, detail) for wrong, detail in results if wrong), None)
        value = passed / tests.count if self._part.score == "share" else float(passed == tests.count)
        if failed is None:
            return Finding({self._name: value})
        for wrong, detail in results:
            if wrong == UNFIT:
                raise BadRow(f"row {row['id']}: {detail}")
        wrong, detail = failed
        of = f"{passed} of {tests.count} tests passed; " if self._part.score == "share" else ""
        return Finding({self._name: value}, wrong, of + detail)

    def close(self) -> None:
        self._sandbox.close()

    def _tests(self, row: Mapping[str, Any]) -> RowTests:
        column = self._part.tests
        named = column in row["info"]
        try:
            return read_tests(row["info"][column] if named else row["answer"])
        except ValueError as error:
            raise BadRow(f"row {row['id']}: {column if named else 'the answer'}: {error}") from None

    def _results(self, code: str, tests: RowTests) -> Iterator[Result]:
        """Of each test in order; without those behind the first that fails, where all have to pass."""
        for result in (self._of_programs if tests.programs else self._of_calls)(code, tests):
            yield result
            if result[0] and self._part.score == "all":
                return

    def _of_programs(self, code: str, tests: RowTests) -> Iterator[Result]:
        deadline = time.monotonic() + self._part.total_timeout_s
        for stdin, stdout in tests.programs:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                yield TIMEOUT, f"all tests took longer than total_timeout_s {self._part.total_timeout_s:g}"
                continue
            ended = self._sandbox.run(code, stdin, limit_s=min(left_s, self._part.test_timeout_s))
            if ended.reason or ended.code != 0:
                yield self._broken(ended)
            elif lines(ended.stdout) != lines(stdout):
                yield WRONG_OUTPUT, f"for {stdin!r:.100} printed {ended.stdout!r:.100}, expected {stdout!r:.100}"
            else:
                yield "", ""

    def _of_calls(self, code: str, tests: RowTests) -> Iterator[Result]:
        deadline = time.monotonic() + self._part.total_timeout_s
        done = 0
        while done < tests.count:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                yield from [(TIMEOUT, "after a test without end")] * (tests.count - done)
                return
            limit_s = min(left_s, self._part.test_timeout_s)
            ended = self._sandbox.test(code, tests.after(done), limit_s=limit_s, total_s=left_s)
            begun = bool(ended.records) and ended.records[0][0] != GONE
            results = [record for record in ended.records[1:] if record[0] != GONE]
            yield from islice(results, tests.count - done)
            done += len(results)
            if done >= tests.count:
                return
            broken = self._unfinished(ended, tests.count - done)
            if not begun or broken is None:
                yield from [broken or results[-1]] * (tests.count - done)
                return
            yield broken  # the next tests get a new process
            done += 1

    def _unfinished(self, ended: Ended, left: int) -> Result | None:
        """Why the tests did not end; None: a setup failed, and what is behind it means nothing."""
        wrong, detail = ended.records[-1] if ended.records else ("", "")
        if ended.reason:
            return self._broken(ended)
        if wrong == GONE:
            if detail != ENDED or ended.code is None:
                return FORBIDDEN, f"the program wrote to the tests' channel, or closed it: {detail}"
            return self._broken(ended) if ended.code else (TESTS_NOT_RUN, f"the program ended with {left} tests left")
        if wrong:
            return None
        raise SandboxError("the process of the tests themselves has ended: one of them ends it, or needs much memory")

    def _broken(self, ended: Ended) -> Result:
        """What is wrong with a program that did not end by itself, or not well."""
        if ended.reason == TIMEOUT:
            limits = f"test_timeout_s {self._part.test_timeout_s:g}, or all than {self._part.total_timeout_s:g} s"
            return TIMEOUT, f"a test took longer than {limits}"
        if ended.reason:
            return ended.reason, f"ended for {ended.reason}"
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        if ended.code is not None and ended.code < 0:
            return RUNTIME_ERROR, f"ended by signal {-ended.code}"
        wrong = next((wrong for begin, wrong in LAST_LINE.items() if last.startswith(begin)), RUNTIME_ERROR)
        return wrong, f"exit code {ended.code}: {last:.300}"


def last_block(text: str) -> str | None:
    """The last fenced block of Python that is closed; None if there is none.

    >>> last_block("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```py\\nx = 2\\n```\\n")
    'x = 2'
    """
    found: str | None = None
    inside: list[str] | None = None
    marks = language = ""
    for line in LINE_END.split(text):
        fence = FENCE.fullmatch(line)
        if inside is None:
            if fence:
                marks, language, inside = fence["marks"], fence["language"].lower(), []
        elif fence and not fence["language"] and len(fence["marks"]) >= len(marks):
            if language in PYTHON:
                found = "\n".join(inside)
            inside = None
        else:
            inside.append(line)
    return found


def lines(output: str) -> list[str]:
    """An output as it is compared: without white space at the ends of lines, and without empty lines at its end."""
    return "\n".join(line.rstrip() for line in output.split("\n")).rstrip().split("\n")
