"""What a register or a word of memory holds, written as a sum: a constant plus multiples of unknowns.

An unknown is named by how the function got it: ``arg1`` (its second argument, counted as in the machine's calling
convention), ``u64[arg1+0x8]`` (eight bytes loaded from there), ``memcmp()@2c`` (what the call at offset 0x2c returned).
Two sums are equal when they would be equal for every value of the unknowns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_SIZE = 1 << 64


@dataclass(frozen=True, slots=True)
class Value:
    """``constant`` + the sum of count * unknown. ``origin`` is the address of the instruction that set the constant."""

    constant: int = 0
    terms: tuple[tuple[str, int], ...] = ()
    origin: int | None = field(default=None, compare=False)

    @property
    def known(self) -> bool:
        """Whether it is a plain number."""
        return not self.terms

    def plus(self, other: Value, times: int = 1) -> Value:
        """``self + times * other``. The constant's origin is the latest instruction that contributed to it."""
        counts = dict(self.terms)
        for name, count in other.terms:
            counts[name] = counts.get(name, 0) + times * count
        terms = tuple(sorted((name, count) for name, count in counts.items() if count))
        origin = other.origin if other.constant else self.origin
        return Value(_signed(self.constant + times * other.constant), terms, origin)

    def offset_from(self, base: Value) -> int | None:
        """The number that ``self - base`` always is, or None."""
        difference = self.plus(base, -1)
        return difference.constant if difference.known else None

    def __str__(self) -> str:
        text = ""
        for name, count in self.terms:
            sign = "-" if count < 0 else "+" if text else ""
            text += sign + (name if abs(count) == 1 else f"{abs(count)}*{name}")
        if not text:
            return f"{self.constant:#x}"
        return f"{text}{self.constant:+#x}" if self.constant else text


def number(value: int, origin: int | None = None) -> Value:
    """A plain number, taken as 64-bit two's complement."""
    return Value(_signed(value), (), origin)


def unknown(name: str, origin: int | None = None) -> Value:
    """A value of which only the name is known."""
    return Value(0, ((name, 1),), origin)


def loaded(width: int, address: Value) -> Value:
    """``width`` bytes of memory of which only the address is known."""
    return unknown(f"u{8 * width}[{address}]")


def _signed(value: int) -> int:
    value %= _SIZE
    return value - _SIZE if value >= _SIZE >> 1 else value
