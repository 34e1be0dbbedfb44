"""Arguments and environment for starting one SGLang server."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import megappo
from megappo.config import Config
from megappo.config.role_models import load_architecture, tokenizer_folder
from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.servers.compilers import cuda_home
from megappo.engines.sglang.servers.cpu_platform import ENTRY_POINTS, PLATFORM_NAME, PLUGINS
from megappo.engines.sglang.servers.gpus import visible_devices
from megappo.engines.sglang.servers.rendezvous import PEERS, ServerPart
from megappo.engines.sglang.servers.server_hooks import HOOKS_LABEL, SAMPLES_FOR_A_RUN
from megappo.engines.sglang.version import is_tried
from megappo.engines.sglang.weights.slice_loader import LOADER
from megappo.files.json_values import JSONValue
from megappo.network.interfaces import GLOO_INTERFACE, LOOPBACK, interface_towards
from megappo.network.store import is_loopback
from megappo.plan.bytes.cache import PlannedCache, server_cache
from megappo.runtime.compile_caches import server_caches
from megappo.runtime.device import ALLOCATOR_VARIABLES, allocator_options
from megappo.runtime.ranks.nccl import own_stack, share_settings

_SHARE_OF_FREE_MEMORY = 0.99
"""SGLang's mem_fraction_static, a share of the memory that is free at the start of a server. The share is a second
limit of the key-value cache in addition to the configured number of tokens, and must not be the lower limit."""
FREE_POSITIONS = 8
"""Positions that SGLang leaves free at the end of its context and of the key-value pool. SGLang generates at most
size - 2 - input tokens, and rejects inputs of size - 6 tokens and more (0.5.23, managers/tp_worker.py:568 and
scheduler.py:2714). Servers therefore get this many additional positions, and responses can reach the last position of
the model."""
_PREFILL_GRAPHS = "cuda-graph-backend-prefill"
# Settings of SGLang 0.5.23 on a CPU with the stock wheel (see megappo/engines/sglang/servers/cpu_platform.py).
_ON_A_CPU: dict[str, JSONValue] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-overlap-schedule": True,
}
COMPILE_CACHES = {"SGLANG_CACHE_DIR": "sglang"}
"""Names of the folders of SGLang's compile caches, by variable."""
# torchrun's variables describe the ranks of the trainer. SGLANG_ variables of a shell would change runs unnoticed.
_SCRUBBED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR")
_SCRUBBED_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_", "MASTER_", "TORCH_NCCL_", "SGLANG_", "TRITON_INTERPRET")


