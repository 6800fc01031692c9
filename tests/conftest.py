"""What every test shares: Hypothesis without a clock, since the machine may be busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")
