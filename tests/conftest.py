"""For all tests: a property holds on a machine of any speed."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any-speed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-speed")
