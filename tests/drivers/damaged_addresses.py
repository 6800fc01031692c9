"""Addresses that were damaged on their way."""

from __future__ import annotations

from hypothesis import strategies as st


def damaged(address: bytes) -> st.SearchStrategy[bytes]:
    """Draw an address that is truncated, has one byte changed, or has one byte too many."""

    def damage(at: int) -> st.SearchStrategy[bytes]:
        changed = address[:at] + b"\xff" + address[at + 1 :]
        return st.sampled_from([address[:at], changed, address + b"x"])

    return st.integers(0, len(address) - 1).flatmap(damage)
