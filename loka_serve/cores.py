"""How many threads torch should use on a CPU."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """All usable cores but one, which is left to whatever else runs.

    Threads that spin at a barrier, waiting for one without a core, are worse than none: on two busy cores, two threads
    took 200 times as long as one for a small matrix product.
    """
    return max(1, usable_cores() - 1)
