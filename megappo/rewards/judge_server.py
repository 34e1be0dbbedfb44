"""Servers that a run starts for its judges."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megappo.config import Config
from megappo.config.judge import JudgeSettings
from megappo.engines.sglang.spec import ServerSpec
from megappo.errors import RunError
from megappo.plan.cache import PlannedCache
from megappo.rewards.own_servers import OwnServer, own_cores, own_gpus
from megappo.runtime.objects import agreed
from megappo.runtime.process import Runtime
from megappo.runtime.sglang_cpu import require_sglang


def judge_servers(config: Config, runtime: Runtime) -> dict[str, OwnServer]:
    """Return the servers that the run starts for its judges.

    The call is a collective of the world if a judge has such a server. Raises ValueError on every rank if SGLang is
    missing on one rank.
    """
    servers = {}
    for name, judge in config.reward.judges.items():
        if judge.server is not None:
            spec = partial(_spec, config, name, judge, on_cuda=runtime.on_cuda)
            servers[name] = OwnServer(judge.server, _key(config, name), "a judge", spec, "/v1")
    if servers:
        agreed(require_sglang, (RunError,))
    return servers


def _key(config: Config, name: str) -> str:
    return f"{config.reward.key_of(name)}.server"


def _spec(config: Config, name: str, judge: JudgeSettings, local_ranks: int, *, on_cuda: bool) -> ServerSpec:
    """Return the specification of a judge's server. Raises RunError if the server has no GPUs."""
    server = judge.server
    assert server is not None
    settings = server.as_servers
    if on_cuda:  # no other process uses these GPUs, so SGLang's share of the free memory at its start is sufficient
        arguments = {"mem-fraction-static": server.memory_fraction, **server.arguments}
        settings = settings.model_copy(update={"arguments": arguments})
    return ServerSpec(
        model_folder=Path(judge.model).absolute(),
        dtype=config.reward.model_dtype(on_cuda=on_cuda),
        settings=settings,
        stop_token_ids=(),
        trust_remote_code=False,
        log_directory=config.run.path.absolute() / "engines",
        cache=PlannedCache(settings.cache_tokens(on_cuda=on_cuda), 0),
        devices=own_gpus(config, server, _key(config, name), local_ranks) if on_cuda else (),
        cores=() if on_cuda else own_cores(),
        called="judge" if name == "judge" else f"judge {name}",
        key=_key(config, name),
    )
