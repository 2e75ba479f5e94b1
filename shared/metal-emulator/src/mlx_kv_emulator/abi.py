"""The structures of runtime/abi.h for ctypes. Field names and order follow the header."""

from __future__ import annotations

import ctypes as c

# In the order of `enum Kind` in runtime/findings.h; the last two are found here and not by the runtime.
KINDS = (
    "race",
    "bounds",
    "read-only",
    "uninitialised",
    "divergence",
    "inactive-lane",
    "shift",
    "division",
    "conversion",
    "misaligned",
    "crash",
    "unwritten",
    "threadgroup-memory",
)

# After these a launch can go on, so a kernel may be allowed to do them.
ALLOWABLE = ("race", "uninitialised", "divergence", "inactive-lane", "shift", "conversion", "unwritten")

MAX_FINDINGS = 20


class Site(c.Structure):
    """struct msl_site."""

    _fields_ = [("file", c.c_char_p), ("line", c.c_uint), ("column", c.c_uint), ("caller", c.c_uint)]


class Buffer(c.Structure):
    """struct msl_buffer."""

    _fields_ = [
        ("data", c.c_void_p),
        ("size", c.c_ulong),
        ("writable", c.c_int),
        ("initialised", c.c_int),
        ("name", c.c_char_p),
        ("bytes_read", c.c_ulong),
        ("distinct_bytes_read", c.c_ulong),
        ("bytes_written", c.c_ulong),
        ("distinct_bytes_written", c.c_ulong),
        ("unwritten", c.c_ulong),
        ("first_unwritten", c.c_ulong),
    ]


class Variable(c.Structure):
    """struct msl_variable."""

    _fields_ = [("data", c.c_void_p), ("size", c.c_ulong), ("name", c.c_char_p)]


class Party(c.Structure):
    """struct msl_party."""

    _fields_ = [("threadgroup", c.c_uint), ("thread", c.c_uint), ("action", c.c_char_p), ("site", Site)]


class FindingRecord(c.Structure):
    """struct msl_finding."""

    _fields_ = [
        ("kind", c.c_int),
        ("space", c.c_int),
        ("memory", c.c_char_p),
        ("offset", c.c_long),
        ("access_size", c.c_ulong),
        ("memory_size", c.c_ulong),
        ("parties", c.c_int),
        ("party", Party * 2),
        ("lanes", c.c_uint * 2),
        ("count", c.c_uint),
    ]


class LaunchRecord(c.Structure):
    """struct msl_launch."""

    _fields_ = [
        ("entry", c.c_void_p),
        ("arguments", c.c_void_p),
        ("grid", c.c_uint * 3),
        ("threadgroup", c.c_uint * 3),
        ("reverse", c.c_int),
        ("checked", c.c_int),
        ("allowed", c.c_uint),
        ("threadgroup_begin", c.c_void_p),
        ("threadgroup_end", c.c_void_p),
        ("image_begin", c.c_void_p),
        ("image_end", c.c_void_p),
        ("arena_begin", c.c_void_p),
        ("arena_end", c.c_void_p),
        ("buffers", c.POINTER(Buffer)),
        ("buffer_count", c.c_int),
        ("variables", c.c_void_p),
        ("variable_count", c.c_int),
        ("sites", c.c_void_p),
        ("findings", c.POINTER(FindingRecord)),
        ("finding_capacity", c.c_int),
        ("finding_count", c.c_int),
        ("abandoned", c.c_int),
        ("barriers", c.c_ulong),
        ("simdgroup_barriers", c.c_ulong),
        ("simd_operations", c.c_ulong),
    ]
