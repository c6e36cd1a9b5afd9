"""The policies by their names on the wire."""

from stopway_core.policies.native import NATIVE
from stopway_core.policy import Policy

POLICIES: dict[str, Policy] = {NATIVE.name: NATIVE}
