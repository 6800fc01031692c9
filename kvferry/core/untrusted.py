"""What decoding bytes from strangers can raise."""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""Whatever msgspec's decoders raise for bytes that are no message: they let the UnicodeDecodeError
(a ValueError) of a bad string through, and deep nesting is a RecursionError. Catch all of it: one
exception that escapes ends a thread that serves everybody."""
