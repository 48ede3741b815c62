"""How tests call an answer's functions without ever being in one process with its code.

Code that runs beside its tests can always cheat them: it reads what is expected from their frames, patches what they
compare with, or ends the process as if all were done. So the tests run in a process of their own, and call over a
socket. What comes back is decoded as plain data of exact types; everything else is a `Handle`, which equals no data,
whatever its class says of itself. The answer's process sees the arguments of its own functions, and nothing else.

| crosses as                      | what                                                                            |
|---------------------------------|---------------------------------------------------------------------------------|
| a copy                          | None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, |
|                                 | range, deque, Decimal, Fraction, date, datetime, time, timedelta; of subclasses |
|                                 | the data; of a NumPy scalar too; of what a test gives, types that are built in  |
| a copy, and back after the call | an argument that is a list, dict, set, deque or bytearray: functions change     |
|                                 | them                                                                            |
| a handle, one for each object   | functions, classes, instances, iterators                                        |
"""

from __future__ import annotations

import builtins
import copy
import json
import operator
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

HEADER = struct.Struct(">I")
LARGEST_MESSAGE = 16 << 20  # bytes
LARGEST_PLAIN_INT = 1 << 63  # larger ones as hexadecimal: decimal takes quadratic time, and Python limits it

ENDED = "ended"  # why it is gone, as far as that can be seen here

Message = list[Any]

CHANGED = (list, dict, set, deque, bytearray)
TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
WHEN: Mapping[str, Any] = {"datetime": datetime, "date": date, "time": time}  # a datetime is a date as well

OF_ONE: Mapping[str, Callable[..., Any]] = {
    **{"__len__": len, "__iter__": iter, "__next__": next, "__bool__": bool, "__str__": str, "__repr__": repr},
    **{"__int__": int, "__float__": float, "__abs__": abs, "__getitem__": operator.getitem},
    **{"__setitem__": operator.setitem, "__delitem__": operator.delitem},
    **{"__copy__": copy.copy, "__deepcopy__": copy.deepcopy},
}
"""What may be asked of a handle: the answer's process says a value, and does not know which one is right."""

AMONG: Mapping[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "and", "or", "xor")
}
"""Only among handles: an object that is less than everything, or 0.0 away from it, would pass `abs(f() - 2) < 1e-9`.
For the same reason `in` is not asked: Python then looks at one item after the other."""


class Gone(BaseException):
    """The other side has ended, or sends what it cannot mean. No Exception: a test that expects one must not see it."""


class Foreign(Exception):
    """An exception of a class that is not built in was raised on the other side."""


class NotGiven(TypeError):
    """A test gives an answer what cannot be given to one."""


