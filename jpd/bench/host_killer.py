"""Ends hosts of this process without a word, as a machine that fails does. For soaks, on Linux.

Knows them as its own children by their command; nothing else is ever touched.
"""

import os
import random
import signal
from pathlib import Path

from jpd.launch import host

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def host_processes() -> list[int]:
    """Children of this process that are hosts and have not ended."""
    children: list[int] = []
    for task in (PROC / "self" / "task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in children if _is_host(child)]


def kill_one(draw: random.Random) -> str:
    """SIGKILL to any of them; its name. There must be one."""
    victim = draw.choice(host_processes())
    os.kill(victim, signal.SIGKILL)
    return f"host process {victim}"


def memory_bytes() -> int:
    """Resident in this process and its hosts."""
    return sum(_resident_bytes(process) for process in (os.getpid(), *host_processes()))


def _is_host(process: int) -> bool:
    try:
        command = (PROC / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return host.__name__.encode() in command  # a process that has ended has no command


def _resident_bytes(process: int) -> int:
    try:
        return int((PROC / str(process) / "statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
