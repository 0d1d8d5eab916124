"""The manifests of docs/kubernetes: right by schema, and right about each other and about jpd.

Pods, services and config maps go through Kubernetes' own schemas. Those of LeaderWorkerSet and
KubeRay are not in a package: their fields are named here.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from jpd.cli import build_parser
from jpd.config import DeploymentConfig
from jpd.launch.ray_cluster import needs_of
from jpd.mesh_file import load_deployment

Manifest = Mapping[str, Any]

DEPLOYMENTS = ("leaderworkerset.yaml", "rayjob.yaml")

FIELDS = {
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        {"replicas": int, "leaderWorkerTemplate": dict},
    ),
    "leaderWorkerTemplate": {
        "size": int,
        "restartPolicy": str,
        "leaderTemplate": dict,
        "workerTemplate": dict,
    },
    "RayJob": (
        "ray.io/v1",
        {
            "entrypoint": str,
            "backoffLimit": int,
            "shutdownAfterJobFinishes": bool,
            "rayClusterSpec": dict,
        },
    ),
    "rayClusterSpec": {"rayVersion": str, "headGroupSpec": dict, "workerGroupSpecs": list},
    "headGroupSpec": {"rayStartParams": dict, "template": dict},
    "workerGroupSpecs": {
        "groupName": str,
        "replicas": int,
        "minReplicas": int,
        "maxReplicas": int,
        "rayStartParams": dict,
        "template": dict,
    },
}


def manifests(repo: Path, name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((repo / "docs" / "kubernetes" / name).read_text()))


def check_fields(what: str, found: Manifest, fields: Mapping[str, type]) -> None:
    """Exactly these fields, each of its kind."""
    assert set(found) == set(fields), what
    for name, kind in fields.items():
        assert type(found[name]) is kind, f"{what}.{name}"


def pods(main: Manifest) -> tuple[Manifest, Manifest, int]:
    """Templates of the pod with the doors and of a machine, and how many machines there are."""
    version, fields = FIELDS[main["kind"]]
    assert main["apiVersion"] == version and re.fullmatch(r"[a-z-]+", main["metadata"]["name"])
    spec = main["spec"]
    check_fields(main["kind"], spec, fields)
    if main["kind"] == "LeaderWorkerSet":
        inner = spec["leaderWorkerTemplate"]
        check_fields("leaderWorkerTemplate", inner, FIELDS["leaderWorkerTemplate"])
        assert inner["restartPolicy"] in ("RecreateGroupOnPodRestart", "None")
        return inner["leaderTemplate"], inner["workerTemplate"], inner["size"] - 1
    cluster = spec["rayClusterSpec"]
    check_fields("rayClusterSpec", cluster, FIELDS["rayClusterSpec"])
    check_fields("headGroupSpec", cluster["headGroupSpec"], FIELDS["headGroupSpec"])
    (group,) = cluster["workerGroupSpecs"]
    check_fields("workerGroupSpecs", group, FIELDS["workerGroupSpecs"])
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    return cluster["headGroupSpec"]["template"], group["template"], group["replicas"]


def serve_words(main: Manifest, door: Manifest) -> list[str]:
    """The arguments of `jpd`, wherever the manifest has them."""
    if main["kind"] == "RayJob":
        return shlex.split(main["spec"]["entrypoint"])[1:]
    (script,) = door["spec"]["containers"][0]["args"]
    return shlex.split(script.partition("exec jpd")[2])


@pytest.fixture
def mesh(repo: Path, tmp_path: Path) -> DeploymentConfig:
    (config,) = manifests(repo, "mesh.yaml")
    (tmp_path / "mesh.toml").write_text(config["data"]["mesh.toml"])
    return load_deployment(tmp_path / "mesh.toml")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_kubernetes_takes_every_object(repo: Path, name: str) -> None:
    main, service = manifests(repo, name)
    templates = [*pods(main)[:2]]
    whole = [
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "p"}}
        for template in templates
    ]
    for found in (*whole, service, *manifests(repo, "mesh.yaml")):
        kubernetes_validate.validate(found, "1.31", strict=True)
    broken = {**whole[0], "spec": {"contaners": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_machines_are_those_of_the_mesh_file(repo: Path, mesh: DeploymentConfig, name: str) -> None:
    main, service = manifests(repo, name)
    door, machine, num_machines = pods(main)
    assert mesh.launch.kind == "ray" and num_machines == len(mesh.hosts)
    limits = machine["spec"]["containers"][0]["resources"]["limits"]
    for host in mesh.hosts:
        assert needs_of(host) == {"CPU": 1.0, "GPU": float(limits["nvidia.com/gpu"])}
    assert "nvidia.com/gpu" not in str(door), "no host is placed beside the router"
    assert (
        service["spec"]["selector"] == door["metadata"]["labels"] != machine["metadata"]["labels"]
    )
    ports = {port["name"]: port["containerPort"] for port in door["spec"]["containers"][0]["ports"]}
    assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    options = build_parser().parse_args(serve_words(main, door))
    assert (options.http_port, options.grpc_port) == (ports["http"], ports["grpc"])
    assert options.drain_seconds < door["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_pod_has_the_files_that_are_named(
    repo: Path, mesh: DeploymentConfig, name: str
) -> None:
    main, _ = manifests(repo, name)
    door, machine, _ = pods(main)
    options = build_parser().parse_args(serve_words(main, door))
    security = mesh.security
    files = [options.model, options.mesh, security.token_file, security.ca_file]
    files += [security.certificate_file, security.key_file]
    for template in (door, machine):
        mounted = list(mounts(template))
        assert all(any(str(file).startswith(f"{path}/") for path in mounted) for file in files)


def mounts(template: Manifest) -> Iterator[str]:
    """Where volumes that are declared are mounted."""
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    for mount in template["spec"]["containers"][0]["volumeMounts"]:
        assert mount["name"] in volumes
        yield mount["mountPath"]


def test_secrets_of_the_guide_hold_the_files_of_the_mesh_file(
    repo: Path, mesh: DeploymentConfig
) -> None:
    guide = (repo / "docs" / "multi_host.md").read_text()
    made = set(re.findall(r"--from-file=([\w.]+)", guide))
    security = mesh.security
    files = (security.token_file, security.ca_file, security.certificate_file, security.key_file)
    assert made == {Path(str(file)).name for file in files}
    assert "create secret generic jpd-hosts" in guide
    assert "create secret generic jpd-api-key --from-literal=key=" in guide
