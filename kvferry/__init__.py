"""Moves the KV cache between LLM serving engines: any layout to any layout, over any transport.

Importing this package does no work. What an integration uses is in ``kvferry.core``; drivers
register under the entry-point group ``kvferry.drivers``.
"""


def __getattr__(name: str) -> str:
    """``__version__``, read from the installed distribution when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version(__name__)
