"""Memory that a transport can reach: regions, and the region of a tensor.

A region never owns memory: the caller keeps it alive while it is registered with a transport.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import LayoutError

CPU = "cpu"
CUDA = "cuda"
"""The kind of the memory of NVIDIA's GPUs, and of AMD's, as torch names it."""
ADDRESS_LIMIT = 1 << 63
"""Addresses stay below this, so that sums of addresses and offsets never leave 64 signed bits."""

U64Array = npt.NDArray[np.uint64]
I64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Region:
    """One contiguous range of memory; ``device`` is an index within the kind, 0 for CPU memory.

    Raises ``LayoutError`` if the range is empty or leaves the address space, or kind or index are
    out of bounds.
    """

    address: int
    nbytes: int
    kind: str = CPU
    device: int = 0

    def __post_init__(self) -> None:
        if self.address <= 0 or self.nbytes <= 0 or self.address + self.nbytes > ADDRESS_LIMIT:
            raise LayoutError(
                f"region at {self.address:#x} of {self.nbytes} bytes: the address and the length "
                f"must be positive and end below {ADDRESS_LIMIT:#x}"
            )
        if not self.kind or len(self.kind) > 16 or not 0 <= self.device < 1 << 16:
            raise LayoutError(
                f"region of kind {self.kind[:32]!r}, device {self.device}: a kind has 1 to 16 "
                f"characters and a device index lies in 0 to {(1 << 16) - 1}"
            )

    @property
    def end(self) -> int:
        """The first address after the region."""
        return self.address + self.nbytes

    def contains(self, other: Region) -> bool:
        """Return whether every byte of ``other`` lies in this region, on the same device."""
        same = (self.kind, self.device) == (other.kind, other.device)
        return same and self.address <= other.address and other.end <= self.end


def region_of(tensor: object) -> Region:
    """Return the memory of a tensor or array as a region; the caller keeps it alive.

    For a torch tensor (any object with ``untyped_storage()``) its whole storage, so that views of
    one buffer give equal regions; for a numpy array its own memory. Raises ``LayoutError`` for
    anything else, for empty memory, and for an array that is not contiguous.
    """
    if isinstance(tensor, np.ndarray):
        if not (tensor.flags.c_contiguous or tensor.flags.f_contiguous):
            raise LayoutError(
                f"array of shape {tensor.shape} with strides {tensor.strides} is not contiguous: "
                "pass the buffer that it is a view of"
            )
        return Region(address=tensor.ctypes.data, nbytes=tensor.nbytes)
    if hasattr(tensor, "untyped_storage") and hasattr(tensor, "device"):
        storage, device = tensor.untyped_storage(), tensor.device
        return Region(
            address=storage.data_ptr(),
            nbytes=storage.nbytes(),
            kind=device.type,
            device=device.index or 0,
        )
    raise LayoutError(
        f"cannot take the memory of a {type(tensor).__name__}: pass a numpy array or a tensor "
        "with an untyped_storage()"
    )
