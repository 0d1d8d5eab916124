"""The gRPC server of a host process: the worker service on one port. Used by launchers' hosts."""

from typing import Any

from jpd.rpc.security import Security, add_port, open_server, with_port
from jpd.rpc.worker_pb2_grpc import add_WorkerHostServicer_to_server
from jpd.worker.service import WorkerService


class HostServer:
    """One start, one stop, on the host's event loop."""

    def __init__(self, service: WorkerService, security: Security) -> None:
        self._security = security
        self._server: Any = open_server(security)
        add_WorkerHostServicer_to_server(service, self._server)

    async def start(self, address: str, port: int = 0) -> int:
        """Serve; the port, a free one for 0. Raises OSError."""
        bound = add_port(self._server, with_port(address, port), self._security)
        await self._server.start()
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Take no new calls; those under way have this long to end."""
        await self._server.stop(grace_seconds)
