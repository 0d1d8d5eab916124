"""How far a load has come, on stderr: on a terminal one line written over, else a few lines."""

import sys
import time

from jpd.checkpoint.progress import Progress

TERMINAL_SECONDS = 0.1
FILE_SECONDS = 2.0


class ProgressLine:
    """A ProgressCallback. Prints at most every so often, and when a phase is done."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last_time = 0.0

    def __call__(self, progress: Progress) -> None:
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


def describe(progress: Progress) -> str:
    total = max(progress.total_bytes, 1)
    share = f"{progress.phase} {progress.done_bytes / total:.0%} of {total / 1e9:.2f} GB"
    if progress.done_bytes >= progress.total_bytes:
        return f"{share}, {progress.elapsed_seconds:.1f} s"
    return f"{share}, {progress.seconds_left:.0f} s left"
