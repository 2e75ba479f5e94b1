"""Memory of a launch: copies of the arguments, aligned as Metal's buffers are, with guard zones between them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
_GUARD = 65536


@dataclass(frozen=True)
class Argument:
    """A buffer argument of a kernel.

    Attributes:
        name: what reports call it.
        data: contiguous memory; results are written back to it when `writable`.
        writable: the kernel may write.
        initialised: the contents mean something before the launch.
        offset: where the kernel's pointer points, in bytes into `data` (not 0 for negative strides).
    """

    name: str
    data: NDArray[Any]
    writable: bool = False
    initialised: bool = True
    offset: int = 0


class Arena:
    """One block that holds a copy of every argument. Guard zones are wide, so that wild indices land in them."""

    def __init__(self, arguments: Sequence[Argument | None]) -> None:
        """Copies the arguments in; None is an absent optional buffer, a null pointer."""
        self.arguments = arguments
        offset = _GUARD
        offsets: list[int] = []
        for argument in arguments:
            offsets.append(offset)
            offset += (-(-argument.data.nbytes // ALIGNMENT) * ALIGNMENT if argument else 0) + _GUARD
        self._memory = mmap.mmap(-1, offset)
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.end = self.begin + offset
        self.addresses: list[int | None] = [
            self.begin + o if a else None for a, o in zip(arguments, offsets, strict=True)
        ]
        for argument, address in zip(arguments, self.addresses, strict=True):
            if argument and address:
                ctypes.memmove(address, argument.data.ctypes.data, argument.data.nbytes)

    def pointers(self) -> ctypes.Array[ctypes.c_void_p]:
        """What the kernel gets, one address per argument."""
        values = [
            address + a.offset if a and address else None
            for a, address in zip(self.arguments, self.addresses, strict=True)
        ]
        return (ctypes.c_void_p * max(1, len(values)))(*values)

    def copy_back(self) -> None:
        """Writes the results into the arguments that are writable."""
        for argument, address in zip(self.arguments, self.addresses, strict=True):
            if argument and address and argument.writable:
                ctypes.memmove(argument.data.ctypes.data, address, argument.data.nbytes)


def poisoned(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Memory for an output with all bits set: NaN for floats, so that an element nobody wrote shows."""
    array = np.empty(size, dtype)
    array.view(np.uint8).fill(0xFF)
    return array
