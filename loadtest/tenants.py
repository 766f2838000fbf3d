"""Mixed tenants: two shops' users and a third one's bulk work; the flags are those of locustfile.py.

locust -f loadtest/tenants.py --headless --host http://127.0.0.1:8000 --users 16 --run-time 60s --histories FILE \\
    --allow-refusals

The server tells them apart with --tenant-header X-Tenant.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from loadtest.locustfile import Shopper as _Shopper

TENANT = "X-Tenant"


class SmallShop(_Shopper):
    """Few users."""

    weight = 1
    label = "small shop"
    headers = {TENANT: "small"}


class LargeShop(_Shopper):
    """Three times as many, who must not crowd the small one out."""

    weight = 3
    label = "large shop"
    headers = {TENANT: "large"}


class NightlyJob(_Shopper):
    """Bulk requests, which take what the others leave, and a tenth at least."""

    weight = 2
    label = "nightly job"
    headers = {TENANT: "job"}
    fields = {"priority": "bulk", "timeout_ms": 60_000}
