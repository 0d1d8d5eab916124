"""The `jpd` command as a program: interrupted at any time, it ends with 130 and no traceback.

The first Ctrl-C ends the command in good order, a second one ends the process. Importing JAX and
its friends takes a second or two, in which it must work as well.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(sys.stderr.fileno(), b"jpd: interrupted\n")
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)

from jpd.cli import main  # noqa: E402  # only now, see above


def run() -> int:
    """The exit status of the command of this process's arguments."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _interrupt)
    status = main()
    if status == INTERRUPTED:
        # Threads may be compiling, and nothing can break that off but the end of the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(run())
