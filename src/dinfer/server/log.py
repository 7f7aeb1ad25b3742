"""Logs as lines of JSON."""

import json
import logging
import time


class JsonLines(logging.Formatter):
    """time, level, event, and the fields of the record, in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """A line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
