"""When to try again: what the server says in Retry-After, else a wait that doubles and is drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loka_serve.client.errors import ClientError, NoAnswer, Overloaded, Unavailable
from loka_serve.client.requests import Call

JITTER = 0.1  # of a wait that the server asked for, so that not all clients come back at once


@dataclass(frozen=True)
class Retries:
    """How often to try again, and how patiently; only what does no harm if it is done twice is tried again blindly.

    Attributes:
        attempts: most attempts of one call, the first one included.
        first_wait, longest_wait: seconds; the wait doubles from one to the other. What the server asks for is kept to
            even if it is longer.
    """

    attempts: int = 4
    first_wait: float = 0.1
    longest_wait: float = 5.0

    def wait_after(self, error: ClientError, call: Call, attempt: int, left: float) -> float | None:
        """Seconds to wait before the next attempt; None if there is to be none.

        Args:
            attempt: that just failed, from 1.
            left: seconds of the call's time that are left.
        """
        if attempt >= self.attempts or not isinstance(error, Overloaded | Unavailable | NoAnswer):
            return None
        if isinstance(error, NoAnswer) and not call.is_repeatable:
            return None
        asked = None if isinstance(error, NoAnswer) else error.retry_after
        if asked is None:
            wait = random.uniform(0, min(self.longest_wait, self.first_wait * 2 ** (attempt - 1)))
        else:
            wait = asked * random.uniform(1, 1 + JITTER)
        return wait if wait < left else None
