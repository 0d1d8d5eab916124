"""What a worker is made of: its pool, its two roles, its transfer. Made by a launcher.

Knows no thread: `jpd.worker.worker` turns it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from jpd.transfer.protocol import KVTransfer
from jpd.worker.decode_attempts import DecodeAttempts
from jpd.worker.page_pool import PagePool
from jpd.worker.prefill_attempts import PrefillAttempts
from jpd.worker.protocol import Role


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a launcher puts into a worker; a role that it was not built for is None."""

    pool: PagePool
    prefill: PrefillAttempts | None
    decode: DecodeAttempts | None
    destinations: frozenset[str]  # workers for whose reservations this one can prefill
    transfer: KVTransfer
    warm_up: Callable[[Callable[[], None]], None]
    """Compiles everything, on the worker's thread; calls its argument between executables."""
    num_compilations: Callable[[], int]  # since ready

    @property
    def roles(self) -> list[PrefillAttempts | DecodeAttempts]:
        """Those it was built for."""
        return [role for role in (self.prefill, self.decode) if role is not None]

    @property
    def is_holding(self) -> bool:
        """Whether any attempt holds something here."""
        holds_prefill = self.prefill is not None and self.prefill.num_held > 0
        return holds_prefill or (self.decode is not None and self.decode.num_slots_used > 0)

    def possible_roles(self) -> tuple[Role, ...]:
        """What it was compiled for; a prefill worker must have somebody to prefill for."""
        can = {
            "prefill": self.prefill is not None and bool(self.destinations),
            "decode": self.decode is not None,
            "colocated": self.prefill is not None and self.decode is not None,
        }
        return tuple(role for role in get_args(Role) if can[role])
