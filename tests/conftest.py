"""Settings of all tests: Hypothesis, Ctrl-C, and the fixtures that start engines."""

import signal

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.engines.fixtures"]

settings.register_profile(
    "kvferry", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvferry")

# Background jobs of a shell ignore Ctrl-C, and child processes inherit that: commands that tests
# interrupt would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: keys are made anew in each process, and all have to agree."""
    return argname if isinstance(val, bytes) else None
