"""Rewrites LLVM assembly so that checks know where they are in the source.

clang's thread and undefined-behaviour sanitizers insert calls; here those are renamed to the runtime's own functions and
get one more argument, an index into a table of source lines. Line numbers thus need no debugger's tools at run time, and
no real sanitizer can be confused with ours. The module also lists the variables in threadgroup memory, with guard zones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .includes import MSL_FOLDER

SECTION = "msl_tg"
_GUARD = 128  # bytes between threadgroup variables
_TAIL = r"\)(?P<rest>(?: #\d+)?(?:, !\w+ !\d+)*)$"
_CALL = re.compile(r"@__tsan_(?:unaligned_)?(?P<action>read_write|read|write)(?P<size>\d+)\((?P<arguments>.*)" + _TAIL)
_RANGE = re.compile(r"@__tsan_(?P<action>memcpy|memmove|memset)\((?P<arguments>.*)" + _TAIL)
_UNDEFINED = re.compile(r"@__ubsan_handle_(?P<action>\w+)\((?P<arguments>.*)" + _TAIL)
_ATOMIC = re.compile(r"@msl_check_(?P<action>atomic)\((?P<arguments>.*), i32 (?:noundef )?0" + _TAIL)
# How the compiler stops where an index leaves an object of known size.
_TRAP = re.compile(r"call void @llvm\.(?:ubsan)?trap\([^)]*" + _TAIL)
# The sanitizer looks at sizes up to 16 bytes only.
_WIDE = re.compile(r"^\s+(?:%\S+ = load|store) <(\d+) x (\w+)>.*?,? ptr (?P<pointer>[%@][\w.\"$]+), align.*?(?P<rest>(?:, !\w+ !\d+)*)$")
_BYTES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}
_VARIABLE = re.compile(rf'^(?P<name>@\S+) = .*?global (?P<type>.+) (?:zeroinitializer|undef|poison|\S+), section "(?:__DATA,)?{SECTION}"')

_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\((.*)\)$")
_SCOPE = re.compile(r"^!(\d+) = (?:distinct )?!(?:DISubprogram|DILexicalBlock|DILexicalBlockFile)\((.*)\)$")
_FILE = re.compile(r'^!(\d+) = (?:distinct )?!DIFile\(filename: "([^"]*)"')

Frames = tuple[tuple[str, int, int], ...]


def _number(text: str, key: str, prefix: str = "") -> int:
    found = re.search(rf"\b{key}: {prefix}(\d+)", text)
    return int(found[1]) if found else 0


@dataclass
class _Sites:
    """The debug locations of a module, and the table of those that checks use."""

    locations: dict[int, tuple[int, int, int, int]]  # line, column, scope, location of the inlined call
    files: dict[int, str]  # by scope
    table: dict[Frames, int] = field(default_factory=lambda: {(): 0})

    @classmethod
    def of(cls, lines: list[str]) -> _Sites:
        locations, names, scopes = {}, {}, {}
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
        text = [_string(f"@msl_file_{i}", name) for i, name in enumerate(names)]
        entries = ["{ ptr, i32, i32, i32 } zeroinitializer"]
        for frames in list(self.table)[1:]:
            name, line, column = frames[0]
            caller = self.table[frames[1:]]
            entries.append(f"{{ ptr, i32, i32, i32 }} {{ ptr @msl_file_{names.index(name)}, i32 {line}, i32 {column}, i32 {caller} }}")
        return [*text, _array("@msl_sites", "{ ptr, i32, i32, i32 }", entries)]


def _string(name: str, value: str) -> str:
    data = value.encode() + b"\0"
    escaped = "".join(f"\\{byte:02x}" for byte in data)
    return f'{name} = private constant [{len(data)} x i8] c"{escaped}"'


def _array(name: str, element: str, entries: list[str]) -> str:
    return f"{name} = constant [{len(entries)} x {element}] [{', '.join(entries)}]"


def _source_name(symbol: str) -> str:
    """`partial` of `@_ZZ6kernelE7partial`, the mangled name of a variable in a function."""
    for found in re.finditer(r"E(\d+)", symbol):
        start, length = found.end(), int(found[1])
        if re.fullmatch(r"(_\d*)*\"?", symbol[start + length :]) and len(symbol) >= start + length:
            return symbol[start : start + length]
    return symbol.lstrip("@")


class _Variables:
    """Threadgroup variables: each is followed by a guard zone, and all are listed in @msl_variables."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.entries: list[str] = []

    def add(self, line: str, found: re.Match[str]) -> list[str]:
        n = len(self.entries)
        section = line[line.index("section ") :].split(",")[0] if "__DATA," not in line else f'section "__DATA,{SECTION}"'
        size = f"ptrtoint (ptr getelementptr ({found['type']}, ptr null, i32 1) to i64)"
        self.text.append(_string(f"@msl_variable_{n}", _source_name(found["name"])))
        self.entries.append(f"{{ ptr, i64, ptr }} {{ ptr {found['name']}, i64 {size}, ptr @msl_variable_{n} }}")
        # One definition in one plain section, so that variables and guards stay in this order.
        line = re.sub(r"= .*?global ", "= internal global ", re.sub(r", comdat(\([^)]*\))?", "", line), count=1)
        return [line, f"@msl_guard_{n} = internal global [{_GUARD} x i8] zeroinitializer, {section}, align 16"]

    def globals(self) -> list[str]:
        entries = self.entries or ["{ ptr, i64, ptr } zeroinitializer"]
        guards = ", ".join(f"ptr @msl_guard_{n}" for n in range(len(self.entries)))
        used = f"@msl_guards = constant [{len(self.entries)} x ptr] [{guards}]" if self.entries else ""
        count = f"@msl_variable_count = constant i32 {len(self.entries)}"
        return [*self.text, _array("@msl_variables", "{ ptr, i64, ptr }", entries), count, used]


