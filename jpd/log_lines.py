"""Log lines of every process of a server: plain, or one JSON object each, for machines.

`jpd serve --log-json` chooses; hosts in processes of their own are told by the environment. What a
caller gives as `extra={"fields": {...}}` stands in the object under its own names.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

PLAIN_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
JSON_VARIABLE = "JPD_LOG_JSON"
"""In the environment: "1" for JSON lines. It is inherited by the hosts."""


class JsonLines(logging.Formatter):
    """Time (UTC), level, logger, message, the record's own fields, and a traceback if there is."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: nothing in it can begin a line of its own


class PlainLines(logging.Formatter):
    """For people: PLAIN_FORMAT on one line whatever the message holds; tracebacks are indented."""

    def __init__(self) -> None:
        super().__init__(PLAIN_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {one_line(line)}" for line in lines)


def one_line(text: str) -> str:
    """The text with all that no terminal should be told written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wants_json(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(JSON_VARIABLE) == "1"


def start_logging(
    as_json: bool | None = None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Lines of level INFO and above go to stderr. None: as the environment has it.

    Tells the environment, for the processes that this one starts.
    """
    as_json = wants_json(environment) if as_json is None else as_json
    environment[JSON_VARIABLE] = "1" if as_json else "0"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("jpd").setLevel(logging.INFO)


def line_of_host(host: str, line: str, as_json: bool) -> str:
    """A line that a host wrote, with its name; what is no JSON becomes the message of an object."""
    if not as_json:
        return f"{host} | {line}"
    try:
        found = json.loads(line)
    except ValueError:
        found = line
    if not isinstance(found, dict):
        found = {"level": "INFO", "logger": "stderr", "message": line}
    return json.dumps({"host": host, **found})
