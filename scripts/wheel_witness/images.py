"""Reads the gloo parts of a shipped libtorch: ELF (x86-64) and Mach-O (arm64), 64-bit little-endian.

These libraries are hundreds of megabytes, nearly all of it of no interest here, so the file is mapped rather than read,
and of the symbol tables only the names that speak of gloo are kept. Layouts: System V ABI (ELF-64, x86-64 supplement)
and Apple's <mach-o/loader.h>, <mach-o/nlist.h>.
"""

from __future__ import annotations

import mmap
import struct
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from pathlib import Path
from typing import Literal, NamedTuple

from hetdeploy.errors import HetdeployError

Machine = Literal["arm64", "x86-64"]

WANTED = b"gloo"
LONGEST_STRING = 256


class Function(NamedTuple):
    """One function's machine code: ``symbol`` as mangled by the compiler, ``address`` of its first byte."""

    symbol: str
    address: int
    code: bytes


class Extent(NamedTuple):
    """Bytes of the file that are mapped at ``[start, end)``; ``constant`` when the program cannot write to them."""

    start: int
    end: int
    offset: int
    constant: bool


class Image(ABC):
    """A library. ``symbols`` maps gloo's defined symbols, without Mach-O's leading underscore, to addresses."""

    machine: Machine
    symbols: dict[str, int]

    @abstractmethod
    def function(self, symbol: str) -> Function:
        """The code of a defined symbol."""

    @abstractmethod
    def constant(self, address: int, size: int) -> bytes | None:
        """``size`` bytes that no relocation and no running code changes, or None."""

    @abstractmethod
    def name(self, address: int) -> str | None:
        """The symbol that a call to ``address`` ends at, through a linker's stub if need be."""

    def string(self, address: int) -> str | None:
        """The NUL-terminated ASCII string at a constant address, or None."""
        text = b""
        while (byte := self.constant(address + len(text), 1)) != b"\0":
            if byte is None or len(text) == LONGEST_STRING:
                return None
            text += byte
        return text.decode() if text.isascii() else None


