"""Turns MSL text into C++ for clang, where macros in the `msl` folder cannot. Lines keep their numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from .errors import CompileError

_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|[A-Za-z_]\w*|\d[\w.]*|::|\s+|.', re.DOTALL)
_NOT_A_NAME = {"const", "constexpr", "volatile", "typename", "alignas", "static"}
_FUNCTION_CONSTANT = re.compile(r"constant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\((\d+)\)\s*\]\]\s*;")

FunctionConstants = Mapping[str, bool | int | float]


def to_cpp(source: str, function_constants: FunctionConstants | None = None) -> str:
    """MSL as C++: threadgroup variables, pragmas and function constants are spelled clang's way."""
    # clang drops a pragma that it does not know in silence
    source = re.sub(r"#pragma\s+METAL\s+fp\s+contract", "#pragma clang fp contract", source)
    source = re.sub(r"#pragma\s+METAL\s+fp\s+math_mode[^\n]*", "", source)
    source = _FUNCTION_CONSTANT.sub(lambda found: _define(found, function_constants or {}), source)
    # an attribute whose name is one of our macros; it numbers threadgroup arguments of helper functions
    source = re.sub(r"\[\[\s*threadgroup\(\d+\)\s*\]\]", "", source)
    # clang refuses array parameters with an address space; a pointer is what they decay to
    source = re.sub(r"((?:constant const|const constant) \w+) (\w+)\[\w+\](?=\s*[,)])", r"\1* \2", source)
    return mark_threadgroup_variables(source)


def _define(found: re.Match[str], values: FunctionConstants) -> str:
    kind, name = found[1], found[2]
    value = values.get(name)
    literal = str(value).lower() if isinstance(value, bool) else str(value or 0)
    defined = str(value is not None).lower()
    return f"static constant constexpr {kind} {name} = {literal}; static constexpr bool {name}_defined = {defined};"


@functools.lru_cache(maxsize=512)
def mark_threadgroup_variables(source: str) -> str:
    """Replaces `threadgroup` by MSL_THREADGROUP_VARIABLE where it declares a variable.

    `threadgroup float x[4];` is a variable, while in `threadgroup float* p` and in parameters it qualifies a pointee.
    """
    tokens = _TOKEN.findall(source)
    solid = [i for i, token in enumerate(tokens) if not token.isspace() and not token.startswith(("//", "/*"))]
    depth = 0
    for position, index in enumerate(solid):
        token = tokens[index]
        depth += (token == "(") - (token == ")")
        if (
            token == "threadgroup"
            and depth == 0
            and _declares([tokens[i] for i in solid[position + 1 : position + 200]])
        ):
            tokens[index] = "MSL_THREADGROUP_VARIABLE"
    return "".join(tokens)


def _declares(following: list[str]) -> bool:
    """Whether the tokens after `threadgroup` are a type and a name, ended by something that ends a declarator."""
    brackets = names = 0
    for token in following:
        if token == "<":
            brackets += 1
        elif token == ">":
            brackets -= 1
        elif brackets:
            continue
        elif token in "[;={,":
            return names >= 2
        elif token in "*&()":
            return False
        elif token == "::":
            names -= 1
        elif re.match(r"[A-Za-z_]", token) and token not in _NOT_A_NAME:
            names += 1
    return False


def kernel_parameters(source: str, kernel: str) -> list[str]:
    """The parameters of the `[[kernel]]` function of that name, each as text."""
    found = re.search(rf"\[\[\s*kernel[^\n]*\]\]\s*void\s+{re.escape(kernel)}\s*\((.*?)\)\s*\{{", source, re.DOTALL)
    if not found:
        raise CompileError(f"[{kernel}] no [[kernel]] function of this name in the source")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", found[1], flags=re.DOTALL)
    parameters, depth = [""], 0
    for character in text:
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0:
            parameters.append("")
        else:
            parameters[-1] += character
    return [parameter.strip() for parameter in parameters if parameter.strip()]
