"""The source lines of a module in LLVM assembly, and the table in which the runtime looks them up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .includes import MSL_FOLDER

_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\((.*)\)$")
_SCOPE = re.compile(r"^!(\d+) = (?:distinct )?!(?:DISubprogram|DILexicalBlock|DILexicalBlockFile)\((.*)\)$")
_FILE = re.compile(r'^!(\d+) = (?:distinct )?!DIFile\(filename: "([^"]*)"')


# File name, line, column, caller: msl_site in runtime/abi.h.
_SITE = "{ ptr, i32, i32, i32 }"

# The call stack of inlined functions at an instruction, innermost first: file, line, column.
Frames = tuple[tuple[str, int, int], ...]


def string_constant(name: str, value: str) -> str:
    """A zero-terminated string as LLVM assembly."""
    data = value.encode() + b"\0"
    escaped = "".join(f"\\{byte:02x}" for byte in data)
    return f'{name} = private constant [{len(data)} x i8] c"{escaped}"'


def array_constant(name: str, element: str, entries: list[str]) -> str:
    """A constant array as LLVM assembly."""
    return f"{name} = constant [{len(entries)} x {element}] [{', '.join(entries)}]"


def _number(text: str, key: str, prefix: str = "") -> int:
    found = re.search(rf"\b{key}: {prefix}(\d+)", text)
    return int(found[1]) if found else 0


@dataclass
class Sites:
    """The debug locations of a module, and the table of those that checks use."""

    locations: dict[int, tuple[int, int, int, int]]  # line, column, scope, location of the inlined call
    files: dict[int, str]  # by scope
    table: dict[Frames, int] = field(default_factory=lambda: {(): 0})

    @classmethod
    def of(cls, lines: list[str]) -> Sites:
        """Reads the debug metadata of a module."""
        locations: dict[int, tuple[int, int, int, int]] = {}
        names: dict[int, str] = {}
        scopes: dict[int, int] = {}
        for line in lines:
            if found := _LOCATION.match(line):
                text = found[2]
                place = (_number(text, "line"), _number(text, "column"), _number(text, "scope", "!"))
                locations[int(found[1])] = (*place, _number(text, "inlinedAt", "!"))
            elif found := _SCOPE.match(line):
                scopes[int(found[1])] = _number(found[2], "file", "!")
            elif found := _FILE.match(line):
                names[int(found[1])] = found[2]
        return cls(locations, {scope: names.get(file, "") for scope, file in scopes.items()})

    def index(self, rest: str) -> int:
        """The table entry for an instruction that ends in `rest`; 0 if its line is unknown."""
        found = re.search(r"!dbg !(\d+)", rest)
        return self._intern(self._frames(int(found[1]))) if found else 0

    def _frames(self, location: int) -> Frames:
        frames: list[tuple[str, int, int]] = []
        while location in self.locations:
            line, column, scope, location = self.locations[location]
            name = self.files.get(scope, "")
            if line and name != "entry point" and not name.startswith(str(MSL_FOLDER)):
                frames.append((name, line, column))
        return tuple(frames)

    def _intern(self, frames: Frames) -> int:
        if frames not in self.table:
            self._intern(frames[1:])
            self.table[frames] = len(self.table)
        return self.table[frames]

    def globals(self) -> list[str]:
        """The table as LLVM assembly: an array of msl_site."""
        names = sorted({frames[0][0] for frames in self.table if frames})
        text = [string_constant(f"@msl_file_{i}", name) for i, name in enumerate(names)]
        entries = [f"{_SITE} zeroinitializer"]
        for frames in list(self.table)[1:]:
            name, line, column = frames[0]
            caller = self.table[frames[1:]]
            values = f"ptr @msl_file_{names.index(name)}, i32 {line}, i32 {column}, i32 {caller}"
            entries.append(f"{_SITE} {{ {values} }}")
        return [*text, array_constant("@msl_sites", _SITE, entries)]
