"""`jpd serve`: launch the pair, open the doors, say so in one line, and serve until a signal.

The ready line goes to stdout, everything else to stderr. After it nothing compiles.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jpd.api import LOOPBACK, launch
from jpd.checkpoint.model_source import Model
from jpd.cli_arguments import check_writable, count, not_negative, port
from jpd.cli_pair import add_pair_arguments, load_pair
from jpd.cli_progress import ProgressLine
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem
from jpd.frontend.border import DEFAULT_MAX_CALLS
from jpd.frontend.door_security import DoorSecurity
from jpd.frontend.operations import jpd_version
from jpd.frontend.otlp import open_otlp
from jpd.frontend.server import Endpoints
from jpd.frontend.tool_formats import FORMATS
from jpd.log_lines import JSON_VARIABLE, start_logging
from jpd.router.trace import chrome_trace

HELP = "serve over HTTP (OpenAI's API) and gRPC until SIGINT or SIGTERM"
API_KEY_VARIABLE = "JPD_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser, answers_people=True)
    parser.add_argument(
        "--host", default=LOOPBACK, metavar="H", help=f"address to listen on, default {LOOPBACK}"
    )
    parser.add_argument(
        "--http-port", type=port, default=8000, metavar="P", help="default 8000; 0: a free one"
    )
    parser.add_argument(
        "--grpc-port", type=port, default=8001, metavar="P", help="default 8001; 0: a free one"
    )
    parser.add_argument(
        "--drain-seconds",
        type=not_negative,
        default=5.0,
        metavar="S",
        help="how long running requests may go on after a signal, default 5",
    )
    parser.add_argument(
        "--max-calls",
        type=count,
        default=DEFAULT_MAX_CALLS,
        metavar="N",
        help=f"calls under way at a time at each door, default {DEFAULT_MAX_CALLS}; then 429",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let hosts talk over a network without certificates ([security])",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE) or None,
        metavar="K",
        help=f"that callers must send as a Bearer token; better in ${API_KEY_VARIABLE}",
    )
    parser.add_argument(
        "--log-json",
        action="store_true",
        help=f"log lines as JSON objects, those of hosts too; or {JSON_VARIABLE}=1",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="written at the end: phases of the last requests, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="of a collector for OpenTelemetry spans (extra otel); or the OTEL_* variables",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM; the doors speak TLS only")
    parser.add_argument("--tls-key", metavar="FILE", help="of the certificate, PEM")
    parser.add_argument("--chat-template", metavar="FILE", help="instead of the model's own")
    parser.add_argument(
        "--tool-call-parser",
        choices=tuple(FORMATS),
        help="how the model writes calls of functions; default: as its chat template has it",
    )


def _check_ports(host: str, numbers: Sequence[int]) -> None:
    """Learn that a port is taken now, not after the weights are loaded. Raises ConfigError.

    All are held at once, so that two equal ones are found too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as held:
        for number in numbers:
            probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, number))
            except (OSError, TypeError) as error:  # TypeError: of a name that is no host's
                reason = error.strerror if isinstance(error, OSError) else None
                rule = f"cannot listen there: {reason or error}"
                problem = Problem("jpd serve", "port", f"{host}:{number}", rule)
                raise ConfigError([problem]) from error
            probe.listen()  # two bound sockets may share a port, two that listen may not


def run(options: argparse.Namespace) -> int:
    start_logging(options.log_json or None)
    started = time.monotonic()
    _check_ports(options.host, (options.http_port, options.grpc_port))
    files = [None if name is None else Path(name) for name in (options.tls_cert, options.tls_key)]
    DoorSecurity(options.api_key, *files)  # learn what is wrong before the weights are loaded
    if options.timeline is not None:
        check_writable(options.timeline, "jpd serve", "--timeline")
    tracing = open_otlp(options.otlp_endpoint, os.environ, jpd_version())
    model, deployment = _load(options)
    print(f"loading {model.name} on {deployment.file} ...", file=sys.stderr, flush=True)
    server = launch(
        model,
        deployment,
        tool_call_parser=options.tool_call_parser,
        progress=ProgressLine(),
        tracer_provider=tracing,
    )
    with contextlib.ExitStack() as running:
        if tracing is not None:
            running.callback(tracing.shutdown)  # after the server: its last spans are sent too
        running.enter_context(server)
        try:
            doors = server.serve(
                options.http_port,
                options.grpc_port,
                options.host,
                api_key=options.api_key,
                tls_cert=options.tls_cert,
                tls_key=options.tls_key,
                max_calls=options.max_calls,
            )
        except OSError as error:
            ports = [options.http_port, options.grpc_port]
            raise ConfigError([Problem("jpd serve", "ports", ports, str(error))]) from error
        logging.getLogger("jpd").info("started in %.1f s", time.monotonic() - started)
        ready = _ready_line(doors, server.model_name, deployment.file)
        signal = server.wait_for_signal(when_armed=lambda: print(ready, flush=True))
        print(f"{signal.name}: draining up to {options.drain_seconds:g} s", file=sys.stderr)
        server.close(options.drain_seconds)
        if options.timeline is not None:
            options.timeline.write_text(json.dumps(chrome_trace(server.trace.requests())))
    return 0


def _load(options: argparse.Namespace) -> tuple[Model, DeploymentConfig]:
    model, deployment = load_pair(
        options,
        chat_template=options.chat_template,
        generation_config=options.generation_config,
    )
    if recommended := model.generation.given():
        message = "requests that leave them out have the model's own: %s (--generation-config)"
        logging.getLogger("jpd").info(message, recommended)
    if options.insecure:
        security = dataclasses.replace(deployment.security, insecure=True)
        deployment = dataclasses.replace(deployment, security=security)
    return model, deployment


def _ready_line(doors: Endpoints, model_name: str, mesh_file: str) -> str:
    host = f"[{doors.host}]" if ":" in doors.host else doors.host
    scheme = "https" if doors.has_tls else "http"
    http, grpc = f"{scheme}://{host}:{doors.http_port}", f"{host}:{doors.grpc_port}"
    return f"jpd ready: {http} grpc {grpc} model {model_name} mesh {mesh_file}"
