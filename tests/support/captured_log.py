"""What the loggers of jpd write while a test runs, in the form that it asks for."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def captured_log(formatter: logging.Formatter, level: int) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("jpd")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
