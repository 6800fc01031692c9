"""Settings of all tests: no deadlines for Hypothesis, and the default handler of Ctrl-C."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")

# Background jobs of a shell ignore Ctrl-C, and child processes inherit that: commands that tests
# interrupt would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
