"""Where spans go: an OTLP collector, named by a flag or by OpenTelemetry's own variables.

Knows the SDK and its exporters, which come with the extra `otel`; no server. Called by the command
line.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jpd.errors import ConfigError, Problem

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP_PATH = "/v1/traces"


def open_otlp(
    endpoint: str | None, environment: Mapping[str, str], version: str
) -> "TracerProvider | None":
    """A provider that exports in the background, or None when no endpoint is named.

    Its `shutdown` sends what is left. Raises ConfigError, also when the extra is missing.
    """
    if not is_wanted(endpoint, environment):
        return None
    _check_installed(endpoint, environment)
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.version": version}
    named = environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if "OTEL_SERVICE_NAME" not in environment and "service.name=" not in named:
        attributes["service.name"] = "jpd"
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint, environment)))
    return provider


def is_wanted(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Whether a flag or a variable names an endpoint, and no variable switches tracing off."""
    if endpoint is not None:
        return True
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_other = environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    return not is_off and not is_other and any(environment.get(name) for name in ENDPOINTS)


def _check_installed(endpoint: str | None, environment: Mapping[str, str]) -> None:
    missing = find_spec("opentelemetry") is None or any(
        find_spec(name) is None for name in ("opentelemetry.sdk", "opentelemetry.exporter")
    )
    if missing:
        name = "--otlp-endpoint" if endpoint else next(n for n in ENDPOINTS if environment.get(n))
        value = endpoint or environment[name]
        rule = (
            "needs the extra otel: pip install 'jpd[otel]'; without tracing: OTEL_SDK_DISABLED=true"
        )
        raise ConfigError([Problem("jpd serve", name, value, rule)])


def _exporter(endpoint: str | None, environment: Mapping[str, str]) -> "SpanExporter":
    name = next((name for name in PROTOCOLS if environment.get(name)), PROTOCOLS[0])
    protocol = environment.get(name) or "grpc"
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        rule = "must be a URL that begins with http:// or https://"
        raise ConfigError([Problem("jpd serve", "--otlp-endpoint", endpoint, rule)])
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        return over_grpc.OTLPSpanExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + HTTP_PATH  # as the variable without TRACES has it
        return over_http.OTLPSpanExporter(endpoint=endpoint)
    rule = "must be grpc or http/protobuf"
    raise ConfigError([Problem("environment", name, protocol, rule)])
