"""Who may use the public doors: an API key that every caller shows, and TLS.

Open without the key are only /health, the page without its data, the API's own pages, and gRPC's
health service; /admin has a rule of its own. Read by both doors; made by `jpd.api`. Between jpd's
own processes other rules hold: see `jpd.rpc.security`.
"""

import hmac
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from jpd.errors import ConfigError, JpdError, Problem

OPEN_PATHS = frozenset(
    ("/", "/health", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
)
OPEN_FOLDERS = ("/admin/", "/page/")
OPEN_GRPC_SERVICES = ("/grpc.health.v1.Health/",)


class UnauthorizedError(JpdError):
    """The API key is missing or another one."""

    def __init__(self) -> None:
        super().__init__('the API key is missing or wrong: send "Authorization: Bearer KEY"')


@dataclass(frozen=True, slots=True)
class DoorSecurity:
    """What the doors ask for. Raises ConfigError for a key or files that cannot be used."""

    api_key: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None  # PEM, with the certificates between it and its authority
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            rule = "must be printable ASCII without spaces, and not empty"
            raise ConfigError([Problem("doors", "api_key", "...", rule)])
        if (self.tls_cert is None) != (self.tls_key is None):
            files = [str(self.tls_cert), str(self.tls_key)]
            rule = "certificate and key belong together: give both or none"
            raise ConfigError([Problem("doors", "tls_cert, tls_key", files, rule)])
        if self.tls_cert is not None and self.tls_key is not None:
            _check_chain(self.tls_cert, self.tls_key)

    @property
    def has_tls(self) -> bool:
        return self.tls_cert is not None

    def read_chain(self) -> tuple[bytes, bytes]:
        """Key and certificate, as gRPC takes them. Only with TLS."""
        assert self.tls_cert is not None and self.tls_key is not None
        return self.tls_key.read_bytes(), self.tls_cert.read_bytes()

    def check_path(self, path: str, authorization: bytes) -> None:
        """Raises UnauthorizedError for an HTTP request without the key, where one is needed."""
        if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDERS):
            self._check(authorization)

    def check_method(self, method: str, authorization: bytes) -> None:
        """The same for a gRPC method, as "/service/method"."""
        if not method.startswith(OPEN_GRPC_SERVICES):
            self._check(authorization)

    def _check(self, authorization: bytes) -> None:
        if self.api_key is None:
            return
        scheme, _, shown = authorization.partition(b" ")
        is_right = hmac.compare_digest(shown.strip(), self.api_key.encode())
        if scheme.lower() != b"bearer" or not is_right:
            raise UnauthorizedError

    def warning(self, is_loopback: bool) -> str | None:
        """What is unsafe about doors on an address that other machines can reach."""
        if is_loopback:
            return None
        if self.api_key is None:
            return "other machines can reach the doors and no API key is asked for (--api-key)"
        if not self.has_tls:
            return "the API key and all texts cross the network unencrypted (--tls-cert, --tls-key)"
        return None


NO_SECURITY = DoorSecurity()
"""Everybody may call, in plain text."""


def _check_chain(certificate: Path, key: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # asks nobody for one
    except (OSError, ssl.SSLError) as error:
        rule = f"must be a PEM certificate and its key, not encrypted: {error}"
        files = [str(certificate), str(key)]
        raise ConfigError([Problem("doors", "tls_cert, tls_key", files, rule)]) from error
