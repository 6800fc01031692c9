"""Settings of all tests: Hypothesis, Ctrl-C, and which tests share a process of pytest-xdist."""

import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")

# Background jobs of a shell ignore Ctrl-C, and child processes inherit that: commands that tests
# interrupt would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SUITES = {
    "tests/drivers/ucx/test_namespaces.py": "networks",
    "tests/drivers/ucx/": "ucx",
    "tests/drivers/nixl/": "nixl",
    "tests/integrations/vllm/geometry/": "geometry",
    "tests/integrations/vllm/routers/": "routers",
    "tests/integrations/vllm/test_conversation": "conversations",
    "tests/integrations/vllm/": "vllm",
    "tests/examples/": "examples",
    "tests/testing/": "planted faults",
    "tests/": "others",
}
"""The suites that ``make integration`` runs side by side, by the beginning of their tests' paths.

NIXL brings a UCX of its own, so a process should not load both that and the driver ucx's. UCX reads
a process's routes once, and the tests in "networks" change them.
"""


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each suite a process of its own with ``--dist loadgroup``.

    Groups by marks do not work: pytest-xdist 3.8 sets ``_nodeid``, which pytest 9.2 does not have.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _suite
    return scheduler


def _suite(test: str) -> str:
    return next(suite for path, suite in SUITES.items() if test.startswith(path))
