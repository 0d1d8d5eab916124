"""The embedded launcher: all workers of one host in this process.

1. Devices and meshes, as the mesh file says. 2. The weights, each tensor read once for all meshes.
3. KV pools, engines and workers. 4. Every worker's thread compiles all its shapes, all at once.
5. From then on compilations are counted as faults. Called by the Python API and the command line.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait

import jax
from jax.sharding import Mesh

from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import Model
from jpd.checkpoint.package_weights import cache_folder
from jpd.checkpoint.progress import ProgressCallback
from jpd.config import DeploymentConfig, HostConfig, WorkerConfig
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.compile_counter import CompileCounter
from jpd.guidance.compiler import GrammarCompiler
from jpd.launch.assemble import Assembly, Site, assemble_worker
from jpd.launch.devices import host_devices, only_host
from jpd.launch.fleet import Fleet, Member
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import make_worker_mesh
from jpd.parallel.platform import enable_compilation_cache
from jpd.transfer.checked import CheckedTransfer
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import KVTransfer

logger = logging.getLogger(__name__)

TransferWrapper = Callable[[KVTransfer], KVTransfer]


def launch_workers(
    model: Model,
    deployment: DeploymentConfig,
    *,
    host: HostConfig | None = None,
    transfer_wrapper: TransferWrapper | None = None,
    progress: ProgressCallback | None = None,
    can_prefill_locally: bool = False,
) -> Fleet:
    """Start the workers of `host` and return when each has compiled everything. Blocks.

    Without `host` the deployment must have only one. `can_prefill_locally` gives decode workers
    prefill functions even if the router never uses them. Raises ConfigError, and leaves no
    thread behind when it raises.
    """
    host = host or only_host(deployment)
    workers = deployment.workers_of(host.name)
    source = model.require_source()
    max_model_len = deployment.engine.served_len(model.config.max_len)
    buckets = ShapeBuckets.from_config(
        deployment.engine, deployment.cache, max_model_len, model.config.layers
    )
    devices = host_devices(host, deployment.file)
    _keep_executables()
    meshes = [_make_mesh(model, worker, devices) for worker in workers]
    dtype = deployment.engine.dtype
    abstract = abstract_params(model.config, dtype)
    leaves = load_params(source, model.config, abstract, meshes, dtype, progress)
    transfer: KVTransfer = InProcessTransfer(deployment.router.transfer_timeout_seconds)
    if transfer_wrapper is not None:
        transfer = transfer_wrapper(transfer)
    if deployment.cache.checksum:  # the last to touch a piece, or what follows would go unnoticed
        transfer = CheckedTransfer(transfer)
    assembly = Assembly(
        model=model.config,
        deployment=deployment,
        buckets=buckets,
        max_model_len=max_model_len,
        sites=[Site(*parts) for parts in zip(workers, meshes, leaves, strict=True)],
        transfer=transfer,
        counter=CompileCounter(),
        can_prefill_locally=can_prefill_locally,
        grammars=grammar_compiler(model),
    )
    logger.info("attention: %s", assembly.attention)
    return _start(assembly)


def grammar_compiler(model: Model) -> GrammarCompiler | None:
    """It reads its vocabulary while the workers compile."""
    if model.tokenizer is None:
        return None
    grammars = GrammarCompiler(model.tokenizer, model.config.vocab_size, model.eos_token_ids)
    grammars.warm_up()
    return grammars


def _keep_executables() -> None:
    """Compiled programs outlive the process, in a place of our own unless one is chosen."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        enable_compilation_cache(cache_folder() / "xla")
    except OSError as error:
        logger.warning("compiled programs are not kept for the next start: %s", error)


def _make_mesh(model: Model, worker: WorkerConfig, devices: Sequence[jax.Device]) -> Mesh:
    return make_worker_mesh(
        [devices[index] for index in worker.devices],
        tensor=worker.tensor,
        expert=worker.expert,
        num_cached_heads=model.config.num_cached_heads,
    )


def _start(assembly: Assembly) -> Fleet:
    """Assemble all workers and wait until every one has warmed up; closes all when one fails."""
    members: list[Member] = []
    fleet = Fleet(
        members,
        assembly.transfer,
        assembly.counter,
        assembly.buckets,
        assembly.max_model_len,
        assembly.grammars,
    )
    try:
        members += (assemble_worker(assembly, site) for site in assembly.sites)
        _warm_up(members)
    except BaseException:  # an interrupt too; it waits for the executables that are being made
        fleet.close()
        raise
    _settle_memory()
    assembly.counter.mark_ready()
    return fleet


def _warm_up(members: Sequence[Member]) -> None:
    """Start every worker and wait until all are ready; raises as soon as one is not."""
    start = time.monotonic()
    for member in members:
        member.worker.start()
    done, _ = wait([m.worker.ready for m in members], return_when=FIRST_EXCEPTION)
    for ready in done:
        ready.result()
    logger.info("%d workers compiled in %.1f s", len(members), time.monotonic() - start)


def _settle_memory() -> None:
    """What was made until now stays: the collector need not walk it while requests are served."""
    gc.collect()
    gc.freeze()
