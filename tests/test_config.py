"""Mesh files: every fault of a file is found at once, by file, key, value and rule."""

from pathlib import Path

import pytest

from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem
from jpd.mesh_file import find_mesh_file, load_deployment

HOST = """
[[host]]
name = "a"
platform = "cpu"
devices = 4
"""
PREFILL = """
[[worker]]
name = "prefill"
role = "prefill"
host = "a"
devices = [[0], [1]]
"""
DECODE = """
[[worker]]
name = "decode"
role = "decode"
host = "a"
devices = [2, 3]
mesh = { tensor = 2 }
slots = 3
"""
GOOD = HOST + PREFILL + DECODE
RAY = '[launch]\nkind = "ray"\n'


def load(tmp_path: Path, text: str) -> DeploymentConfig:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    return load_deployment(path)


def problems(tmp_path: Path, text: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert all(problem.file.endswith("mesh.toml") for problem in caught.value.problems)
    return caught.value.problems


def only_problem(tmp_path: Path, text: str) -> Problem:
    found = problems(tmp_path, text)
    assert len(found) == 1, found
    return found[0]


def test_replicas_become_workers_and_the_rest_is_default(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    shown = [(w.name, w.role, w.devices, w.tensor, w.slots) for w in config.workers]
    assert shown == [
        ("prefill-0", "prefill", (0,), 1, 0),
        ("prefill-1", "prefill", (1,), 1, 0),
        ("decode-0", "decode", (2, 3), 2, 3),
    ]
    assert config.host("a").devices == 4
    assert (config.cache.page_size, config.engine.prefill_chunk) == (32, 512)
    assert config.router.failure.decode_lost == "replay"


def test_d07_no_worker_has_a_kv_dtype_of_its_own(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, HOST + PREFILL + DECODE + 'dtype = "bfloat16"\n')
    assert problem.key == "worker[1].dtype" or problem.key.endswith("dtype")
    assert "unknown" in problem.rule


def test_only_a_prefill_worker_has_a_page_size_of_its_own(tmp_path: Path) -> None:
    config = load(tmp_path, HOST + PREFILL + "page_size = 64\n" + DECODE)
    sizes = {worker.name: config.cache_of(worker).page_size for worker in config.workers}
    assert sizes == {"prefill-0": 64, "prefill-1": 64, "decode-0": 32}
    problem = only_problem(tmp_path, GOOD + "page_size = 64\n")
    assert problem.value == 64 and "workers that decode share cache.page_size" in problem.rule
    uneven = HOST + PREFILL + "page_size = 48\n" + DECODE
    found = {problem.key: problem.rule for problem in problems(tmp_path, uneven)}
    assert found["worker.prefill-0.page_size"] == "must divide engine.prefill_chunk = 512"


def test_what_is_done_to_pages_on_their_way(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert (config.cache.wire_dtype, config.cache.checksum) == ("float32", False)
    text = GOOD + '[cache]\nwire_dtype = "int8"\nchecksum = true\ntransport = "jax_transfer"\n'
    cache = load(tmp_path, text).cache
    assert (cache.wire_dtype, cache.checksum, cache.transport) == ("int8", True, "jax_transfer")
    keys = [
        p.key for p in problems(tmp_path, GOOD + '[cache]\nwire_dtype = "int4"\nchecksum = 1\n')
    ]
    assert keys == ["cache.wire_dtype", "cache.checksum"]


@pytest.mark.parametrize(
    ("platform", "engine", "cache", "expected"),
    [
        ("cpu", "auto", "auto", ("float32", "float32")),
        ("gpu", "auto", "auto", ("bfloat16", "bfloat16")),
        ("tpu", "auto", "float32", ("bfloat16", "float32")),
        ("gpu", "float32", "auto", ("float32", "float32")),
    ],
)
def test_auto_dtypes_follow_platform_then_engine(
    tmp_path: Path, platform: str, engine: str, cache: str, expected: tuple[str, str]
) -> None:
    text = GOOD.replace('"cpu"', f'"{platform}"')
    text += f'[engine]\ndtype = "{engine}"\n[cache]\ndtype = "{cache}"\n'
    config = load(tmp_path, text)
    assert (config.engine.dtype, config.cache.dtype) == expected


@pytest.mark.parametrize(("platform", "expected"), [("cpu", 1), ("gpu", 4), ("tpu", 4)])
def test_steps_per_call_follow_the_platform_unless_named(
    tmp_path: Path, platform: str, expected: int
) -> None:
    text = GOOD.replace('"cpu"', f'"{platform}"')
    assert load(tmp_path, text).engine.max_steps_per_call == expected
    named = text + "[engine]\nmax_steps_per_call = 3\n"
    assert load(tmp_path, named).engine.max_steps_per_call == 3


def test_layer_groups_are_read_and_refused_where_no_kv_travels(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).engine.layer_groups == 1
    assert load(tmp_path, GOOD + "[engine]\nlayer_groups = 4\n").engine.layer_groups == 4
    problem = only_problem(tmp_path, GOOD + "[engine]\nlayer_groups = 0\n")
    assert (problem.key, problem.value) == ("engine.layer_groups", 0)
    alone = HOST + DECODE.replace('"decode"', '"colocated"') + "[engine]\nlayer_groups = 2\n"
    problem = only_problem(tmp_path, alone)
    assert (problem.key, problem.value) == ("engine.layer_groups", 2)
    assert "where no KV travels: there is only one worker" in problem.rule


def test_hosts_of_two_platforms_must_name_dtypes(tmp_path: Path) -> None:
    text = GOOD + HOST.replace('"a"', '"b"').replace('"cpu"', '"gpu"')
    assert {problem.key for problem in problems(tmp_path, text)} == {"engine.dtype", "cache.dtype"}
    named = text + '[engine]\ndtype = "float32"\n[cache]\ndtype = "bfloat16"\n'
    assert load(tmp_path, named).cache.dtype == "bfloat16"


F15_CASES = {
    "unknown top key": (GOOD + "[cach]\npages = 9\n", "cach", "did you mean 'cache'"),
    "unknown worker key": (GOOD.replace("slots", "slot"), "worker[1].slot", "did you mean 'slots'"),
    "unknown mesh axis": (
        GOOD.replace("{ tensor = 2 }", "{ tensor = 2, pipe = 1 }"),
        "worker[1].mesh.pipe",
        "known keys: data, expert, tensor",
    ),
    "overlap between workers": (
        GOOD.replace("[2, 3]", "[1, 2]"),
        "worker.decode-0.devices",
        "device 1 of host a already belongs to prefill-1",
    ),
    "overlap between replicas": (
        GOOD.replace("[[0], [1]]", "[[0], [0]]"),
        "worker.prefill-1.devices",
        "already belongs to prefill-0",
    ),
    "device twice": (
        GOOD.replace("[2, 3]", "[2, 2]"),
        "worker.decode-0.devices",
        "device 2 of host a already belongs to decode-0",
    ),
    "device not on the host": (
        GOOD.replace("[2, 3]", "[3, 4]"),
        "worker.decode-0.devices",
        "devices 0 to 3",
    ),
    "axes do not make the devices": (
        GOOD.replace("{ tensor = 2 }", "{ tensor = 4 }"),
        "worker[1].devices",
        "2 devices, but mesh tensor = 4 x expert = 1 needs 4",
    ),
    "data axis": (
        GOOD.replace("{ tensor = 2 }", "{ data = 2 }"),
        "worker[1].mesh.data",
        "one device list per replica",
    ),
    "no devices": (GOOD.replace("[2, 3]", "[]"), "worker[1].devices", "list of device numbers"),
    "no prefill": (HOST + DECODE, "worker.role", "no worker can prefill"),
    "no decode": (HOST + PREFILL, "worker.role", "no worker can decode"),
    "unknown host": (
        GOOD.replace('role = "decode"\nhost = "a"', 'role = "decode"\nhost = "z"'),
        "worker[1].host",
        "hosts are a",
    ),
    "unknown role": (
        GOOD.replace('role = "decode"', 'role = "decoder"'),
        "worker[1].role",
        "did you mean 'decode'",
    ),
    "unknown platform": (GOOD.replace('"cpu"', '"npu"'), "host[0].platform", "cpu, gpu, tpu"),
    "same worker name": (
        GOOD.replace('name = "decode"', 'name = "prefill"'),
        "worker.name",
        "unique",
    ),
    "same host name": (GOOD + HOST, "host.name", "unique"),
    "slots on prefill": (
        GOOD.replace("[[0], [1]]", "[[0], [1]]\nslots = 4"),
        "worker[0].slots",
        "no decode batch",
    ),
    "no name": (GOOD.replace('name = "decode"\n', ""), "worker[1].name", "is missing"),
    "wrong type": (GOOD.replace("devices = 4", 'devices = "4"'), "host[0].devices", "integer"),
    "bool is no integer": (GOOD.replace("slots = 3", "slots = true"), "worker[1].slots", "integer"),
    "table for list": (HOST + '[worker]\nname = "x"\n', "worker", "[[worker]]"),
    "page bin only": (GOOD + "[cache]\npages = 1\n", "cache.pages", "at least 2"),
    "fraction": (GOOD + "[cache]\nmemory_fraction = 1.5\n", "cache.memory_fraction", "at most 1"),
    "not finite": (GOOD + "[cache]\nretain_seconds = nan\n", "cache.retain_seconds", "finite"),
    "dtype": (GOOD + '[cache]\ndtype = "int8"\n', "cache.dtype", "bfloat16"),
    "chunk": (GOOD + "[engine]\nprefill_chunk = 100\n", "engine.prefill_chunk", "page_size = 32"),
    "prefill buckets": (
        GOOD + "[engine]\nprefill_buckets = [64, 256]\n",
        "engine.prefill_buckets",
        "last one must be prefill_chunk = 512",
    ),
    "falling buckets": (
        GOOD + "[engine]\nprefill_buckets = [64, 32, 512]\n",
        "engine.prefill_buckets",
        "must rise",
    ),
    "context buckets": (
        GOOD + "[engine]\ncontext_buckets = [100]\n",
        "engine.context_buckets",
        "multiples of cache.page_size = 32",
    ),
    "short context": (
        GOOD + "[engine]\nmax_model_len = 1025\ncontext_buckets = [1024]\n",
        "engine.context_buckets",
        "max_model_len = 1025",
    ),
    "timeout": (
        GOOD + "[router]\nrequest_timeout_seconds = 0\n",
        "router.request_timeout_seconds",
        "above 0",
    ),
    "policy": (
        GOOD + '[router.failure]\ndecode_lost = "reply"\n',
        "router.failure.decode_lost",
        "did you mean 'replay'",
    ),
    "ray key without ray": (
        GOOD + '[launch]\nplacement = "pack"\n',
        "launch.placement",
        "only with kind ray, not inprocess",
    ),
    "address under ray": (
        GOOD.replace("devices = 4", 'devices = 4\naddress = "10.0.0.7"') + RAY,
        "launch.host.a.address",
        "Ray gives it",
    ),
    "accelerators under ray": (
        GOOD.replace('"cpu"', '"gpu"').replace(
            "devices = 4", "devices = 4\naccelerators = [0, 1, 2, 3]"
        )
        + RAY,
        "launch.host.a.accelerators",
        "Ray gives it",
    ),
    "slo": (GOOD + '[[slo]]\nname = "x"\nttft_ms = 5\n', "slo[0].tpot_ms", "is missing"),
}


@pytest.mark.parametrize("case", F15_CASES)
def test_f15_bad_file_is_refused_by_key_and_rule(tmp_path: Path, case: str) -> None:
    text, key, rule = F15_CASES[case]
    assert text != GOOD
    found = [p for p in problems(tmp_path, text) if p.key == key]
    assert [p for p in found if rule in p.rule], f"{key} not among {problems(tmp_path, text)}"


def test_hosts_of_ray_may_have_the_same_cores_of_other_machines(tmp_path: Path) -> None:
    here = HOST.replace("devices = 4", "devices = 4\ncores = [0]")
    both = here + here.replace('"a"', '"b"') + PREFILL + DECODE.replace('"a"', '"b"')
    assert {problem.key for problem in problems(tmp_path, both)} == {"launch.host.b.cores"}
    assert load(tmp_path, both + RAY + 'placement = "pack"\n').launch.placement == "pack"


def test_all_faults_of_a_file_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("slots = 3", "slots = 0").replace('"cpu"', '"npu"')
    text += "[cache]\npage_sise = 8\n[engine]\nprefill_chunk = 7\n[[slo]]\n"
    keys = [problem.key for problem in problems(tmp_path, text)]
    assert sorted(keys) == [
        "cache.page_sise",
        "engine.prefill_chunk",
        "host[0].platform",
        "slo[0].name",
        "slo[0].tpot_ms",
        "slo[0].ttft_ms",
        "worker[1].slots",
    ]


def test_malformed_toml_names_the_line(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, "[[host]]\nname = 'a'\ndevices = = 3\n")
    assert (problem.key, problem.value) == ("line 3", "devices = = 3")


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b""])
def test_file_missing_or_not_text_or_empty(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mesh.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_deployment(path)
    assert caught.value.problems[0].file == str(path)


def test_every_shipped_mesh_file_loads_and_says_what_it_is_for(repo: Path) -> None:
    files = sorted((repo / "mesh_configs").glob("*.toml"))
    assert len(files) >= 10
    for file in files:
        assert file.read_text().startswith("# "), f"{file.name} does not say what it is for"
        load_deployment(file)


def test_bare_name_is_found_in_mesh_configs(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_mesh_file("1p1d-cpu").samefile(repo / "mesh_configs" / "1p1d-cpu.toml")
    assert find_mesh_file("nowhere/1p1d-cpu.toml") == Path("nowhere/1p1d-cpu.toml")