def instrument(assembly: str) -> str:
    """LLVM assembly with sanitizer calls in, with calls of the runtime's checks out."""
    lines = assembly.split("\n")
    sites, variables = _Sites.of(lines), _Variables()
    declared: set[str] = set()
    result: list[str] = []
    for line in lines:
        if line.startswith("declare ") and re.search(r"@__(tsan|ubsan)_|@msl_check_", line):
            continue
        if line.startswith("@") and f"{SECTION}\"" in line and (found := _VARIABLE.match(line)):
            result += variables.add(line, found)
        elif "@__tsan_" in line or "@__ubsan_" in line or "@msl_check_" in line:
            result.append(_checked(line, sites, declared))
        elif found := _TRAP.search(line):
            declared.add("declare void @msl_ub_trap(i32)")
            result += [f"  call void @msl_ub_trap(i32 {sites.index(found['rest'])})", line]
        elif (found := _WIDE.match(line)) and (size := int(found[1]) * _BYTES[found[2]]) not in (1, 2, 4, 8, 16):
            action = "write" if line.lstrip().startswith("store") else "read"
            declared.add(f"declare void @msl_check_{action}(ptr, i64, i32)")
            where = sites.index(found["rest"])
            result += [f"  call void @msl_check_{action}(ptr {found['pointer']}, i64 {size}, i32 {where})", line]
        else:
            result.append(line)
    return "\n".join([*result, *sites.globals(), *variables.globals(), *sorted(declared), ""])


def _checked(line: str, sites: _Sites, declared: set[str]) -> str:
    for pattern in (_CALL, _RANGE, _UNDEFINED, _ATOMIC):
        found = pattern.search(line)
        if not found:
            continue
        prefix = "msl_ub_" if pattern is _UNDEFINED else "msl_check_"
        arguments = found["arguments"] + (f", i64 {int(found['size'])}" if pattern is _CALL else "")
        name = f"@{prefix}{found['action']}"
        returns = "ptr" if pattern is _RANGE else "void"
        declared.add(f"declare {returns} {name}({_types(arguments)}, i32)")
        rest = re.sub(r" #\d+", "", found["rest"])  # attributes of the sanitizer's function, not of ours
        return f"{line[: found.start()]}{name}({arguments}, i32 {sites.index(found['rest'])}){rest}"
    declared.add("declare void @msl_check_init()")
    return line.replace("@__tsan_init", "@msl_check_init")


def _types(arguments: str) -> str:
    """The types of a call's arguments."""
    types, depth, start = [], 0, True
    for word in re.findall(r"[(),]|[^\s(),]+", arguments):
        if start and depth == 0:
            types.append(word)
            start = False
        depth += (word == "(") - (word == ")")
        if word == "," and depth == 0:
            start = True
    return ", ".join(types)
