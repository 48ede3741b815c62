"""Tests and the answer that they call are in two processes: what crosses between them, and what does not."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards.sandbox import Sandbox
from asyncrl.rewards.sandbox_calls import Gone, Handle, NotGiven, Peer
from asyncrl.rewards.sandbox_tests import same

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers())
PLAIN = st.recursive(
    KEYS
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


def crossed(value: object, *, opened: bool = True) -> Any:
    """A value as it arrives on the other side."""
    sent = json.loads(json.dumps(Peer(-1, opened=opened).encoded(value)))
    return Peer(-1, opened=not opened).decoded(sent)


@given(PLAIN)
def test_plain_data_crosses_unchanged_with_its_types(value: object) -> None:
    arrived = crossed(value)
    assert arrived == value
    assert repr(arrived) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple | deque)


def test_of_a_subclass_the_data_crosses() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Text(str):
        pass

    point = namedtuple("point", "x y")
    values = [Liar(3), Text("a"), Counter("aab"), OrderedDict(a=1), point(1, 2), True]
    arrived = crossed(values)
    assert arrived == [3, "a", {"a": 2, "b": 1}, {"a": 1}, (1, 2), True]
    assert [type(value) for value in arrived] == [int, str, dict, dict, tuple, bool]


def test_numbers_that_json_has_not_cross() -> None:
    assert math.isnan(crossed(math.nan))
    assert crossed([math.inf, -math.inf, 10**5000, -(1 << 63)]) == [math.inf, -math.inf, 10**5000, -(1 << 63)]
    assert math.copysign(1, crossed(-0.0)) == -1


def test_other_numbers_cross_too() -> None:
    values = [Fraction(1, 3), Decimal("0.10"), Decimal("NaN"), range(5, 1, -2), numpy.int8(3), numpy.float32(0.5)]
    arrived = crossed([*values, numpy.bool_(True)])
    assert repr(arrived) == repr([*values[:4], 3, 0.5, True])


def test_times_cross_with_an_offset_and_not_with_a_zone_of_their_own() -> None:
    class Zone(tzinfo):
        def utcoffset(self, when: datetime | None) -> timedelta:
            return timedelta(hours=1)

    assert crossed(datetime(2026, 1, 2, fold=1)).fold == 1
    for zone in (UTC, timezone(timedelta(hours=-3))):
        arrived = crossed(datetime(2026, 1, 2, 3, tzinfo=zone))
        assert (arrived, arrived.utcoffset()) == (datetime(2026, 1, 2, 3, tzinfo=zone), zone.utcoffset(None))
    assert isinstance(crossed(datetime(2026, 1, 2, tzinfo=Zone())), Handle)


def test_types_that_are_built_in_are_given_by_tests_and_are_handles_of_an_answer() -> None:
    assert crossed([int, ValueError], opened=False) == [int, ValueError]
    assert isinstance(crossed(int), Handle)
    with pytest.raises(Gone):
        Peer(-1, opened=False).decoded({"k": "int"})
    for name in ("eval", "no_such_type", 3):
        with pytest.raises(Gone):
            Peer(-1, opened=True).decoded({"k": name})


def test_anything_else_is_a_handle_that_equals_no_data() -> None:
    arrived = crossed(object())
    assert isinstance(arrived, Handle)
    assert arrived != 0
    assert arrived != object()


@pytest.mark.parametrize(
    "sent",
    [
        {"x": 1},
        {"w": ["date", "x", 0]},
        {"w": ["eval", "1", 0]},
        {"w": ["time", "10:00", 2]},
        {"l": ["x"]},
        {"e": [1]},
        {"mine": math.inf},
        {},
        {"i": "zz"},
        {"t": 5},
        {"s": [[]]},
        {"b": "0"},
        {"yours": 0},
        {"a": 1, "b": 2},
        {"d": [[1]]},
        {"q": [1, 0]},
        {"n": "x"},
        {"r": [0, 1, 0]},
    ],
)
def test_what_nobody_sends_ends_the_tests(sent: object) -> None:
    with pytest.raises(Gone):
        Peer(-1, opened=False).decoded(sent)


def test_tests_give_data_and_functions_and_nothing_that_can_be_looked_into() -> None:
    with pytest.raises(NotGiven, match="data and functions"):
        Peer(-1, opened=False).encoded(object())


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        *((1, 1, True), (1, 1.0, True), (1, True, False), (True, True, True), (1, 0, False), (0.1 + 0.2, 0.3, True)),
        *(
            ((1, [2]), [1, [2]], True),
            ([1], [1, 2], False),
            ({1: "a"}, {"1": "a"}, True),
            ({1: 2, "1": 2}, {"1": 2}, False),
        ),
        *((None, None, True), ("1", 1, False), (math.nan, math.nan, False), ({1}, [1], False), ("a", "a", True)),
        *((10**400, 10**400, True), (10**400, 1.5, False), (math.inf, 1e308, False), (math.inf, math.inf, True)),
    ],
)
def test_a_value_is_what_json_expects(found: object, expected: object, is_same: bool) -> None:
    assert same(found, expected) is is_same


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(memory_bytes=256 << 20) as sandbox:
        yield sandbox


ANSWER = """
class Point:
    def __init__(self, x): self.x = x
    def __add__(self, other): return Point(self.x + other.x)
    def __eq__(self, other): return self.x == other.x
    def __lt__(self, other): return self.x < other.x
    def __len__(self): return self.x
    def __getitem__(self, n):
        if n >= self.x: raise IndexError(n)
        return n * 10
    def moved(self, *, by): return Point(self.x + by)