@dataclass(frozen=True)
class ServerSpec:
    """Specification of a server. `arguments` and `environment` are derived from the specification."""

    model_folder: Path
    dtype: str
    settings: ServerSettings
    stop_token_ids: tuple[int, ...]
    trust_remote_code: bool
    log_directory: Path
    cache: PlannedCache
    devices: tuple[int, ...] = ()
    """GPUs as numbers among the GPUs that this process sees. Empty on a CPU."""
    cores: tuple[int, ...] = ()
    """CPU cores for the computations of the server, on a machine without CUDA."""
    job_cores: tuple[int, ...] = ()
    """CPU cores of all ranks of this machine, which all processes of the server may use. A launcher may have bound
    the rank that starts the server to fewer cores. Empty selects the cores of this rank."""
    memory_saver: bool = False
    """Whether the server can release its memory."""
    deterministic: bool = False
    """Whether a response depends only on its prompt and seed."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json for SGLang, in addition to the entries of the folder."""
    has_experts: bool = False
    """Whether the model has experts with fingerprints, so that their weights in the server are compared with the
    actor."""
    returns_routing: bool = False
    """Whether the server returns the experts of each token on request."""
    has_least_tokens: bool = False
    """Whether responses have a minimum length, which requires the hooks of `server_hooks` in a server."""
    positions: int | None = None
    """Positions of the model for prompt and response, or None for the default context length of the server."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, if the server needs the texts of tokens or the tokens that end a response."""
    seed: int = 0
    host: str = "127.0.0.1"
    """Interface that the server listens on."""
    address: str = ""
    """Address of the server for other machines. Default: `host`."""
    called: str = ""
    """Name of a server outside the engine, which loads the weights and the tokenizer of its folder."""
    key: str = "rollout.servers"
    """Path of the settings of the server, for errors."""
    program: ClassVar[str] = "sglang.launch_server"
    """Python module of the server."""

    @classmethod
    def of(
        cls, config: Config, folder: Path, stop_token_ids: tuple[int, ...], *, on_cuda: bool, device_bytes: float = 0.0
    ) -> ServerSpec:
        """Return the specification of the servers of a configuration, before devices are assigned. Raises ConfigError
        as `server_cache`.

        `device_bytes` is the memory of a GPU. The value is ignored for external servers, whose GPUs may differ.
        """
        own_bytes = 0.0 if config.rollout.server_settings.urls else device_bytes
        arch = load_architecture(folder, config.model)
        return cls(
            model_folder=folder.absolute(),
            dtype=config.model.dtype,
            settings=config.rollout.server_settings,
            stop_token_ids=stop_token_ids,
            tokenizer=tokenizer_folder(config.model).absolute() if config.rollout.reads_text else None,
            trust_remote_code=config.model.trust_remote_code,
            log_directory=config.run.path.absolute() / "engines",
            extra_config=arch.declaration.extra_config(arch.hf_config),
            cache=server_cache(config, arch, on_cuda=on_cuda, device_bytes=own_bytes),
            memory_saver=config.rollout.servers_sleep(on_cuda=on_cuda),
            deterministic=config.rollout.servers_are_deterministic(on_cuda=on_cuda),
            has_experts=bool(arch.experts) and arch.declaration.fingerprinted,
            returns_routing=config.algorithm.replays_routing(arch.experts),
            has_least_tokens=config.rollout.min_response_tokens > 0,
            positions=arch.max_position_embeddings,
        )

    def arguments(self, port: int, key: str) -> dict[str, Any]:
        """Return the arguments of SGLang in the format of its configuration file."""
        given = self.settings
        found: dict[str, JSONValue] = {
            "model-path": str(self.model_folder),
            "dtype": self.dtype,
            "host": self.host,
            "port": port,
            "api-key": key or None,
            "tensor-parallel-size": given.tensor_parallel,
            "ep-size": given.expert_parallel if given.expert_parallel > 1 else None,
            "attn-dp-size": given.data_parallel_attention if given.data_parallel_attention > 1 else None,
            "random-seed": self.seed,
            "skip-server-warmup": True,
            "sleep-on-idle": True,  # otherwise each rank of an idle server polls and takes a core from the trainers
            "log-level": "warning",
            "trust-remote-code": self.trust_remote_code or None,
            "enable-return-routed-experts": self.returns_routing or None,
            "custom-weight-loader": [LOADER] if given.takes_slices and is_tried() else None,
            "context-length": None if self.positions is None else self.positions + FREE_POSITIONS,
            "max-total-tokens": self._pool_tokens,
        }
        if not self.called:
            found |= self._of_engine()
        if self.deterministic:
            found |= {
                "enable-deterministic-inference": True,
                "sampling-backend": "pytorch",
            }  # other backends ignore seeds
        found |= self._on_gpus() if self.devices else _ON_A_CPU
        return {name: value for name, value in found.items() if value is not None} | given.arguments

    @property
    def longest_tokens(self) -> int:
        """Number of tokens of the longest prompt and response."""
        longest = self.cache.longest_tokens
        return longest if self.positions is None else min(longest, self.positions)

    @property
    def _pool_tokens(self) -> int | None:
        """Size of the key-value pool: the planned size, or at least the size for the longest sequence."""
        planned = self.cache.tokens
        if planned is None or self.called:
            return planned
        return max(planned, self.longest_tokens + FREE_POSITIONS)

    def _on_gpus(self) -> dict[str, JSONValue]:
        """Return the arguments of servers on GPUs."""
        return {
            "mem-fraction-static": _SHARE_OF_FREE_MEMORY,
            # SGLang's default prefill graphs keep inputs as weak references. A smaller graph overwrites the inputs of
            # a larger graph, and the answers are wrong without an error (sgl-project/sglang#37606).
            _PREFILL_GRAPHS: "disabled",
            "cuda-graph-max-bs-decode": self.cache.sequences,  # larger batches run without graphs, kernel by kernel
            "enable-memory-saver": self.memory_saver or None,
            # Other runners reorder the weights of experts, so that no fingerprint would match.
            "moe-runner-backend": "triton" if self.has_experts else None,
        }

    def _of_engine(self) -> dict[str, JSONValue]:
        """Return the arguments of servers with the weights of the actor."""
        return {
            "load-format": "dummy",  # weights come only from the actor
            "disable-shared-experts-fusion": True,  # otherwise sync and fingerprints would not find shared experts
            # The server exchanges token ids. A tokenizer is needed only for stop texts.
            **({"skip-tokenizer-init": True} if self.tokenizer is None else {"tokenizer-path": str(self.tokenizer)}),
            "extra-metric-labels": json.dumps(
                own_stack(os.environ).labels() | (HOOKS_LABEL if is_tried() else {})  # see `check_hooks`
            ),
            # The weights of the actor are not quantized, regardless of the storage format in its folder.
            "json-model-override-args": json.dumps(
                {**self.extra_config, "eos_token_id": list(self.stop_token_ids) or None, "quantization_config": None}
            ),
        }

    def environment(self, scratch: Path, part: ServerPart | None = None) -> dict[str, str]:
        """Return the environment variables of the server or of a part: ours without the variables of torchrun."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == PEERS or (name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES))
        }
        if self.memory_saver:
            kept |= {name: _without_expandable_segments(kept[name]) for name in ALLOCATOR_VARIABLES if name in kept}
        share_settings(kept)
        if self.positions is not None:
            kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for `FREE_POSITIONS`
        if not self.called:
            kept[SAMPLES_FOR_A_RUN] = "1"
        site = _advertise_plugins(scratch, [PLUGINS] if self.devices else list(ENTRY_POINTS))
        path = [str(site), str(_without_megatron(scratch)), str(Path(megappo.__file__).parents[1])]
        path.append(os.environ.get("PYTHONPATH", ""))
        kept |= server_caches(kept, COMPILE_CACHES)
        kept["TMPDIR"] = str(scratch)  # SGLang leaves its sockets there
        if part is not None:
            kept = part.rendezvous.environment(part.start) | kept  # only the peers may be set by the user
        else:  # ranks on one machine meet at a file, because torch's store would listen on all interfaces
            kept["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch}/ranks"
            if self._broadcasts_from_elsewhere:
                kept = _reached_from_elsewhere(kept, self.address or self.host)
            else:
                kept[GLOO_INTERFACE] = LOOPBACK
        if package := _with_one_model(scratch, self.model_folder):
            kept["SGLANG_EXTERNAL_MODEL_PACKAGE"] = package
        kept["SGLANG_HEALTH_CHECK_TIMEOUT"] = str(max(1, int(self.settings.health_timeout_seconds)))
        if self.settings.tensor_parallel > 1 and not self.deterministic:
            kept["SYNC_TOKEN_IDS_ACROSS_TP"] = (
                "1"  # otherwise ranks that sample different tokens wait for each other forever
            )
            # (SGLang's log-probability is then that of the token of its first rank, which `mismatch/max` would show)
        if self.memory_saver and self.settings.arguments.get(_PREFILL_GRAPHS, "disabled") == "disabled":
            # Otherwise graphs keep their memory while the server sleeps. With other graphs SGLang does not start with
            # this variable.
            kept["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
        if self.devices:
            # The check rejects GPUs with unequal free memory, which trainers on the same GPUs may cause.
            kept["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
            compilers = cuda_home(kept, scratch / "cuda")
            if compilers is not None:
                kept["CUDA_HOME"] = compilers
            kept["CUDA_VISIBLE_DEVICES"] = visible_devices(self.devices, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        else:
            ranks = self.settings.node_ranks
            share = max(1, len(self.cores) // ranks)
            threads = self.settings.threads or share
            kept |= {"SGLANG_PLATFORM": PLATFORM_NAME, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(threads)}
            kept["OMP_WAIT_POLICY"] = "passive"  # the threads of the trainer use the same cores
            if self.settings.tensor_parallel > 1:  # on one NUMA node SGLang requires an assignment of cores to ranks
                groups = [[self.cores[(r * share + i) % len(self.cores)] for i in range(share)] for r in range(ranks)]
                kept["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
        kept["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
        return kept | self.settings.environment

    @property
    def _broadcasts_from_elsewhere(self) -> bool:
        """Whether trainers on other machines broadcast weights to the ranks of the server over gloo."""
        by_gloo = not self.called and not self.devices and self.settings.placement == "disaggregated"
        return by_gloo and not is_loopback(self.host)


def _reached_from_elsewhere(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """Replace loopback by the interface with `address`, which other machines use to reach this machine. A different
    interface is kept."""
    kept = {name: value for name, value in environment.items() if (name, value) != (GLOO_INTERFACE, LOOPBACK)}
    interface = interface_towards(address)
    return kept if interface is None else {GLOO_INTERFACE: interface} | kept


def unheard_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the SGLang variables of an environment. Servers do not receive these variables, which the user may not
    expect."""
    return sorted(name for name in environment if name.startswith("SGLANG_") and name != PEERS)


