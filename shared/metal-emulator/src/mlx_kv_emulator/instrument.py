"""Rewrites LLVM assembly so that checks know where they are in the source.

clang's thread and undefined-behaviour sanitizers insert calls; here those are renamed to the runtime's own functions
and get one more argument, an index into a table of source lines. Line numbers thus need no debugger's tools, and no
real sanitizer can be confused with ours. The module also lists its variables in threadgroup memory, with guard zones.
"""

from __future__ import annotations

import re

from .sites import Sites, array_constant, string_constant

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
_WIDE = re.compile(
    r"^\s+(?:%\S+ = load|store) <(?P<count>\d+) x (?P<element>i8|i16|i32|i64|half|bfloat|float|double|ptr)>"
    r".*?,? ptr (?P<pointer>[%@][\w.\"$]+), align.*?(?P<rest>(?:, !\w+ !\d+)*)$"
)
_BYTES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}
_VARIABLE = re.compile(
    rf'^(?P<name>@\S+) = .*?global (?P<type>.+) (?:zeroinitializer|undef|poison|\S+), section "(?:__DATA,)?{SECTION}"'
)


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
        section = (
            line[line.index("section ") :].split(",")[0] if "__DATA," not in line else f'section "__DATA,{SECTION}"'
        )
        size = f"ptrtoint (ptr getelementptr ({found['type']}, ptr null, i32 1) to i64)"
        self.text.append(string_constant(f"@msl_variable_{n}", _source_name(found["name"])))
        self.entries.append(f"{{ ptr, i64, ptr }} {{ ptr {found['name']}, i64 {size}, ptr @msl_variable_{n} }}")
        # One definition in one plain section, so that variables and guards stay in this order.
        line = re.sub(r"= .*?global ", "= internal global ", re.sub(r", comdat(\([^)]*\))?", "", line), count=1)
        return [line, f"@msl_guard_{n} = internal global [{_GUARD} x i8] zeroinitializer, {section}, align 16"]

    def globals(self) -> list[str]:
        entries = self.entries or ["{ ptr, i64, ptr } zeroinitializer"]
        guards = ", ".join(f"ptr @msl_guard_{n}" for n in range(len(self.entries)))
        used = f"@msl_guards = constant [{len(self.entries)} x ptr] [{guards}]" if self.entries else ""
        count = f"@msl_variable_count = constant i32 {len(self.entries)}"
        return [*self.text, array_constant("@msl_variables", "{ ptr, i64, ptr }", entries), count, used]


def instrument(assembly: str) -> str:
    """LLVM assembly with sanitizer calls in, with calls of the runtime's checks out."""
    lines = assembly.split("\n")
    sites, variables = Sites.of(lines), _Variables()
    declared: set[str] = set()
    result: list[str] = []
    for line in lines:
        if line.startswith("declare ") and re.search(r"@__(tsan|ubsan)_|@msl_check_", line):
            continue
        if line.startswith("@") and f'{SECTION}"' in line and (found := _VARIABLE.match(line)):
            result += variables.add(line, found)
        elif "@__tsan_" in line or "@__ubsan_" in line or "@msl_check_" in line:
            result.append(_checked(line, sites, declared))
        elif found := _TRAP.search(line):
            declared.add("declare void @msl_ub_trap(i32)")
            result += [f"  call void @msl_ub_trap(i32 {sites.index(found['rest'])})", line]
        elif (found := _WIDE.match(line)) and (size := _vector_bytes(found)) not in (1, 2, 4, 8, 16):
            action = "write" if line.lstrip().startswith("store") else "read"
            declared.add(f"declare void @msl_check_{action}(ptr, i64, i32)")
            where = sites.index(found["rest"])
            result += [f"  call void @msl_check_{action}(ptr {found['pointer']}, i64 {size}, i32 {where})", line]
        else:
            result.append(line)
    return "\n".join([*result, *sites.globals(), *variables.globals(), *sorted(declared), ""])


def _vector_bytes(found: re.Match[str]) -> int:
    return int(found["count"]) * _BYTES[found["element"]]


def _checked(line: str, sites: Sites, declared: set[str]) -> str:
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
    types: list[str] = []
    depth, start = 0, True
    for word in re.findall(r"[(),]|[^\s(),]+", arguments):
        if start and depth == 0:
            types.append(word)
            start = False
        depth += (word == "(") - (word == ")")
        if word == "," and depth == 0:
            start = True
    return ", ".join(types)
