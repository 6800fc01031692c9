"""Every asymmetry of two engines, through endpoints, with caches that vLLM lays out."""

import pytest

MARKS = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
"""Of all tests here: they import vLLM, and start no engine of it."""
