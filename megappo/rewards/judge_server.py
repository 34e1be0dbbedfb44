"""Servers of a run's own judges."""

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
    """The servers to start for judges with a server of the run; a collective of the world where there are any. Raises
    ValueError on every rank where SGLang is missing on one."""
    wanted = {}
    for name, judge in config.reward.judges.items():
        if judge.server is not None:
            spec = partial(_spec, config, name, judge, on_cuda=runtime.on_cuda)
            wanted[name] = OwnServer(judge.server, _key(config, name), "a judge", spec, "/v1")
    if wanted:
        agreed(require_sglang, (RunError,))
    return wanted


def _key(config: Config, name: str) -> str:
    return f"{config.reward.key_of(name)}.server"


def _spec(config: Config, name: str, judge: JudgeSettings, ranks_here: int, *, on_cuda: bool) -> ServerSpec:
    """Specification with which a judge's server is started. Raises RunError where it has no GPUs."""
    server = judge.server
    assert server is not None
    settings = server.as_servers
    if on_cuda:  # nobody else uses these GPUs, so SGLang's share of the memory that is free at its start will do
        given = {"mem-fraction-static": server.memory_fraction, **server.arguments}
        settings = settings.model_copy(update={"arguments": given})
    return ServerSpec(
        model_folder=Path(judge.model).absolute(),
        dtype=config.reward.model_dtype(on_cuda=on_cuda),
        settings=settings,
        stop_token_ids=(),
        trust_remote_code=False,
        log_directory=config.run.path.absolute() / "engines",
        cache=PlannedCache(settings.held_tokens(on_cuda=on_cuda), 0),
        devices=own_gpus(config, server, _key(config, name), ranks_here) if on_cuda else (),
        cores=() if on_cuda else own_cores(),
        called="judge" if name == "judge" else f"judge {name}",
        key=_key(config, name),
    )
