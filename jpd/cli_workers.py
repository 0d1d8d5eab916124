"""`jpd workers`: what an operator asks of a running server: list, drain, set-role, remove, add.

Speaks to the HTTP door's /admin routes; knows no router.
"""

import argparse
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from rich.table import Table

from jpd.cli_arguments import not_negative
from jpd.cli_pair import make_console
from jpd.errors import ConfigError, Problem, WorkerError

HELP = "list, drain, remove or add workers of a running server, or change their role"
DEFAULT_URL = "http://127.0.0.1:8000"
ROLES = ("prefill", "decode", "colocated")
COLUMNS = ("name", "host", "role", "roles", "state", "rows", "prefills", "reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default=DEFAULT_URL, metavar="U", help=f"of its HTTP door, default {DEFAULT_URL}"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="for a server on another machine"
    )
    parser.add_argument(
        "--timeout", type=not_negative, default=600.0, metavar="S", help="seconds, default 600"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="every worker with its role, state and load")
    drain = actions.add_parser("drain", help="nothing new; returns when it has ended what it had")
    role = actions.add_parser("set-role", help="drain, change the role, take part again")
    remove = actions.add_parser("remove", help="drain and forget; a host ends with its last one")
    for action in (drain, role, remove):
        action.add_argument("worker", metavar="WORKER")
    role.add_argument("role", choices=ROLES)
    add = actions.add_parser("add", help="start a [[host]] that was added to the mesh file")
    add.add_argument("host", metavar="HOST")


def run(options: argparse.Namespace) -> int:
    workers = _ask(options, *_request(options))["workers"]
    table = Table()
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for worker in workers:
        rows = f"{worker['num_rows']}/{worker['num_slots']}"
        roles = " ".join(worker["roles"])
        names = (worker["name"], worker["host"], worker["role"], roles, worker["state"])
        table.add_row(*names, rows, str(worker["num_prefills"]), worker["reason"])
    make_console().print(table)
    return 0


def _request(options: argparse.Namespace) -> tuple[str, str, dict[str, str]]:
    """Method, path and body."""
    match options.action:
        case "drain":
            return "POST", f"workers/{_quoted(options.worker)}/drain", {}
        case "set-role":
            return "POST", f"workers/{_quoted(options.worker)}/role", {"role": options.role}
        case "remove":
            return "DELETE", f"workers/{_quoted(options.worker)}", {}
        case "add":
            return "POST", f"hosts/{_quoted(options.host)}", {}
        case _:
            return "GET", "workers", {}


def _quoted(name: str) -> str:
    return urllib.parse.quote(os.fsencode(name), safe="")


def _ask(options: argparse.Namespace, method: str, path: str, body: dict[str, str]) -> Any:
    """The server's answer. Raises ConfigError for what the operator can mend, WorkerError."""
    headers = {"content-type": "application/json", **_authorization(options.token_file)}
    try:
        request = urllib.request.Request(
            f"{options.url.rstrip('/')}/admin/{path}",
            json.dumps(body).encode() if body else None,
            headers,
            method=method,
        )
        with urllib.request.urlopen(request, timeout=options.timeout) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            reason = _reason(error)
        if error.code < 500:
            raise ConfigError([Problem("jpd workers", "request", path, reason)]) from error
        raise WorkerError("server", reason) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError([Problem("jpd workers", "--url", options.url, str(error))]) from error


def _authorization(token_file: Path | None) -> dict[str, str]:
    if token_file is None:
        return {}
    try:
        return {"authorization": f"Bearer {token_file.read_text().strip()}"}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Problem("jpd workers", "--token-file", str(token_file), str(error))]
        ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"{error.code} {error.reason}"
