"""uvicorn's HTTP protocol with an end to its patience: a client that stands still is let go.

    connected ── whole request ──► the route answers ── all taken ──► next request, or the end
        └─ REQUEST_SECONDS ─┘                     └─ TAKING_SECONDS ─┘

Without it whoever sends half a request, or reads nothing of an answer, holds its connection for
ever, and one of the calls at a time. Knows uvicorn, no route: the border cancels the request of a
connection that has ended. Used by `server`.
"""

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("jpd.http")

REQUEST_SECONDS = 60.0
"""From a connection, or the answer before, to the last byte of a request."""
TAKING_SECONDS = 120.0
"""For a client to take what fills the buffers, or what is left of an answer at its end."""


class PatientProtocol(H11Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._coming, self._taking = _Patience(self), _Patience(self)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taking.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._coming.stop()
        self._taking.stop()

    def let_go(self, why: str) -> None:
        logger.info("%s %s: its connection ends", self.client or "a client", why)
        self.transport.abort()

    def _look(self) -> None:
        """The clock of a request runs to its last byte; that of a closed end until all is taken."""
        if self.transport.is_closing():
            self._expect_taking()
        elif self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._coming.start(REQUEST_SECONDS, f"sent no whole request in {REQUEST_SECONDS:g} s")
        else:
            self._coming.stop()

    def _expect_taking(self) -> None:
        if self in self.connections:
            why = f"took nothing of its answer for {TAKING_SECONDS:g} s"
            self._taking.start(TAKING_SECONDS, why)


class _Patience:
    """A clock that lets go of a connection."""

    def __init__(self, protocol: PatientProtocol) -> None:
        self._protocol = protocol
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, why: str) -> None:
        """Once it runs it goes on."""
        if self._timer is None:
            self._timer = self._protocol.loop.call_later(seconds, self._protocol.let_go, why)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