class MappedImage(Image):
    """A library file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.symbols = {}
        self.extents: list[Extent] = []
        self._names: dict[int, str] = {}

    def close(self) -> None:
        """Unmaps the file."""
        self.data.close()

    def function(self, symbol: str) -> Function:
        address = self.symbols[symbol]
        return Function(symbol, address, self._read(address, self._size(symbol)))

    def constant(self, address: int, size: int) -> bytes | None:
        extent = self._extent(address)
        if extent is None or not extent.constant or address + size > extent.end:
            return None
        return self._read(address, size)

    def name(self, address: int) -> str | None:
        return self._names.get(address) or self._imported(address)

    def _read(self, address: int, size: int) -> bytes:
        extent = self._extent(address)
        if extent is None:
            return b""
        at = extent.offset + address - extent.start
        return self.data[at : at + min(size, extent.end - address)]

    def _extent(self, address: int) -> Extent | None:
        return next((extent for extent in self.extents if extent.start <= address < extent.end), None)

    def _define(self, symbol: bytes, address: int) -> None:
        text = symbol.decode()
        self.symbols[text] = address
        self._names.setdefault(address, text)

    def _text(self, at: int) -> bytes:
        return self.data[at : self.data.find(b"\0", at)]

    @abstractmethod
    def _size(self, symbol: str) -> int: ...

    @abstractmethod
    def _imported(self, address: int) -> str | None: ...


def open_image(path: Path) -> MappedImage:
    """Maps a library. Raises HetdeployError when it is neither a 64-bit x86-64 ELF nor an arm64 Mach-O file."""
    with path.open("rb") as file:
        head = file.read(20)
    if head[:6] == b"\x7fELF\x02\x01" and head[18:20] == b"\x3e\0":
        return Elf(path)
    if head[:8] == b"\xcf\xfa\xed\xfe\x0c\0\0\1":
        return MachO(path)
    raise HetdeployError(f"{path} is neither an x86-64 ELF nor an arm64 Mach-O library (first bytes {head[:8].hex()})")


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class Elf(MappedImage):
    """The Linux library. Names come from .symtab and .dynsym, imports from the procedure linkage table."""

    machine: Machine = "x86-64"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._sizes: dict[str, int] = {}
        data = self.data
        (table,) = struct.unpack_from("<Q", data, 40)
        count, names_index = struct.unpack_from("<HH", data, 60)
        sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i)) for i in range(count)]
        named = {self._text(sections[names_index].offset + section.name): section for section in sections}
        for section in sections:
            if section.flags & 2 and section.kind != 8:  # SHF_ALLOC, not SHT_NOBITS
                constant = not section.flags & 1  # SHF_WRITE
                self.extents.append(Extent(section.address, section.address + section.size, section.offset, constant))
            if section.kind in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
                self._read_symbols(section, sections[section.link])
        self._plt = named.get(b".plt")
        self._plt_relocations = named.get(b".rela.plt")
        self._dynamic = named.get(b".dynsym")
        self._dynamic_names = named.get(b".dynstr")

    def _read_symbols(self, section: _Section, names: _Section) -> None:
        table = self.data[section.offset : section.offset + section.size]
        for name, _info, _other, index, address, size in struct.iter_unpack("<IBBHQQ", table):
            if index and WANTED in (text := self._text(names.offset + name)):
                self._define(text, address)
                self._sizes[text.decode()] = size

    def _size(self, symbol: str) -> int:
        return self._sizes[symbol]

    def _imported(self, address: int) -> str | None:
        plt, relocations, dynamic, names = self._plt, self._plt_relocations, self._dynamic, self._dynamic_names
        if not plt or not relocations or not dynamic or not names:
            return None
        slot, beside = divmod(address - plt.address, 16)
        slot -= 1  # the first entry is the resolver's own
        if beside or not 0 <= slot < relocations.size // 24:
            return None
        _, info, _ = struct.unpack_from("<QQq", self.data, relocations.offset + 24 * slot)
        (name,) = struct.unpack_from("<I", self.data, dynamic.offset + 24 * (info >> 32))
        return self._text(names.offset + name).decode()


class MachO(MappedImage):
    """The macOS library. Its symbols carry no sizes: a function ends where the next symbol begins."""

    machine: Machine = "arm64"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._stubs: Extent | None = None
        self._stub_size = self._stub_index = 0
        self._symbol_table = self._names_at = self._indirect = 0
        (commands,) = struct.unpack_from("<I", self.data, 16)
        at, count = 32, 0
        for _ in range(commands):
            command, size = struct.unpack_from("<II", self.data, at)
            if command == 0x19:  # LC_SEGMENT_64
                self._read_segment(at)
            elif command == 0x2:  # LC_SYMTAB
                self._symbol_table, count, self._names_at = struct.unpack_from("<III", self.data, at + 8)
            elif command == 0xB:  # LC_DYSYMTAB
                (self._indirect,) = struct.unpack_from("<I", self.data, at + 56)
            at += size
        self._read_symbols(count)

    def _read_segment(self, at: int) -> None:
        address, size, offset, length = struct.unpack_from("<QQQQ", self.data, at + 24)
        _, protection, sections, _ = struct.unpack_from("<IIII", self.data, at + 56)
        self.extents.append(Extent(address, address + min(size, length), offset, not protection & 2))  # VM_PROT_WRITE
        for i in range(sections):
            section = at + 72 + 80 * i
            start, length = struct.unpack_from("<QQ", self.data, section + 32)
            flags, index, entry = struct.unpack_from("<III", self.data, section + 64)
            if flags & 0xFF == 8:  # S_SYMBOL_STUBS
                self._stubs = Extent(start, start + length, 0, True)
                self._stub_index, self._stub_size = index, entry

    def _read_symbols(self, count: int) -> None:
        starts = array("Q")
        table = self.data[self._symbol_table : self._symbol_table + 16 * count]
        for name, kind, _section, _description, address in struct.iter_unpack("<IBBHQ", table):
            if kind & 0xE0 or kind & 0xE != 0xE:  # N_STAB: debugger's; N_SECT: defined here
                continue
            starts.append(address)
            if WANTED in (text := self._text(self._names_at + name)):
                self._define(text.removeprefix(b"_"), address)
        self._starts = array("Q", sorted(starts))

    def _size(self, symbol: str) -> int:
        address = self.symbols[symbol]
        following = bisect_right(self._starts, address)
        if following == len(self._starts):
            return 0
        return self._starts[following] - address

    def _imported(self, address: int) -> str | None:
        if self._stubs is None or not self._stubs.start <= address < self._stubs.end:
            return None
        slot, beside = divmod(address - self._stubs.start, self._stub_size)
        if beside:
            return None
        (symbol,) = struct.unpack_from("<I", self.data, self._indirect + 4 * (self._stub_index + slot))
        if symbol & 0xC0000000:  # INDIRECT_SYMBOL_LOCAL, INDIRECT_SYMBOL_ABS: no name
            return None
        (name,) = struct.unpack_from("<I", self.data, self._symbol_table + 16 * symbol)
        return self._text(self._names_at + name).removeprefix(b"_").decode()
