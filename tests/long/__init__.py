"""Tests that take minutes: run by ``make test-all``, not by ``make test``.

``norecursedirs`` in pyproject.toml hides this folder from a plain ``pytest``; ``pytest tests/long``
runs it.
"""
