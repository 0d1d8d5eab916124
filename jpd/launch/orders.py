"""What a host process is told at its start, and what it tells back. Records, as all that travels.

Used by every launcher of hosts and by the host itself.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from jpd.config import DeploymentConfig, HostConfig, SecurityConfig
from jpd.errors import ConfigError, Problem
from jpd.nn.config import WeightFormat
from jpd.rpc.security import Certificates, Security, is_loopback

EVENT_MARK = "jpd-host: "
"""Begins the lines of a host process's stdout that hold an event."""


@dataclass(frozen=True, slots=True)
class HostOrders:
    """All that a host needs to know; the model and the certificates it opens itself."""

    host: str
    deployment: DeploymentConfig
    model: str  # as `open_model` takes it, on the host's machine
    weights: WeightFormat | None
    can_prefill_locally: bool
    token: str

    @property
    def config(self) -> HostConfig:
        return self.deployment.host(self.host)

    def at(self, address: str) -> "HostOrders":
        """The same for a host that listens there."""
        hosts = tuple(
            replace(config, address=address) if config.name == self.host else config
            for config in self.deployment.hosts
        )
        return replace(self, deployment=replace(self.deployment, hosts=hosts))


@dataclass(frozen=True, slots=True)
class HostEvent:
    """One thing a host, or who watches its process, has to say."""

    kind: Literal["loading", "ready", "failed", "ended"]
    address: str = ""  # ready: of its worker service
    kv_address: str = ""  # ready: where KV for its workers goes
    error: bytes = b""  # failed: by jpd.rpc.failures
    reason: str = ""  # ended: how
    done_bytes: int = 0  # loading
    total_bytes: int = 0
    elapsed_seconds: float = 0.0


OnEvent = Callable[[HostEvent], None]
"""Called on any thread; must not block."""


class HostHandle(Protocol):
    """One running host, whoever runs it."""

    def stop(self) -> None:
        """Ask it to end; does not wait."""
        ...

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it has ended by then."""
        ...

    def kill(self) -> None:
        """End it now. Idempotent."""
        ...


class HostLauncher(Protocol):
    """Starts hosts; when one is started again is for the supervisor to say."""

    def start(self, orders: HostOrders, on_event: OnEvent) -> HostHandle:
        """Start a host and return at once; the rest is told by events, "ended" being the last."""
        ...

    def close(self) -> None:
        """Free what belongs to no single host. Idempotent."""
        ...


def address_problem(deployment: DeploymentConfig, host: str, address: str) -> Problem | None:
    """Tokens, prompts and KV do not go over a network in the clear unless that was asked for."""
    security = deployment.security
    if security.insecure or is_loopback(address):
        return None
    if security.has_certificates:
        if deployment.cache.transport != "jax_transfer":
            return None
        rule = "does not encrypt what it sends over a network: host_staged, or say --insecure"
        return Problem(deployment.file, "cache.transport", "jax_transfer", rule)
    rule = (
        "others can reach this address: give [security] ca_file, certificate_file and key_file, "
        "or say --insecure"
    )
    return Problem(deployment.file, f"host.{host}.address", address, rule)


def read_security(config: SecurityConfig, file: str, token: str) -> Security:
    """The token and the certificates. Raises ConfigError when a file cannot be read."""
    if config.ca_file is None or config.certificate_file is None or config.key_file is None:
        return Security(token)
    authority, certificate, key = (
        _read(file, key, path)
        for key, path in (
            ("ca_file", config.ca_file),
            ("certificate_file", config.certificate_file),
            ("key_file", config.key_file),
        )
    )
    return Security(token, Certificates(authority, certificate, key))


def read_token(config: SecurityConfig, file: str) -> str | None:
    """The token of the file, None when there is none. Raises ConfigError."""
    if config.token_file is None:
        return None
    token = _read(file, "token_file", config.token_file).decode("utf-8", "replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        rule = "must hold one line of printable ASCII"
        raise ConfigError([Problem(file, "security.token_file", config.token_file, rule)])
    return token


def _read(file: str, key: str, path: str) -> bytes:
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise ConfigError([Problem(file, f"security.{key}", path, rule)]) from error
