"""Who may call which path: decided before a request's body is read."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from loka_serve.server.api_keys import ADMIN, ApiKey, ApiKeys
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.problems import FORBIDDEN, UNAUTHORIZED, ProblemError

# For probes and for Prometheus, which show nothing of a client. Everything else needs a key once there are keys.
OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/metrics"})
CATALOG_PREFIX, DEBUG_PREFIX = "/v1/catalog", "/v1/debug"
READING_METHODS = ("GET", "HEAD")
MISSING, UNKNOWN, SCOPE = "missing", "unknown", "scope"


@dataclass
class Access:
    """Checks the keys of requests; without a file of keys everything is open but what a setting keeps closed."""

    keys: ApiKeys | None
    metrics: ServerMetrics

    def __post_init__(self) -> None:
        if self.keys is not None:
            for reason in (MISSING, UNKNOWN, SCOPE):
                self.metrics.refused_keys.labels(reason)

    def check(self, scope: Scope) -> ApiKey | None:
        """The key of a request; None where none is needed.

        Raises:
            ProblemError: 401 without a known key, 403 without the scope for this path, or, where there are no keys, for
                what a page of another origin has a browser send.
        """
        if scope["path"] in OPEN_PATHS:
            return None
        if self.keys is None:
            if needs_admin(scope["method"], scope["path"]) and is_cross_origin(scope):
                raise ProblemError(FORBIDDEN, "pages of another origin may not call this")
            return None
        presented = presented_key(scope)
        if presented is None:
            self.metrics.refused_keys.labels(MISSING).inc()
            raise ProblemError(UNAUTHORIZED, "expected a key in Authorization: Bearer KEY, or in X-API-Key")
        key = self.keys.find(presented)
        if key is None:
            self.metrics.refused_keys.labels(UNKNOWN).inc()
            raise ProblemError(UNAUTHORIZED, "the key is not known")
        if needs_admin(scope["method"], scope["path"]) and key.scope != ADMIN:
            self.metrics.refused_keys.labels(SCOPE).inc()
            raise ProblemError(FORBIDDEN, "this needs a key of the scope admin")
        return key


def needs_admin(method: str, path: str) -> bool:
    """Whether a path changes what others get, or shows the server's inside."""
    if path.startswith(DEBUG_PREFIX):
        return True
    return path.startswith(CATALOG_PREFIX) and method not in READING_METHODS


def is_cross_origin(scope: Scope) -> bool:
    """Whether a browser says that the request comes from a page that this server has not sent."""
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host", b"")


def presented_key(scope: Scope) -> str | None:
    """The key in a request's headers; None if there is none."""
    found: str | None = None
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found = value.decode("latin-1").strip()
        elif name == b"authorization":
            scheme, _, credentials = value.decode("latin-1").strip().partition(" ")
            if scheme.lower() == "bearer" and credentials.strip():
                return str(credentials.strip())
    return found or None
