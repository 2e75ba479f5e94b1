"""The attributes that a kernel's parameters may have: `uint3 p [[thread_position_in_grid]]`."""

from __future__ import annotations

import re


def _vector(field: str) -> str:
    return f"{{t->{field}[0], t->{field}[1], t->{field}[2]}}"


# Name, type in the signatures that MLX generates, value in terms of msl_thread* t.
ATTRIBUTES: dict[str, tuple[str, str]] = {
    "dispatch_quadgroups_per_threadgroup": ("uint", "{t->dispatch_quadgroups}"),
    "dispatch_simdgroups_per_threadgroup": ("uint", "{t->dispatch_simdgroups}"),
    "dispatch_threads_per_threadgroup": ("uint3", _vector("dispatch_threads_per_threadgroup")),
    "grid_origin": ("uint3", "{0, 0, 0}"),
    "grid_size": ("uint3", _vector("threads_per_grid")),
    "quadgroup_index_in_threadgroup": ("uint", "{t->index_in_threadgroup / 4}"),
    "quadgroups_per_threadgroup": ("uint", "{t->quadgroups}"),
    "simdgroup_index_in_threadgroup": ("uint", "{t->simdgroup}"),
    "simdgroups_per_threadgroup": ("uint", "{t->simdgroups}"),
    "thread_execution_width": ("uint", "{32}"),
    "thread_index_in_quadgroup": ("uint", "{t->lane % 4}"),
    "thread_index_in_simdgroup": ("uint", "{t->lane}"),
    "thread_index_in_threadgroup": ("uint", "{t->index_in_threadgroup}"),
    "thread_position_in_grid": ("uint3", _vector("position_in_grid")),
    "thread_position_in_threadgroup": ("uint3", _vector("position_in_threadgroup")),
    "threadgroup_position_in_grid": ("uint3", _vector("threadgroup_position")),
    "threadgroups_per_grid": ("uint3", _vector("threadgroups_per_grid")),
    "threads_per_grid": ("uint3", _vector("threads_per_grid")),
    "threads_per_simdgroup": ("uint", "{32}"),
    "threads_per_threadgroup": ("uint3", _vector("threads_per_threadgroup")),
}

_ATTRIBUTE = re.compile(r"\[\[\s*(\w+)\s*\]\]")


def argument(parameter: str, buffers: int) -> tuple[str, bool]:
    """What to pass for a parameter, and whether that is a buffer; `buffers` have been passed before it."""
    found = _ATTRIBUTE.search(parameter)
    if found and found[1] in ATTRIBUTES:
        return f"msl::Attribute{{{ATTRIBUTES[found[1]][1]}}}", False
    if "*" in parameter:
        return f"msl::Pointer{{b[{buffers}]}}", True
    if "&" in parameter:
        return f"msl::Reference{{b[{buffers}]}}", True
    raise ValueError(f"[emulator] cannot pass an argument for the parameter {parameter!r}")


def entry_point(function: str, parameters: list[str]) -> tuple[str, int]:
    """C++ that calls `function` (with its template arguments) for one thread, and how many buffers it takes."""
    arguments: list[str] = []
    buffers = 0
    for parameter in parameters:
        text, is_buffer = argument(parameter, buffers)
        arguments.append(text)
        buffers += is_buffer
    call = f"{function}({', '.join(arguments)});"
    return (
        '\n#line 1 "entry point"\n'
        'MSL_EXPORT __attribute__((no_sanitize("thread"))) '
        f"void msl_entry(void** b, const msl_thread* t) {{ (void)b; (void)t; {call} }}\n"
        "MSL_EXPORT void msl_bounds(char** r) { r[0] = msl_section_begin; r[1] = msl_section_end;"
        " r[2] = msl_image_begin; r[3] = msl_image_end; }\n"
    ), buffers
