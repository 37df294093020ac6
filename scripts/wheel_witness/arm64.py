"""The arm64 instructions that gloo's small functions are made of, for trace.py. What others write becomes unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import capstone
from capstone import arm64

from .trace import Flow, Run, State, condition
from .values import Value, number, unknown

ARGUMENTS = tuple(f"x{i}" for i in range(8))
CALL_CLOBBERS = tuple(f"x{i}" for i in range(1, 19))
SIGNS = {
    "eq": "==", "ne": "!=", "hs": ">=", "lo": "<", "hi": ">", "ls": "<=",
    "ge": "s>=", "lt": "s<", "gt": "s>", "le": "s<=", "mi": "s<", "pl": "s>=",
}  # fmt: skip
OPPOSITE = {"==": "!=", "!=": "==", ">=": "<", "<": ">=", ">": "<=", "<=": ">",
            "s>=": "s<", "s<": "s>=", "s>": "s<=", "s<=": "s>"}  # fmt: skip
# Encodings with a constant or a condition: mask, pattern, lowest bit (Arm ARM, C4.1 "A64 instruction set encoding").
CONSTANTS = (
    (0x1F800000, 0x12800000, 5),  # MOVZ, MOVN, MOVK
    (0x1F000000, 0x11000000, 10),  # ADD, SUB, CMP, CMN (immediate)
    (0x3B000000, 0x39000000, 10),  # LDR, STR (unsigned offset)
    (0x3B200000, 0x38000000, 12),  # LDUR, STUR, LDR, STR (pre- and post-indexed)
    (0x3A000000, 0x28000000, 15),  # LDP, STP
    (0x7C000000, 0x14000000, 0),  # B, BL
    (0xFF000010, 0x54000000, 0),  # B.cond: its opposite
    (0x7C000000, 0x34000000, 24),  # CBZ, CBNZ, TBZ, TBNZ: its opposite
)
WIDTHS = {"ldrb": 1, "ldurb": 1, "strb": 1, "sturb": 1, "ldrsb": 1, "ldursb": 1, "ldrh": 2, "ldurh": 2, "strh": 2,
          "sturh": 2, "ldrsh": 2, "ldursh": 2, "ldrsw": 4, "ldursw": 4}  # fmt: skip


class Arm64:
    """See trace.Dialect. Calling convention: AAPCS64."""

    def __init__(self) -> None:
        self._decoder = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
        self._decoder.detail = True

    def decode(self, code: bytes, address: int) -> Iterator[Any]:
        return iter(self._decoder.disasm(code, address))

    def spoil(self, instruction: Any) -> bytes | None:
        word = int.from_bytes(instruction.bytes, "little")
        bit = next((bit for mask, pattern, bit in CONSTANTS if word & mask == pattern), None)
        return None if bit is None else (word ^ 1 << bit).to_bytes(4, "little")

    def entry(self) -> State:
        registers = {name: unknown(f"arg{i}") for i, name in enumerate(ARGUMENTS)}
        return State(registers | {"x8": unknown("result"), "sp": unknown("sp")})

    def step(self, instruction: Any, run: Run) -> Flow:
        name, operands = instruction.mnemonic, instruction.operands
        if name in ("b", "br", "bl", "blr", "ret", "brk", "cbz", "cbnz", "tbz", "tbnz") or name.startswith("b."):
            return self._branch(name, instruction, run)
        if name[:2] in ("ld", "st") and operands[-1].type != arm64.ARM64_OP_REG and _memory(operands) is not None:
            self._transfer(name, instruction, run)
            return Flow()
        if name == "movi" and operands[1].imm == 0:
            run.state.vectors[_vector(instruction, operands[0].reg)] = (number(0), number(0))
            return Flow()
        result = self._compute(name, instruction, run)
        if result is not None:
            _put(instruction, operands[0].reg, result, run)
        elif name not in ("cmp", "cmn", "tst", "nop"):
            _forget(instruction, run)
        return Flow()

    def _compute(self, name: str, instruction: Any, run: Run) -> Value | None:
        """The value that an arithmetic instruction gives its first operand; None if unknown, or if there is none."""
        operands = instruction.operands
        values = [_value(instruction, operand, run) for operand in operands]
        match name:
            case "mov" | "sxtw" | "uxtw" | "adrp" | "adr":
                return values[1]
            case "movk":
                shift = operands[1].shift.value
                kept = values[0].constant & ~(0xFFFF << shift)
                return number(kept | operands[1].imm << shift, run.at) if values[0].known else None
            case "add" | "sub" | "adds" | "subs":
                result = values[1].plus(values[2], 1 if name.startswith("add") else -1)
                if name == "subs":
                    run.compare(values[1], values[2])
                return result
            case "cmp":
                run.compare(values[0], values[1])
            case "cmn":
                run.compare(values[0], number(0).plus(values[1], -1))
            case "csel":
                return values[1] if values[1] == values[2] else unknown(f"either({values[1]}, {values[2]})")
        if name in ("tst", "ands", "adds", "bics"):
            run.state.flags = None
        return None

    def _transfer(self, name: str, instruction: Any, run: Run) -> None:
        operands = instruction.operands
        memory = next(i for i, operand in enumerate(operands) if operand.type == arm64.ARM64_OP_MEM)
        place = operands[memory].mem
        base = _register(instruction, place.base)
        address = run.state.registers.get(base, unknown(base)).plus(number(place.disp, run.at))
        after = address
        if len(operands) > memory + 1:  # post-indexed: the access is at the base, which moves afterwards
            address, after = address.plus(number(place.disp), -1), address.plus(number(operands[memory + 1].imm))
        if place.index:
            index = run.state.registers.get(_register(instruction, place.index), run.fresh())
            address = address.plus(index, 1 << operands[memory].shift.value)
        for operand in operands[:memory]:
            register = instruction.reg_name(operand.reg)
            width = WIDTHS.get(name) or {"w": 4, "s": 4, "d": 8, "q": 16}.get(register[0], 8)
            if name.startswith("st"):
                _save(instruction, operand.reg, address, width, run)
            else:
                _fetch(instruction, operand.reg, address, width, run)
            address = address.plus(number(width))
        if instruction.writeback:
            run.state.registers[base] = after

    def _branch(self, name: str, instruction: Any, run: Run) -> Flow:
        operands, registers = instruction.operands, run.state.registers
        if name == "ret":
            run.returns(registers.get("x0", unknown("x0")))
            return Flow(ends=True)
        if name == "brk":
            return Flow(ends=True)
        target = operands[-1].imm if operands and operands[-1].type == arm64.ARM64_OP_IMM else None
        if name in ("bl", "blr"):
            _call(target, run)
            return Flow()
        if name in ("b", "br"):
            if target is not None and run.inside(target):
                return Flow([(target, "")], ends=True)
            _call(target, run)
            run.returns(registers["x0"])
            return Flow(ends=True)
        if name.startswith("b."):
            sign, (left, right) = SIGNS.get(name[2:], name[2:]), run.state.flags or (unknown("flags"), number(0))
        else:
            left, right = _value(instruction, operands[0], run), number(0)
            sign = {"cbz": "==", "cbnz": "!="}.get(name, "")
            if not sign:
                bit = operands[1].imm
                sign = "s>=" if name == "tbz" else "s<"
                if bit not in (31, 63):
                    left, sign = unknown(f"bit {bit} of {left}"), "==" if name == "tbz" else "!="
        if target is None or not run.inside(target):  # a conditional jump to a part of the function that lies elsewhere
            return Flow()
        return Flow([(target, condition(left, sign, right))], condition(left, OPPOSITE.get(sign, f"not {sign}"), right))


def _call(target: int | None, run: Run) -> None:
    registers = run.state.registers
    result = run.call(target, tuple(registers.get(name, unknown(name)) for name in ARGUMENTS))
    for name in CALL_CLOBBERS:
        registers[name] = run.fresh()
    registers["x0"] = result
    run.state.vectors.clear()
    run.state.flags = None


def _memory(operands: Any) -> Any:
    return next((operand for operand in operands if operand.type == arm64.ARM64_OP_MEM), None)


def _register(instruction: Any, register: int) -> str:
    """The 64-bit name of a general register."""
    name: str = instruction.reg_name(register)
    if name in ("wsp", "sp"):
        return "sp"
    return {"fp": "x29", "lr": "x30"}.get(name, "x" + name[1:])


def _vector(instruction: Any, register: int) -> str:
    name: str = instruction.reg_name(register)
    return "v" + name[1:]


def _value(instruction: Any, operand: Any, run: Run) -> Value:
    if operand.type == arm64.ARM64_OP_IMM:
        shift = operand.shift.value if operand.shift.type == arm64.ARM64_SFT_LSL else 0
        return number(operand.imm << shift, run.at)
    if operand.type != arm64.ARM64_OP_REG:
        return run.fresh()
    name = _register(instruction, operand.reg)
    if name in ("xzr", "wzr"):
        return number(0)
    value = run.state.registers.get(name, unknown(name))
    if not operand.shift.type:
        return value
    if operand.shift.type != arm64.ARM64_SFT_LSL:
        return run.fresh()
    return number(0).plus(value, 1 << operand.shift.value)


def _put(instruction: Any, register: int, value: Value, run: Run) -> None:
    name = instruction.reg_name(register)
    if name[0] in "vqds" and name != "sp":
        run.state.vectors[_vector(instruction, register)] = (value, number(0))
    elif name not in ("xzr", "wzr"):
        if name[0] == "w" and value.known:
            value = number(value.constant % (1 << 32), value.origin)
        run.state.registers[_register(instruction, register)] = value


def _save(instruction: Any, register: int, address: Value, width: int, run: Run) -> None:
    name = instruction.reg_name(register)
    if name[0] in "qds" and name != "sp":
        low, high = run.state.vectors.get(_vector(instruction, register), (run.fresh(), run.fresh()))
        run.store(address, min(width, 8), low)
        if width == 16:
            run.store(address.plus(number(8)), 8, high)
        return
    value = run.state.registers.get(_register(instruction, register), run.fresh())
    run.store(address, width, number(0) if name in ("xzr", "wzr") else value)


def _fetch(instruction: Any, register: int, address: Value, width: int, run: Run) -> None:
    name = instruction.reg_name(register)
    if name[0] in "qds" and name != "sp":
        high = run.load(address.plus(number(8)), 8) if width == 16 else number(0)
        run.state.vectors[_vector(instruction, register)] = (run.load(address, min(width, 8)), high)
        return
    _put(instruction, register, run.load(address, width), run)


def _forget(instruction: Any, run: Run) -> None:
    """Whatever an instruction outside the model writes becomes unknown."""
    _, written = instruction.regs_access()
    for register in written:
        name = instruction.reg_name(register)
        if name == "nzcv":
            run.state.flags = None
        elif name[0] in "vqds" and name != "sp":
            run.state.vectors[_vector(instruction, register)] = (run.fresh(), run.fresh())
        else:
            run.state.registers[_register(instruction, register)] = run.fresh()
