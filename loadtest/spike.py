"""A spike: few users, then many, then few again; the flags are those of locustfile.py.

locust -f loadtest/spike.py --headless --host http://127.0.0.1:8000 --histories FILE --allow-refusals
"""

from __future__ import annotations

import sys
from pathlib import Path

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser

sys.path.insert(0, str(Path(__file__).parents[1]))
from loadtest.locustfile import Shopper

__all__ = ["Shopper", "Spike"]


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    """Flags of the shape."""
    group = parser.add_argument_group("spike", "How many users, and for how long.")
    group.add_argument("--calm-users", type=int, default=4, env_var="LOKA_CALM_USERS")
    group.add_argument("--spike-users", type=int, default=64, env_var="LOKA_SPIKE_USERS")
    group.add_argument("--spike-seconds", type=float, default=90.0, env_var="LOKA_SPIKE_SECONDS", help="of all")


class Spike(LoadTestShape):
    """Locust asks every second for (users, spawn rate); None ends the test."""

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        part = self.get_run_time() / options.spike_seconds
        if part >= 1:
            return None
        users = options.spike_users if 1 / 3 <= part < 2 / 3 else options.calm_users
        return users, float(users)
