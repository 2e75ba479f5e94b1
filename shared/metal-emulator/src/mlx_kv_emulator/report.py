"""Turns the runtime's records into findings that a person can read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from . import abi
from .errors import Access, Finding, Place, Thread

Triple = tuple[int, int, int]
_THREADGROUP = 2  # the space of threadgroup memory


def thread(grid: Triple, size: Triple, group: int, index: int) -> Thread:
    """Thread `index` of threadgroup number `group`, where `size` is that of a full threadgroup."""
    counts = tuple(-(-g // s) for g, s in zip(grid, size, strict=True))
    at = _unravel(group, counts)
    extent = tuple(min(s, g - a * s) for g, s, a in zip(grid, size, at, strict=True))
    inside = _unravel(index, extent)
    x, y, z = (a * s + i for a, s, i in zip(at, size, inside, strict=True))
    return Thread((x, y, z), at, inside, index // 32, index % 32)


def _unravel(index: int, counts: Sequence[int]) -> Triple:
    return index % counts[0], index // counts[0] % counts[1], index // counts[0] // counts[1]


def findings(launch: abi.LaunchRecord, grid: Triple, size: Triple) -> list[Finding]:
    """The findings of a launch."""
    return [_finding(launch, launch.findings[i], grid, size) for i in range(launch.finding_count)]


def _finding(launch: abi.LaunchRecord, record: abi.FindingRecord, grid: Triple, size: Triple) -> Finding:
    accesses = tuple(
        Access(
            (party.action or b"").decode(),
            thread(grid, size, party.threadgroup, party.thread),
            _place(launch, party.site),
        )
        for party in record.party[: record.parties]
    )
    number: int = record.kind
    kind = abi.KINDS[number]
    return Finding(kind, _MESSAGES[kind](record), accesses)


def _place(launch: abi.LaunchRecord, site: abi.Site) -> Place | None:
    if not site.file:
        return None
    caller = None
    if site.caller and launch.sites:
        address = launch.sites + site.caller * ctypes.sizeof(abi.Site)
        caller = _place(launch, abi.Site.from_address(address))
    return Place(site.file.decode(), site.line, site.column, caller)


def _memory(record: abi.FindingRecord) -> str:
    if not record.memory:
        return "memory that belongs to no buffer"
    name = record.memory.decode()
    return f"threadgroup variable '{name}'" if record.space == _THREADGROUP else f"buffer '{name}'"


def _action(record: abi.FindingRecord, party: int = 0) -> str:
    return (record.party[party].action or b"").decode()


def _race(record: abi.FindingRecord) -> str:
    same_simdgroup = (
        record.party[0].threadgroup == record.party[1].threadgroup
        and record.party[0].thread // 32 == record.party[1].thread // 32
    )
    if record.party[0].threadgroup != record.party[1].threadgroup:
        missing = "they are in different threadgroups, which nothing orders"
    elif same_simdgroup:
        missing = "no barrier between them, and lanes of a simdgroup are not in step"
    else:
        missing = "no threadgroup_barrier for this memory between them"
    actions = f"{_action(record)} after {_action(record, 1)}"
    return f"{actions} of {_memory(record)}, byte {record.offset}, by two threads: {missing}"


def _bounds(record: abi.FindingRecord) -> str:
    if not record.access_size:
        return "index outside the array"
    if not record.memory:
        return f"{_action(record)} of {record.access_size} bytes in {_memory(record)}"
    return (
        f"{_action(record)} of {record.access_size} bytes at byte {record.offset} of {_memory(record)}, "
        f"which has {record.memory_size} bytes"
    )


def _divergence(record: abi.FindingRecord) -> str:
    operation = _action(record)
    if record.count:
        return f"{operation} reached by {record.count} threads of the threadgroup only; the others have returned"
    if operation == "threadgroup_barrier":
        return "threads of one threadgroup wait at different barriers"
    return (
        f"{operation} by lanes 0x{record.lanes[0]:08x} of a simdgroup while lanes 0x{record.lanes[1]:08x} are "
        f"at {_action(record, 1)}"
    )


def _inactive(record: abi.FindingRecord) -> str:
    lane = record.lanes[1].bit_length() - 1
    which = f"lane {lane}, which does not take part" if lane >= 0 else "a lane that does not exist"
    return f"{_action(record)} reads {which}"


_MESSAGES: dict[str, Callable[[abi.FindingRecord], str]] = {
    "race": _race,
    "bounds": _bounds,
    "read-only": lambda r: f"{_action(r)} to {_memory(r)}, an input, at byte {r.offset}",
    "uninitialised": lambda r: f"{_action(r)} of {_memory(r)}, byte {r.offset}, before anything was written there",
    "divergence": _divergence,
    "inactive-lane": _inactive,
    "shift": lambda _: "shift by a negative amount or by the width of the type or more",
    "division": lambda _: "integer division by zero, or overflow in it",
    "conversion": lambda _: "value that the target type cannot represent",
    "misaligned": lambda _: "access to an address that is not aligned for its type",
    "crash": lambda r: f"{_action(r)}; mode check may name the line",
}