class Handle:
    """Something on the other side. Compared, it equals itself, and what its own side says, among handles only. Its own
    two attributes have names that no answer gives to one of its objects'."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__.update(_asyncrl_peer=peer, _asyncrl_number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._asyncrl_peer.call(self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Libraries ask for these, and believe what they say: with an `__array_interface__`, NumPy would take any
            # place in this process's memory for the answer's array.
            raise AttributeError(f"{name} of an object of the answer's is not asked for")
        return self._asyncrl_peer.ask("get", self._asyncrl_number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._asyncrl_peer.ask("set", self._asyncrl_number, name, self._asyncrl_peer.encoded(value))

    def __deepcopy__(self, memo: object) -> Any:
        return self._asyncrl_peer.ask("do", self._asyncrl_number, "__deepcopy__", [])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            return False
        own, others = self._asyncrl_number, other._asyncrl_number
        return own == others or bool(self._asyncrl_peer.ask("equal", own, others))

    def __hash__(self) -> int:
        return int(self._asyncrl_number)


def _asking(name: str) -> Callable[..., Any]:
    def ask(self: Handle, *arguments: Any) -> Any:
        if name in AMONG and not all(isinstance(argument, Handle) for argument in arguments):
            return NotImplemented
        peer = self._asyncrl_peer
        return peer.ask("do", self._asyncrl_number, name, [peer.encoded(argument) for argument in arguments])

    return ask


for _name in {*OF_ONE, *AMONG} - {"__deepcopy__"}:
    setattr(Handle, _name, _asking(_name))


class Peer:
    """One end of the socket `channel`, a descriptor. `opened`: the other end may look into this end's objects; else it
    may only call the functions that it is given: from a test's function, attributes lead to all that its module
    knows."""

    def __init__(self, channel: int, *, opened: bool) -> None:
        self._channel = channel
        self._opened = opened
        self._objects: list[Any] = []  # by number; kept: the process is short-lived
        self._numbers: dict[int, int] = {}  # id of an object -> its number
        self._handles: dict[int, Handle] = {}  # by number: what is one object there is one here
        self._turn = threading.RLock()  # threads of a test ask one after the other
        self.raised: BaseException | None = None  # the last exception that came from the other side

    def call(self, handle: Handle, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call a function of the other side; then bring back what it did to its arguments. Raises what it raised."""
        given = [self.encoded(argument) for argument in arguments]
        keywords = [[name, self.encoded(value)] for name, value in named.items()]
        with self._turn:
            result, changed = self._exchange(["call", handle._asyncrl_number, given, keywords])
        places: dict[object, Any] = dict(enumerate(arguments))
        places.update(named)
        for place, state in changed:
            if isinstance(place, int | str) and place in places:
                _become(places[place], self.decoded(state))
        return self.decoded(result)

    def ask(self, kind: str, *parts: Any) -> Any:
        """Ask something else about an object of the other side."""
        with self._turn:
            result, _ = self._exchange([kind, *parts])
        return self.decoded(result)

    def serve(self) -> None:
        """Answer the other side until it ends."""
        while (message := self._receive(end=True)) is not None:
            self._send(self._answer(message))

    def send_names(self, names: Mapping[str, Any]) -> None:
        """Offer what a module has, by name."""
        self._send(["names", [[name, self.encoded(value)] for name, value in names.items()]])

    def receive_names(self) -> dict[str, Any]:
        """What the other side's module has, but nothing in place of what is built in: with an `abs` of its own, an
        answer would be as near to every number as tests want. Raises Gone."""
        message = self._receive()
        try:
            kind, names = message or []
            if kind != "names":
                raise ValueError(kind)
            hidden = dir(builtins)  # with all that begins with two underscores: the namespace is a module's
            offered = [(str(name), value) for name, value in names if name not in hidden]
            return {name: self.decoded(value) for name, value in offered if not name.startswith("__")}
        except (ValueError, TypeError) as error:
            raise Gone(f"not its names: {error}") from None

    def _exchange(self, message: Message) -> tuple[Any, Any]:
        self._send(message)
        while True:
            reply = self._receive() or []
            match reply:
                case ["value", result, list(changed)]:
                    return result, changed
                case ["raised", "StopIteration", str(text)] if message[0] == "call":
                    # Of a function that `map` calls it would end the loop, and with it all that is tested there.
                    self.raised = Foreign(f"StopIteration: {text}".rstrip(": "))
                    raise self.raised
                case ["raised", str(kind), str(text)]:
                    self.raised = _exception(kind, text)
                    raise self.raised
                case ["call" | "get" | "set" | "equal" | "do", *_]:  # of what this side gave as an argument
                    self._send(self._answer(reply))
                case _:
                    raise Gone("not a reply")

    def _answer(self, message: Message) -> Message:
        try:
            match message:
                case ["call", int(number), list(given), list(named)]:
                    arguments = [self.decoded(value) for value in given]
                    keywords = {name: self.decoded(value) for name, value in named}
                    result = self._object(number)(*arguments, **keywords)
                    places: list[tuple[int | str, Any, Any]] = [
                        *((n, before, arguments[n]) for n, before in enumerate(given)),
                        *((name, before, keywords[name]) for name, before in named),
                    ]
                    changed = [
                        [place, after]
                        for place, before, argument in places
                        if isinstance(argument, CHANGED) and (after := self.encoded(argument)) != before
                    ]
                    return ["value", self.encoded(result), changed]
                case ["get", int(number), str(name)] if self._opened:
                    return ["value", self.encoded(getattr(self._object(number), name)), []]
                case ["set", int(number), str(name), value] if self._opened:
                    setattr(self._object(number), name, self.decoded(value))
                    return ["value", None, []]
                case ["equal", int(number), int(other)] if self._opened:
                    return ["value", bool(self._object(number) == self._object(other)), []]
                case ["do", int(number), str(name), list(given)] if self._opened:
                    result = {**OF_ONE, **AMONG}[name](self._object(number), *(self.decoded(value) for value in given))
                    return ["value", self.encoded(result), []]
            raise TypeError("only calls are answered")
        except Gone:
            raise
        except BaseException as error:  # sys.exit() in a function is no end of the tests
            text = str(error)[:500] if not isinstance(error, StopIteration) else ""
            kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
            return ["raised", kind if kind not in ("Exception", "BaseException") else type(error).__name__, text]

    def encoded(self, value: Any) -> Any:
        """As JSON: data, or the number of an object. Raises RecursionError for data without end."""
        if value is None or isinstance(value, bool | str):
            return value if value is None or isinstance(value, bool) else str.__str__(value)
        if isinstance(value, int):
            number = int.__index__(value)
            return number if -LARGEST_PLAIN_INT < number < LARGEST_PLAIN_INT else {"i": hex(number)}
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, Handle):
            return {"yours": value._asyncrl_number}
        if isinstance(value, complex):
            return {"c": [value.real, value.imag]}
        if isinstance(value, bytes | bytearray):
            return {"b" if isinstance(value, bytes) else "a": value.hex()}
        if isinstance(value, list):
            return [self.encoded(item) for item in list.__iter__(value)]
        if isinstance(value, dict):
            return {"d": [[self.encoded(key), self.encoded(item)] for key, item in dict.items(value)]}
        if isinstance(value, tuple):
            return {"t": [self.encoded(item) for item in tuple.__iter__(value)]}
        if isinstance(value, set):
            return {"s": [self.encoded(item) for item in set.__iter__(value)]}
        if isinstance(value, frozenset):
            return {"f": [self.encoded(item) for item in frozenset.__iter__(value)]}
        if isinstance(value, range):
            return {"r": [self.encoded(number) for number in (value.start, value.stop, value.step)]}
        if isinstance(value, deque):
            return {"e": [[self.encoded(item) for item in deque.__iter__(value)], value.maxlen]}
        if isinstance(value, date | time) and type(getattr(value, "tzinfo", None)) in (type(None), timezone):
            name, kind = next((name, kind) for name, kind in WHEN.items() if isinstance(value, kind))
            return {"w": [name, kind.isoformat(value), getattr(value, "fold", 0)]}
        if isinstance(value, timedelta):
            return {"l": [value.days, value.seconds, value.microseconds]}
        if not self._opened and isinstance(value, type) and TYPES.get(getattr(value, "__name__", "")) is value:
            return {"k": value.__name__}  # not of an answer's: with `Error = ValueError` it would be a class to tests
        if isinstance(value, Decimal):
            return {"n": Decimal.__str__(value)}
        if isinstance(value, Fraction):
            return {"q": [self.encoded(value.numerator), self.encoded(value.denominator)]}
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a NumPy scalar
            return self.encoded(value.item())
        if not self._opened and not callable(value):
            raise NotGiven(f"a test can give data and functions to an answer, not a {type(value).__name__}")
        return {"mine": self._number(value)}

    def decoded(self, value: Any) -> Any:
        """What `encoded` made of it on the other side. Raises Gone for what it never makes."""
        try:
            if isinstance(value, list):
                return [self.decoded(item) for item in value]
            if not isinstance(value, dict):
                return value
            ((tag, content),) = value.items()
            return self._decoders()[tag](content)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise Gone(f"not a value: {type(error).__name__}: {error}") from None

    def _decoders(self) -> dict[str, Callable[[Any], Any]]:
        def items(content: Iterable[Any]) -> Iterable[Any]:
            return map(self.decoded, content)

        return {
            "i": lambda content: int(content, 16),
            "c": lambda content: complex(*map(float, content)),
            "b": bytes.fromhex,
            "a": bytearray.fromhex,
            "d": lambda content: {self.decoded(key): self.decoded(item) for key, item in content},
            "t": lambda content: tuple(items(content)),
            "r": lambda content: range(*items(content)),
            "n": Decimal,
            "q": lambda content: Fraction(*items(content)),
            "s": lambda content: set(items(content)),
            "f": lambda content: frozenset(items(content)),
            "e": lambda content: deque(items(content[0]), content[1]),
            "w": _when,
            "l": lambda content: timedelta(*content),
            **({"k": TYPES.__getitem__} if self._opened else {}),
            "mine": lambda content: self._handles.setdefault(int(content), Handle(self, int(content))),
            "yours": self._object,
        }

    def _object(self, number: int) -> Any:
        return self._objects[number]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _send(self, message: Message) -> None:
        try:
            body = json.dumps(message).encode()
            if len(body) > LARGEST_MESSAGE:
                raise ValueError(f"it has {len(body)} bytes as JSON, and {LARGEST_MESSAGE} can be sent")
        except (ValueError, RecursionError) as error:  # the latter: deeper than JSON is written
            if message[0] != "value":
                raise
            body = json.dumps(["raised", type(error).__name__, f"what was returned cannot be sent: {error}"]).encode()
        left = memoryview(HEADER.pack(len(body)) + body)
        try:
            while left:
                left = left[os.write(self._channel, left) :]
        except OSError:
            raise Gone(ENDED) from None

    def _receive(self, *, end: bool = False) -> Message | None:
        """One message; None at the end, if that is expected. Raises Gone."""
        header = self._read(HEADER.size)
        if end and not header:
            return None
        if len(header) < HEADER.size:
            raise Gone(ENDED)
        (size,) = HEADER.unpack(header)
        if size > LARGEST_MESSAGE:
            raise Gone(f"a message of {size} bytes; {LARGEST_MESSAGE} can be sent")
        body = self._read(size)
        if len(body) < size:
            raise Gone(ENDED)
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Gone(f"not a message: {error}") from None
        if not isinstance(message, list):
            raise Gone("not a message")
        return message

    def _read(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                piece = os.read(self._channel, min(size - len(received), 1 << 16))
            except OSError:
                raise Gone(ENDED) from None
            if not piece:
                break
            received += piece
        return bytes(received)


def _when(content: Any) -> date | time:
    name, text, fold = content
    found: date | time = WHEN[name].fromisoformat(text)
    return found.replace(fold=fold) if fold and isinstance(found, datetime | time) else found


def _exception(kind: str, text: str) -> Exception:
    """One that tests can expect: of the built-in class, if that is an Exception's."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(TypeError):  # UnicodeDecodeError and others need more than a text
            return known(text)
    return Foreign(f"{kind}: {text}")


def _become(argument: Any, state: Any) -> None:
    """Give an argument of a call the content that the function left it with."""
    kind = type(state)
    if kind not in CHANGED or not isinstance(argument, kind):  # what is a defaultdict arrives as a dict
        raise Gone("an argument became another type")
    if isinstance(argument, list | bytearray):
        argument[:] = state
    elif isinstance(argument, deque):
        argument.clear()
        argument.extend(state)
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(state)
