"""The x86-64 instructions that gloo's small functions are made of, for trace.py. What others write becomes unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import capstone
from capstone import x86

from .trace import Flow, Run, State, condition
from .values import Value, number, unknown

ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
CALL_CLOBBERS = ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11")
SIGNS = {
    "e": "==", "ne": "!=", "ae": ">=", "b": "<", "a": ">", "be": "<=",
    "ge": "s>=", "l": "s<", "g": "s>", "le": "s<=", "s": "s<", "ns": "s>=",
}  # fmt: skip
OPPOSITE = {"==": "!=", "!=": "==", ">=": "<", "<": ">=", ">": "<=", "<=": ">",
            "s>=": "s<", "s<": "s>=", "s>": "s<=", "s<=": "s>"}  # fmt: skip
LOW = {"a": "rax", "b": "rbx", "c": "rcx", "d": "rdx", "si": "rsi", "di": "rdi", "bp": "rbp", "sp": "rsp"}
VECTOR_MOVES = ("movdqa", "movdqu", "movaps", "movups", "movapd", "movupd")
SETS_FLAGS = ("add", "sub", "and", "or", "xor", "inc", "dec", "neg")


class X86:
    """See trace.Dialect. Calling convention: System V."""

    def __init__(self) -> None:
        self._decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        self._decoder.detail = True

    def decode(self, code: bytes, address: int) -> Iterator[Any]:
        return iter(self._decoder.disasm(code, address))

    def spoil(self, instruction: Any) -> bytes | None:
        code = bytearray(instruction.bytes)
        if instruction.mnemonic.startswith("set") or (instruction.mnemonic[0] == "j" and instruction.mnemonic != "jmp"):
            at = code.index(0x0F) + 1 if 0x0F in code[:2] else 0  # the low bit of the opcode turns a condition round
        else:
            at = instruction.imm_offset or instruction.disp_offset
            if not at:
                return None
        code[at] ^= 1
        return bytes(code)

    def entry(self) -> State:
        registers = {name: unknown(f"arg{i}") for i, name in enumerate(ARGUMENTS)}
        return State(registers | {"rsp": unknown("sp")})

    def step(self, instruction: Any, run: Run) -> Flow:
        name, operands = instruction.mnemonic, instruction.operands
        if name in ("ret", "jmp", "call", "ud2") or (name.startswith("j") and operands[0].type == x86.X86_OP_IMM):
            return self._branch(name, instruction, run)
        if name in ("cmp", "test"):
            left, right = (_value(instruction, operand, run) for operand in operands)
            if name == "test":
                right = number(0)
            run.compare(left, right)
        elif name in VECTOR_MOVES:
            self._move_vector(instruction, run)
        elif name in ("pxor", "xorps") and operands[0].reg == operands[1].reg:
            run.state.vectors[instruction.reg_name(operands[0].reg)] = (number(0), number(0))
        elif name == "push":
            stack = run.state.registers["rsp"].plus(number(-8))
            run.state.registers["rsp"] = stack
            run.store(stack, 8, _value(instruction, operands[0], run))
        elif name == "pop":
            stack = run.state.registers["rsp"]
            _put(instruction, operands[0], run.load(stack, 8), run)
            run.state.registers["rsp"] = stack.plus(number(8))
        else:
            self._compute(name, instruction, run)
        return Flow()

    def _compute(self, name: str, instruction: Any, run: Run) -> None:
        operands = instruction.operands
        result: Value | None = None
        if name in ("mov", "movabs", "movzx", "movsx", "movsxd"):
            result = _value(instruction, operands[1], run)
        elif name == "lea":
            result = _address(instruction, operands[1], run)
        elif name in ("add", "sub"):
            left, right = (_value(instruction, operand, run) for operand in operands)
            result = left.plus(right, 1 if name == "add" else -1)
        elif name == "xor" and operands[0].type == operands[1].type and operands[0].reg == operands[1].reg:
            result = number(0)
        elif name.startswith("set"):
            left, right = run.state.flags or (unknown("flags"), number(0))
            result = unknown(f"({condition(left, SIGNS.get(name[3:], name[3:]), right)})", run.at)
        elif name.startswith("cmov"):
            kept, taken = (_value(instruction, operand, run) for operand in operands)
            result = kept if kept == taken else unknown(f"either({kept}, {taken})")
        if result is None:
            _forget(instruction, run)
            result = run.fresh()
        elif operands[0].type == x86.X86_OP_REG or name != "lea":
            _put(instruction, operands[0], result, run)
        if name in SETS_FLAGS:
            run.state.flags = (result, number(0))

    def _move_vector(self, instruction: Any, run: Run) -> None:
        to, source = instruction.operands
        if source.type == x86.X86_OP_MEM:
            address = _address(instruction, source, run)
            words = (run.load(address, 8), run.load(address.plus(number(8)), 8))
        else:
            words = run.state.vectors.get(instruction.reg_name(source.reg), (run.fresh(), run.fresh()))
        if to.type == x86.X86_OP_REG:
            run.state.vectors[instruction.reg_name(to.reg)] = words
            return
        address = _address(instruction, to, run)
        run.store(address, 8, words[0])
        run.store(address.plus(number(8)), 8, words[1])

    def _branch(self, name: str, instruction: Any, run: Run) -> Flow:
        registers = run.state.registers
        if name == "ret":
            run.returns(registers.get("rax", unknown("rax")))
            return Flow(ends=True)
        if name == "ud2":
            return Flow(ends=True)
        operand = instruction.operands[0]
        target = operand.imm if operand.type == x86.X86_OP_IMM else None
        if name == "call":
            _call(target, run)
            return Flow()
        if name == "jmp":
            if target is not None and run.inside(target):
                return Flow([(target, "")], ends=True)
            _call(target, run)
            run.returns(registers["rax"])
            return Flow(ends=True)
        if target is None or not run.inside(target):  # a conditional jump to the cold part, which lies elsewhere
            return Flow()
        left, right = run.state.flags or (unknown("flags"), number(0))
        sign = SIGNS.get(name[1:], name[1:])
        return Flow([(target, condition(left, sign, right))], condition(left, OPPOSITE.get(sign, f"not {sign}"), right))


def _call(target: int | None, run: Run) -> None:
    registers = run.state.registers
    result = run.call(target, tuple(registers.get(name, unknown(name)) for name in ARGUMENTS))
    for name in CALL_CLOBBERS:
        registers[name] = run.fresh()
    registers["rax"] = result
    run.state.vectors.clear()
    run.state.flags = None


def _register(name: str) -> str:
    """The 64-bit name of a general register."""
    if name.startswith("r"):
        return name.rstrip("dwb") if name[1:2].isdigit() else name
    name = name.removeprefix("e")
    return LOW.get(name) or LOW.get(name.rstrip("xlh")) or name


def _address(instruction: Any, operand: Any, run: Run) -> Value:
    place = operand.mem
    address = number(place.disp, run.at)
    if place.segment:
        address = address.plus(unknown(instruction.reg_name(place.segment)))
    if place.base == x86.X86_REG_RIP:
        return address.plus(number(instruction.address + instruction.size, run.at))
    if place.base:
        name = _register(instruction.reg_name(place.base))
        address = run.state.registers.get(name, unknown(name)).plus(address)
    if place.index:
        name = _register(instruction.reg_name(place.index))
        address = address.plus(run.state.registers.get(name, unknown(name)), place.scale)
    return address


def _value(instruction: Any, operand: Any, run: Run) -> Value:
    if operand.type == x86.X86_OP_IMM:
        return number(operand.imm, run.at)
    if operand.type == x86.X86_OP_MEM:
        return run.load(_address(instruction, operand, run), operand.size)
    name: str = instruction.reg_name(operand.reg)
    if name.startswith(("xmm", "ymm")):
        return run.state.vectors.get(name, (run.fresh(), run.fresh()))[0]
    return run.state.registers.get(_register(name), unknown(name))


def _put(instruction: Any, operand: Any, value: Value, run: Run) -> None:
    if operand.type == x86.X86_OP_MEM:
        run.store(_address(instruction, operand, run), operand.size, value)
        return
    name: str = instruction.reg_name(operand.reg)
    if name.startswith(("xmm", "ymm")):
        run.state.vectors[name] = (value, number(0))
        return
    if operand.size == 4 and value.known:
        value = number(value.constant % (1 << 32), value.origin)
    run.state.registers[_register(name)] = value


def _forget(instruction: Any, run: Run) -> None:
    """Whatever an instruction outside the model writes becomes unknown."""
    _, written = instruction.regs_access()
    for register in written:
        name = instruction.reg_name(register)
        if name == "rflags":
            run.state.flags = None
        elif name.startswith(("xmm", "ymm")):
            run.state.vectors[name] = (run.fresh(), run.fresh())
        else:
            run.state.registers[_register(name)] = run.fresh()
