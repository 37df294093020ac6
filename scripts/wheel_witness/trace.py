"""Follows a function's machine code with names in place of numbers; notes what it compares, stores, calls and returns.

This is symbolic execution cut down to what short functions need: every branch is followed both ways, each block at most
``VISITS`` times, so that a loop ends; memory that was stored to is remembered by its address as a sum (values.py), two
different sums never name the same place, and a call changes registers alone. That is not sound for code in general. It
need not be: a check built on it names the facts that it must find, and code in which they cannot be found fails it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .images import Function, Image
from .values import Value, loaded, number, unknown

VISITS = 4
MOST_STEPS = 40_000
WORD = 8
GIVE_BACK_DESTINATION = ("memcpy", "memmove", "memset")  # C standard, 7.24

Words = dict[Value, tuple[int, Value]]


class Condition(NamedTuple):
    """A branch taken, or not taken, by the instruction ``at``."""

    text: str
    at: int


@dataclass(frozen=True)
class Fact:
    """Something that happens at an instruction; ``conditions`` are the branches on the way there."""

    at: int
    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class Compare(Fact):
    """Two values are compared, or (``right`` 0) one is tested."""

    left: Value
    right: Value


@dataclass(frozen=True)
class Store(Fact):
    """``width`` bytes are written (a 16-byte store is two of 8)."""

    address: Value
    width: int
    value: Value


@dataclass(frozen=True)
class Call(Fact):
    """A call or a jump out of the function. ``target`` is None when no symbol says where it goes."""

    target: str | None
    arguments: tuple[Value, ...]
    memory: Words = field(repr=False, compare=False)

    def words(self, address: Value, count: int) -> list[Value]:
        """The ``count`` 8-byte words at ``address`` as the callee will find them."""
        places = (address.plus(number(WORD * i)) for i in range(count))
        return [recall(self.memory, place, WORD) for place in places]


@dataclass(frozen=True)
class Return(Fact):
    """The function ends with ``value`` in the result register."""

    value: Value


@dataclass
class State:
    """Registers by their 64-bit name, vector registers as two words, memory, and what the flags compare."""

    registers: dict[str, Value]
    vectors: dict[str, tuple[Value, Value]] = field(default_factory=dict)
    memory: Words = field(default_factory=dict)
    flags: tuple[Value, Value] | None = None
    conditions: tuple[Condition, ...] = ()

    def copy(self) -> State:
        return State(dict(self.registers), dict(self.vectors), dict(self.memory), self.flags, self.conditions)


@dataclass
class Flow:
    """Where the code goes after an instruction: to ``targets``, each on a condition, and on unless it ``ends``."""

    targets: list[tuple[int, str]] = field(default_factory=list)
    otherwise: str = ""
    ends: bool = False


class Dialect(Protocol):
    """One instruction set."""

    def decode(self, code: bytes, address: int) -> Iterator[Any]:
        """Capstone instructions, with details."""

    def spoil(self, instruction: Any) -> bytes | None:
        """The instruction with its constant, or the sense of its branch, off by one bit; None if it has neither."""

    def entry(self) -> State:
        """Registers as a caller sets them."""

    def step(self, instruction: Any, run: Run) -> Flow:
        """Applies one instruction to ``run.state``."""


class Run:
    """One function being followed: the state at the current instruction, and the facts so far."""

    def __init__(self, image: Image, function: Function, dialect: Dialect) -> None:
        self.image = image
        self.function = function
        self.dialect = dialect
        self.state = dialect.entry()
        self.facts: list[Fact] = []
        self.at = function.address
        self.instructions = {item.address: item for item in dialect.decode(function.code, function.address)}

    def text(self, address: int) -> str:
        """The instruction at an address, as an assembler writes it."""
        item = self.instructions[address]
        return f"{item.mnemonic} {item.op_str}".strip()

    def inside(self, address: int) -> bool:
        """Whether an address belongs to the function itself."""
        return 0 <= address - self.function.address < len(self.function.code)

    def load(self, address: Value, width: int) -> Value:
        """Memory at ``address``: what was stored there, what the file says if that cannot change, or an unknown."""
        stored = self.state.memory.get(address)
        if stored is None and address.known:
            data = self.image.constant(address.constant, width)
            if data is not None:
                return number(int.from_bytes(data, "little"), self.at)
        return recall(self.state.memory, address, width)

    def store(self, address: Value, width: int, value: Value) -> None:
        """Notes a store and remembers it."""
        self.state.memory[address] = (width, value)
        self.facts.append(Store(self.at, self.state.conditions, address, width, value))

    def compare(self, left: Value, right: Value) -> None:
        """Notes a comparison and sets the flags by it."""
        self.state.flags = (left, right)
        self.facts.append(Compare(self.at, self.state.conditions, left, right))

    def call(self, target: int | None, arguments: tuple[Value, ...]) -> Value:
        """Notes a call. Returns what it gives back."""
        name = None if target is None else self.image.name(target)
        self.facts.append(Call(self.at, self.state.conditions, name, arguments, dict(self.state.memory)))
        if name in GIVE_BACK_DESTINATION:
            return arguments[0]
        return unknown(f"{name or 'call'}()@{self.at - self.function.address:x}")

    def returns(self, value: Value) -> None:
        """Notes the end of the function."""
        self.facts.append(Return(self.at, self.state.conditions, value))

    def fresh(self) -> Value:
        """An unknown for what an instruction outside the model leaves behind."""
        return unknown(f"?{self.at - self.function.address:x}")


def trace(image: Image, function: Function, dialect: Dialect) -> Run:
    """Follows ``function`` from its entry along every branch. Exception handlers, reached by none, are left out."""
    run = Run(image, function, dialect)
    waiting = deque([(function.address, run.state)])
    visits: dict[int, int] = {}
    steps = 0
    while waiting and steps < MOST_STEPS:
        address, run.state = waiting.popleft()
        visits[address] = visits.get(address, 0) + 1
        if visits[address] > VISITS:
            continue
        while (instruction := run.instructions.get(address)) is not None and steps < MOST_STEPS:
            steps += 1
            run.at = address
            flow = dialect.step(instruction, run)
            following = address + instruction.size
            for target, condition in flow.targets:
                state = run.state.copy()
                state.conditions += (Condition(condition, run.at),) if condition else ()
                waiting.append((target, state))
            if flow.ends:
                break
            address = following
            if flow.targets:
                run.state.conditions += (Condition(flow.otherwise, run.at),) if flow.otherwise else ()
                waiting.append((following, run.state))
                break
    return run


def recall(memory: Words, address: Value, width: int) -> Value:
    """What ``memory`` holds at ``address``: the very value when it was stored with that width, else an unknown."""
    stored = memory.get(address)
    if stored is None:
        return loaded(width, address)
    stored_width, value = stored
    if stored_width == width:
        return value
    if value.known and width < stored_width:
        return number(value.constant % (1 << 8 * width), value.origin)
    return loaded(width, address)


def condition(left: Value, sign: str, right: Value) -> str:
    """A branch condition as text; an unsigned ``<= n`` is written ``< n+1``, so that compilers' two ways read alike."""
    if right.known and sign in ("<=", ">"):
        right, sign = right.plus(number(1)), {"<=": "<", ">": ">="}[sign]
    return f"{left} {sign} {right}"