def _without_expandable_segments(options: str) -> str:
    """Return torch's allocator options without `expandable_segments`, which torch_memory_saver rejects."""
    told = allocator_options(options)
    return ",".join(f"{name}:{value}" for name, value in told.items() if name != "expandable_segments")


def _without_megatron(scratch: Path) -> Path:
    """Create a folder for the import path that hides Megatron-Core.

    SGLang imports Megatron-Core for its debugging tools if Megatron-Core is installed (srt/debug_utils/dumper.py).
    Megatron-Core then (core/inference/contexts/dynamic_context.py, 0.16.1 and 0.19.2) configures torch_memory_saver
    to hook only the allocator of torch. As a result, SGLang cannot capture graphs with releasable memory, and does
    not start.
    """
    folder = scratch / "site"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "megatron.py").write_text('raise ImportError("servers do not use Megatron-Core")\n')
    return folder


def _with_one_model(scratch: Path, model_folder: Path) -> str | None:
    """Create a package that contains only the class of the model, in the folder of `_without_megatron`. Returns None
    if SGLang has no class for the architecture in the model folder.

    Without this package SGLang imports its two hundred model files at startup, which takes two of ten CPU seconds.
    SGLang first searches an external model package (0.5.23, srt/models/registry.py:154), and imports the other files
    only if needed, for example for a draft model of another architecture.
    """
    config = model_folder / "config.json"
    named = json.loads(config.read_text()).get("architectures") if config.exists() else None
    module = _module_with(str(named[0])) if named else None
    if module is None:
        return None
    package = scratch / "site" / "megappo_model"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "model.py").write_text(f"from sglang.srt.models.{module} import EntryClass\n")
    return package.name


@functools.cache
def _module_with(architecture: str) -> str | None:
    """Return the name of the SGLang module that defines a class of this name."""
    found = importlib.util.find_spec("sglang")
    folders = found.submodule_search_locations if found is not None else None
    files = Path(folders[0], "srt", "models").glob("*.py") if folders else ()
    return next((file.stem for file in files if f"\nclass {architecture}(" in file.read_text()), None)


def _advertise_plugins(scratch: Path, groups: Sequence[str]) -> Path:
    """Return a folder in which SGLang finds megappo's entry points of these groups, even if megappo is not
    installed."""
    site = scratch / "site"
    if any(PLATFORM_NAME not in importlib.metadata.entry_points(group=group).names for group in groups):
        info = site / f"megappo-{megappo.__version__}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megappo\nVersion: {megappo.__version__}\n")
        lines = "\n".join(f"[{group}]\n{ENTRY_POINTS[group]}" for group in groups)
        (info / "entry_points.txt").write_text(lines)
    return site
