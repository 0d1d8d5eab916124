"""The tables of a mesh file that are about machines: [[host]], [launch] and [security].

Read by `jpd.mesh_file`, which joins them with the workers. Knows no model.
"""

from collections.abc import Sequence
from typing import cast

from jpd.config import (
    LOOPBACK,
    HostConfig,
    LaunchConfig,
    LaunchKind,
    Placement,
    Platform,
    SecurityConfig,
)
from jpd.toml_reader import Table

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


def read_host(table: Table) -> HostConfig:
    table.required("name", "the host's name")
    table.required("platform", "cpu, gpu or tpu")
    table.required("devices", "how many devices the host has")
    host = HostConfig(
        name=table.text("name", "", NAME),
        platform=cast(Platform, table.choice("platform", "cpu", Platform)),
        devices=table.integer("devices", 0, low=1, high=4096),
        device_memory_gib=table.number("device_memory_gib", None, above=True),
        device_tflops=table.number("device_tflops", None, above=True),
        device_gbps=table.number("device_gbps", None, above=True),
        cores=table.integers("cores", high=4095),
        accelerators=table.integers("accelerators", high=4095),
        address=table.text("address", LOOPBACK, r"[A-Za-z0-9.:_-]+"),
    )
    table.close()
    if host.cores and host.platform != "cpu":
        table.problem("cores", list(host.cores), "only for platform cpu: see accelerators")
    if host.accelerators and host.platform == "cpu":
        table.problem("accelerators", list(host.accelerators), "not for platform cpu: see cores")
    if host.accelerators and len(host.accelerators) != host.devices:
        rule = f"must name as many as devices = {host.devices}"
        table.problem("accelerators", list(host.accelerators), rule)
    return host


def read_launch(table: Table, hosts: Sequence[HostConfig]) -> LaunchConfig:
    default = LaunchConfig()
    needs_processes = len(hosts) > 1 or any(host.cores or host.accelerators for host in hosts)
    kind = table.choice("kind", "subprocess" if needs_processes else "inprocess", LaunchKind)
    for name in ("ray_address", "placement"):
        if name in table and kind != "ray":
            table.problem(name, table.value(name), f"only with kind ray, not {kind}")
    launch = LaunchConfig(
        kind=cast(LaunchKind, kind),
        max_restarts=table.integer("max_restarts", default.max_restarts),
        start_timeout_seconds=table.number(
            "start_timeout_seconds", default.start_timeout_seconds, above=True
        ),
        ray_address=table.text("ray_address", None),
        placement=cast(Placement, table.choice("placement", default.placement, Placement)),
    )
    table.close()
    if launch.kind == "inprocess" and needs_processes:
        rule = "several hosts, and hosts with cores or accelerators of their own, need processes"
        table.problem("kind", launch.kind, f"{rule}: subprocess")
    if launch.kind == "ray":
        _check_left_to_ray(table, hosts)
    else:
        _check_shared(table, hosts)
    return launch


def _check_left_to_ray(table: Table, hosts: Sequence[HostConfig]) -> None:
    """Ray gives a host its machine, and with it the address and the accelerators."""
    for host in hosts:
        for name, value, is_given in (
            ("address", host.address, host.address != LOOPBACK),
            ("accelerators", list(host.accelerators), bool(host.accelerators)),
        ):
            if is_given:
                table.problem(f"host.{host.name}.{name}", value, "Ray gives it: leave it out")


def _check_shared(table: Table, hosts: Sequence[HostConfig]) -> None:
    """No two hosts on the same core, nor on the same accelerator of this machine."""
    for kind in ("cores", "accelerators"):
        owners: dict[tuple[str, int], str] = {}
        for host in hosts:
            for number in getattr(host, kind):
                owner = owners.setdefault((host.address, number), host.name)
                if owner != host.name:
                    table.problem(f"host.{host.name}.{kind}", number, f"belongs to {owner}")


def read_security(table: Table) -> SecurityConfig:
    default = SecurityConfig()
    insecure = table.value("insecure")
    security = SecurityConfig(
        token_file=table.text("token_file", None),
        ca_file=table.text("ca_file", None),
        certificate_file=table.text("certificate_file", None),
        key_file=table.text("key_file", None),
        insecure=insecure if isinstance(insecure, bool) else default.insecure,
    )
    table.close()
    if insecure is not None and not isinstance(insecure, bool):
        table.problem("insecure", insecure, "must be true or false")
    files = (security.ca_file, security.certificate_file, security.key_file)
    if any(files) and not all(files):
        shown = {"ca_file": files[0], "certificate_file": files[1], "key_file": files[2]}
        table.problem("", shown, "TLS needs all three of them")
    return security
