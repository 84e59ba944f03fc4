"""The command and the environment with which the local vLLM server is started. Pure: everything it depends on is handed in.

What a CPU needs was measured: the comments say what for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.engine.model import ModelFolder
from fsbarrier.reading import MIB
from fsbarrier.settings.sections import EngineSettings
from fsbarrier.supervision.supervisor import with_this_package

HOST = "127.0.0.1"
# The model's name over HTTP; it stays the same while weights and folders change.
SERVED_NAME = "policy"
# How large a model must be, on a CPU, to keep one more thread busy.
PARAMETERS_PER_THREAD = 10_000_000
# The cache on a CPU: at least so much, enough for so many sequences of full length, at most one part in so many of the memory.
CPU_CACHE_MIN = 64 * MIB
CPU_CACHE_SEQUENCES = 16
CPU_CACHE_SHARE = 8

# Variables that another launcher may have set, and that vLLM's own processes must not take for theirs. VLLM_PORT is set by
# Kubernetes for a service named vllm, and is then no number; an empty VLLM_CPU_KVCACHE_SPACE ends the start.
_FOREIGN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("VLLM_PORT", "VLLM_CPU_KVCACHE_SPACE"),
)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How one server is to be started."""

    python: str
    model: ModelFolder
    settings: EngineSettings
    # Where it listens. Its processes' own sockets lie beside it.
    socket: str
    seed: int
    accelerated: bool
    sleeps: bool
    # The machine's; 0: not known.
    memory_bytes: int = 0
    # How many it may compute with on a CPU.
    threads: int = 1


def max_model_len(plan: ServerPlan) -> int:
    """The longest sequence to serve: as set, but no more than the model can."""
    wanted = plan.settings.max_model_len
    return min(wanted, plan.model.max_positions or wanted)


def cpu_cache_bytes(plan: ServerPlan) -> int:
    """The key-value cache on a CPU where none is set: enough for some full sequences, a small part of the memory."""
    wanted = CPU_CACHE_SEQUENCES * max_model_len(plan) * plan.model.cache_bytes_per_token
    limit = plan.memory_bytes // CPU_CACHE_SHARE if plan.memory_bytes else wanted
    return max(CPU_CACHE_MIN, min(wanted, limit))


def cpu_threads(plan: ServerPlan) -> int:
    """Threads for computing on a CPU. More than a small model can use only wait for each other, spinning: with two threads on
    two cores the demonstration's model was 2 to 8 times slower than with one."""
    return min(plan.threads, useful_threads(plan.model) or plan.threads)


def useful_threads(model: ModelFolder) -> int:
    """How many threads a model can keep busy; 0: not known."""
    return max(1, model.parameters // PARAMETERS_PER_THREAD) if model.parameters else 0


def argv(plan: ServerPlan) -> list[str]:
    """The server's command. The key is not in it: the arguments of a process are for everybody to see."""
    settings = plan.settings
    automatic = "bfloat16" if plan.accelerated else "float32"
    dtype = automatic if settings.dtype == "auto" else settings.dtype
    words = [
        *(plan.python, "-m", "fsbarrier.workers.vllm_server"),
        *("--model", str(plan.model.path), "--served-model-name", SERVED_NAME),
        # In a folder that only this user can enter: nobody else can answer in the server's place, or ask it.
        *("--uds", plan.socket),
        *("--middleware", "fsbarrier.workers.vllm_server.KeyGuard"),
        *("--dtype", dtype, "--max-model-len", str(max_model_len(plan))),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        # Another one at each start: with vLLM's fixed seed all nodes would sample with the same noise.
        *("--seed", str(plan.seed)),
        # A model's generation_config.json would change the sampling behind the settings' back.
        *("--generation-config", "vllm"),
        # The log-probabilities of the distribution that was sampled from, after temperature: the trainer compares with these.
        *("--logprobs-mode", "processed_logprobs"),
        *("--disable-uvicorn-access-log", "--disable-fastapi-docs", "--no-log-error-stack"),
    ]
    if plan.sleeps:
        words += ["--enable-sleep-mode"]
    if plan.accelerated:
        words += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    else:
        words += ["--enforce-eager"]
        if settings.tensor_parallel_size == 1:
            words += ["--distributed-executor-backend", "uni"]
    if settings.kv_cache_mb is not None or not plan.accelerated:
        cache = settings.kv_cache_mb
        words += ["--kv-cache-memory-bytes", str(cpu_cache_bytes(plan) if cache is None else cache * MIB)]
    return [*words, *settings.extra_args]


def environment(plan: ServerPlan, environ: Mapping[str, str], api_key: str) -> dict[str, str]:
    """The server's environment: the daemon's, less what is meant for others, and what vLLM reads from there only."""
    env = with_this_package({name: value for name, value in environ.items() if name not in _FOREIGN})
    # The server is on this machine, and never to be reached through a proxy.
    env["NO_PROXY"] = env["no_proxy"] = ",".join(
        dict.fromkeys(host for host in (env.get("NO_PROXY"), HOST, "localhost") if host)
    )
    env |= {
        "VLLM_API_KEY": api_key,
        # For reload_weights and sleep. They are reached on loopback only, and behind KeyGuard.
        "VLLM_SERVER_DEV_MODE": "1",
        # What its processes tell each other stays on this machine, and through sockets that nobody else can reach.
        "VLLM_HOST_IP": HOST,
        "VLLM_RPC_BASE_PATH": str(Path(plan.socket).parent),
        # There it leaves files that everybody could read, and torch takes compiled code from a folder whose name anybody can foresee.
        "TMPDIR": str(Path(plan.socket).parent),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if not plan.accelerated:
        # Else every server of a machine would bind its threads to the same cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Sampling compiles a function for log-probabilities even with --enforce-eager: seconds in the first request, and an
        # error in each where there is no C++ compiler.
        env["TORCHDYNAMO_DISABLE"] = "1"
        env.setdefault("OMP_NUM_THREADS", str(cpu_threads(plan)))
        env.setdefault("VLLM_PLUGINS", "")
        if plan.settings.tensor_parallel_size == 1:
            # One process fewer: the engine core computes itself. 17 s instead of 25 s to start on two cores.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env
