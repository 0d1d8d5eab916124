"""How far long work has come, on stderr.

A load tells it by bytes: on a terminal one line written over, else a few lines. What is counted has
a bar, on a terminal only.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from jpd.checkpoint.progress import Progress as LoadProgress

TERMINAL_SECONDS = 0.1
FILE_SECONDS = 2.0


@contextlib.contextmanager
def counted_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is gone in the end; gives a callable that is told how many more are done."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class ProgressLine:
    """A ProgressCallback. Prints at most every so often, and when a phase is done."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last_time = 0.0

    def __call__(self, progress: LoadProgress) -> None:
        is_done = progress.done_bytes >= progress.total_bytes
        interval = TERMINAL_SECONDS if self._is_terminal else FILE_SECONDS
        now = time.monotonic()
        if now - self._last_time < interval and not is_done:
            return
        self._last_time = now
        line = describe(progress)
        if self._is_terminal:
            print(f"\r\x1b[K{line}", end="\n" if is_done else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def describe(progress: LoadProgress) -> str:
    total = max(progress.total_bytes, 1)
    share = f"{progress.phase} {progress.done_bytes / total:.0%} of {total / 1e9:.2f} GB"
    if progress.done_bytes >= progress.total_bytes:
        return f"{share}, {progress.elapsed_seconds:.1f} s"
    return f"{share}, {progress.seconds_left:.0f} s left"
