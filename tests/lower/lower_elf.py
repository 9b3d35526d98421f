"""Reads what the tests need of a 64-bit little-endian ELF file."""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Elf:
    machine: int
    flags: int
    symbols: dict[str, bytes]  # defined symbols of .dynsym -> their bytes
    undefined: tuple[str, ...]
    sections: tuple[str, ...]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def read_elf(data: bytes) -> Elf:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a 64-bit little-endian ELF file: {data[:6]!r}")
    machine = struct.unpack_from("<H", data, 18)[0]
    (section_offset,) = struct.unpack_from("<Q", data, 40)
    flags, _, _, _, entry_size, count, names_index = struct.unpack_from("<I6H", data, 48)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    sections = tuple(_string(data, names_at + header[0]) for header in headers)
    symbols, undefined = {}, []
    table = headers[sections.index(".dynsym")]
    strings_at = headers[table[6]][4]
    for at in range(table[4] + 24, table[4] + table[5], 24):
        name, _, _, section, value, size = struct.unpack_from("<IBBHQQ", data, at)
        if section == 0:
            undefined.append(_string(data, strings_at + name))
        elif section < len(headers):
            start = headers[section][4] + value - headers[section][3]
            symbols[_string(data, strings_at + name)] = data[start : start + size]
    return Elf(machine, flags, symbols, tuple(undefined), sections)
