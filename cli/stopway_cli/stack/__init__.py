"""The local stack: Redis, groups and gateway as processes of this machine.

async with LocalStack(StackConfig(tensor=2, port=0)) as stack:
    ...  # stack.url, stack.key, stack.pids

Imports no torch, and nothing of the engine but its pure parts.
"""

from stopway_cli.stack.config import Commands, StackConfig
from stopway_cli.stack.local import LocalStack, Progress

__all__ = ["Commands", "LocalStack", "Progress", "StackConfig"]
