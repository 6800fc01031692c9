"""What every test shares: Hypothesis without a clock, since the machine may be busy; and Ctrl-C."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")

# A shell has the jobs that it starts in the background ignore Ctrl-C, and their children inherit
# that: the commands that tests interrupt would never hear of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
