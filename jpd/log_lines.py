"""Log records as one JSON object a line, for machines; chosen by `jpd serve --log-json`.

What a caller gives as `extra={"fields": {...}}` stands in the object under its own names.
"""

import json
import logging
from datetime import UTC, datetime


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
