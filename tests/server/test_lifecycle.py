"""What is said and set before the first request."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from loka_serve.config import ServerConfig
from loka_serve.server.lifecycle import raise_file_limit, warn_of_open_port


@pytest.mark.parametrize(
    ("host", "with_keys", "warned"),
    [("0.0.0.0", False, True), ("::", False, True), ("10.0.0.1", False, True), ("0.0.0.0", True, False)]
    + [(host, False, False) for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost")],
)
def test_an_open_port_without_keys_is_said(
    host: str, with_keys: bool, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(bundle=tmp_path, host=host, api_keys_file=tmp_path if with_keys else None)
    with caplog.at_level(logging.WARNING):
        warn_of_open_port(config)
    assert ("whoever reaches" in caplog.text) == warned


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert raised == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536), hard)
