"""Logs as JSON: one object a line from both processes, whatever the message holds."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from loka_serve.server.log import JsonFormatter
from tests.server.processes import running, scripted_command
from tests.server.scripted_engine import RAISE, command


def record(message: str, *arguments: object, **members: object) -> logging.LogRecord:
    made = logging.LogRecord("loka_serve.x", logging.WARNING, "/secret/file.py", 1, message, arguments, None)
    made.created = 1_700_000_000.25
    vars(made).update(members)
    return made


def test_the_members_of_a_line() -> None:
    line = JsonFormatter("api").format(record('%s of %d\n"x" \udcff', "one", 2, request_id="r1"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z", "level": "warning", "process": "api", "logger": "loka_serve.x",
        "message": 'one of 2\n"x" \\udcff', "request_id": "r1",
    }  # fmt: skip


def test_an_exception_stays_in_its_line() -> None:
    try:
        raise ValueError("told to")
    except ValueError as error:
        line = JsonFormatter("api").format(record("failed", exc_info=(ValueError, error, error.__traceback__)))
    entry = json.loads(line)
    assert entry["exception"].startswith("Traceback") and entry["exception"].endswith("ValueError: told to")


def test_every_line_of_both_processes_is_json(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file, "--log-format", "json", "--summary-interval-s", "0.2")) as server:
        assert server.recommend(history_sids=command(RAISE)).status_code == 500
        server.wait_for_log("req/s", 5)
        entries = [json.loads(line) for line in server.log.splitlines()]
    assert {entry["process"] for entry in entries} == {"api", "engine"}
    assert any("told to raise" in entry.get("exception", "") for entry in entries)
    assert all({"time", "level", "process", "logger", "message"} <= set(entry) for entry in entries)