class Odd(ValueError): pass
def sort(items): items.sort()
def forget(known): known.clear()
def stop(n): raise StopIteration
class Empty:
    def __iter__(self): return self
    def __next__(self): raise StopIteration
def rotate(queue, *, by): queue.rotate(by)
class Card:
    def __init__(self): self._number, self._peer = 7, 8
ONE = Card()
def one(): return ONE
class Slow:
    def __init__(self): self.calls = 0
    def call(self, text):
        self.calls += 1
        return text
def count(n):
    while True:
        yield n
        n += 1
def apply(function, *arguments): return function(*arguments)
def refuse(n): raise Odd(f"{n} is odd")
def leave(n): raise SystemExit(n)
def look(function): return function._asyncrl_peer.ask("get", function._asyncrl_number, "__globals__")
def read(function): return function.secret
def deep(n):
    found = []
    for _ in range(n): found = [found]
    return found
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert Point(1) + Point(2) == Point(3) and not Point(1) == Point(2)",
        "assert Point(1) < Point(2)",
        "assert sorted([Point(2), Point(1)])[0].x == 1",
        "assert len(Point(3)) == 3 and list(Point(3)) == [0, 10, 20] and Point(3)[2] == 20 and 20 in Point(3)",
        "assert Point(1).moved(by=4).x == 5",
        "p = Point(1)\np.x = 7\nassert p.x == 7",
        "assert Point != 3 and Point != 'Point' and Point == Point",
        "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
        "known = {1: 2}\nforget(known)\nassert known == {}",
        "items = [3, 1, 2]\nsort(items=items)\nassert items == [1, 2, 3]",
        "from collections import defaultdict\nd = defaultdict(int, a=1)\nforget(d)\nassert d == {} and d[0] == 0",
        "from collections import deque\nq = deque([1, 2, 3], 3)\nrotate(q, by=1)\nassert q == deque([3, 1, 2])",
        "assert one() is one() and one() is not Card() and (Card()._number, Card()._peer) == (7, 8)",
        "import copy\np = Point(1)\nq, r = copy.copy(p), copy.deepcopy([p])[0]\np.x = 2\nassert q.x == r.x == 1",
        "from threading import Thread\nslow, found = Slow(), []\n"
        "def go(n):\n    for _ in range(50): found.append(slow.call(n * 'x') == n * 'x')\n"
        "threads = [Thread(target=go, args=(n,)) for n in range(8)]\n"
        "for thread in threads: thread.start()\nfor thread in threads: thread.join()\n"
        "assert all(found) and len(found) == slow.calls == 400",
        "counting = count(5)\nassert [next(counting), next(counting)] == [5, 6]",
        "from itertools import islice\nassert list(islice(count(1), 3)) == [1, 2, 3]",
        "assert apply(lambda x, y: x * y, 6, 7) == 42",
        "try:\n    refuse(3)\n    assert False\nexcept ValueError as error:\n    assert str(error) == '3 is odd'",
        "try:\n    apply(refuse, 5)\n    assert False\nexcept ValueError as error: assert str(error) == '5 is odd'",
        "try:\n    apply(lambda: 1 / 0)\n    assert False\nexcept ZeroDivisionError: pass",
        "try:\n    leave(0)\n    assert False\nexcept Exception as error:\n    assert 'SystemExit' in str(error)",
        "try:\n    all(map(stop, [1]))\n    assert False\nexcept Exception as e: assert 'StopIteration' in str(e)",
        "try:\n    next(iter(count(1)))\n    next(Empty())\n    assert False\nexcept StopIteration: pass",
        "try:\n    deep(100_000)\n    assert False\nexcept RecursionError: pass",
    ],
)
def test_what_tests_do_with_an_answers_own_objects_works(sandbox: Sandbox, test: str) -> None:
    ended = sandbox.test(ANSWER, [["test", test]], limit_s=30, total_s=60)
    assert ended.records == (("", ""), ("", ""))


def test_an_answer_cannot_have_a_library_read_memory_of_the_tests() -> None:
    answer = (
        "import ctypes\n"
        "held = (ctypes.c_double * 2)(1.0, 2.0)\n"
        "class Array:\n"
        "    __array_interface__ = {\n"
        "        'shape': (2,), 'typestr': '<f8', 'version': 3, 'data': (ctypes.addressof(held), True)\n"
        "    }\n"
        "def f(): return Array()"
    )
    tests = [["setup", "import numpy"], ["test", "assert numpy.asarray(f()).dtype == object"]]
    with Sandbox(memory_bytes=256 << 20, modules=["numpy"]) as sandbox:
        assert sandbox.test(answer, tests, limit_s=30, total_s=60).records == (("", ""), ("", ""))


@pytest.mark.parametrize("attempt", ["look", "read"])
def test_an_answer_cannot_look_into_a_function_that_a_test_gives_it(sandbox: Sandbox, attempt: str) -> None:
    test = f"expected = 42\ndef function(): pass\nfunction.secret = 42\nassert {attempt}(function)"
    ended = sandbox.test(ANSWER, [["test", test]], limit_s=30, total_s=60)
    assert ended.records[1] == ("runtime_error", f"TypeError: only calls are answered, in {test}")
