"""A frozen reward model that all ranks share: the process of the run that holds it, and the client in each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from megappo.config import Config
from megappo.config.model_files import model_folder
from megappo.config.own_server import RewardModelServerSettings
from megappo.config.tokens import Message
from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.engines.sglang.spec import ServerSpec
from megappo.errors import RunError
from megappo.observe.json_values import JSONValue
from megappo.plan.cache import PlannedCache
from megappo.rewards.http import ServerPlace
from megappo.rewards.model import check_folder
from megappo.rewards.own_servers import OwnServer, own_cores, own_gpus
from megappo.runtime.objects import agreed
from megappo.runtime.process import Runtime
from megappo.runtime.waiting import wait_until

SERVED = "reward model"
"""Name of the process, also in `OwnServers.places`; it has a space, so that no judge has the same name."""
REQUEST_SAMPLES = 64
_KEY = "reward.model_server"
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class _ModelServerSpec(ServerSpec):
    """Specification of the process, which runs `megappo.rewards.model_server` instead of SGLang."""

    program: ClassVar[str] = "megappo.rewards.model_server"
    batch_tokens: int = 0
    template_time: str | None = None

    def arguments(self, port: int, key: str) -> dict[str, JSONValue]:
        """See `megappo.rewards.model_server`."""
        return {
            "model-path": str(self.model_folder),
            "dtype": self.dtype,
            "device": "cuda" if self.devices else "cpu",
            "host": self.host,
            "port": port,
            "api-key": key,
            "batch-tokens": self.batch_tokens,
            "trust-remote-code": self.trust_remote_code,
            "template-time": self.template_time,
        }


def model_servers(config: Config, runtime: Runtime) -> dict[str, OwnServer]:
    """The process to start that holds `reward.model_path`, where `reward.model_server` wants one; a collective of the
    world then. Raises ValueError on every rank for a folder that cannot be one."""
    server, path = config.reward.model_server, config.reward.model_path
    if server is None:
        return {}
    assert path is not None, "a validator saw to it"

    def checked() -> Path:
        folder = model_folder(path, key="reward.model_path").absolute()
        check_folder(str(folder), trust_remote_code=config.model.trust_remote_code)
        return folder

    spec = partial(_spec, config, server, agreed(checked), on_cuda=runtime.on_cuda)
    return {SERVED: OwnServer(server, _KEY, f"the {SERVED}", spec)}


def _spec(
    config: Config, server: RewardModelServerSettings, folder: Path, ranks_here: int, *, on_cuda: bool
) -> ServerSpec:
    return _ModelServerSpec(
        model_folder=folder,
        dtype=config.reward.model_dtype(on_cuda=on_cuda),
        settings=server.as_servers,
        stop_token_ids=(),
        trust_remote_code=config.model.trust_remote_code,
        log_directory=config.run.path.absolute() / "engines",
        cache=PlannedCache(None, 0),
        devices=own_gpus(config, server, _KEY, ranks_here) if on_cuda else (),
        cores=() if on_cuda else own_cores(),
        called=SERVED,
        key=_KEY,
        batch_tokens=server.batch_tokens,
        template_time=config.data.template_time,
    )


class SharedRewardModel:
    """Scores from the process that holds the model; used like a `RewardModel`."""

    def __init__(self, place: ServerPlace, settings: RewardModelServerSettings, check: Callable[[], None]) -> None:
        """`check` raises where the process is given up, on the rank that started it."""
        self._endpoint = Endpoint(0, place.url, place.key, 0, called=SERVED)
        self._settings, self._check = settings, check
        self._has_chat_template: bool | None = None

    @property
    def has_chat_template(self) -> bool:
        """See `RewardModel.has_chat_template`; waits for the process to have loaded it. Raises as `score`."""
        if self._has_chat_template is None:
            self._has_chat_template = bool(self._ask("/model_info", {})["has_chat_template"])
        return self._has_chat_template

    def score(self, prompts: Sequence[str | Sequence[Message]], responses: Sequence[str]) -> Tensor:
        """See `RewardModel.score`. Raises RunError for a text that the model cannot read, and where nobody answers
        in the time that the process may take to start and to answer."""
        scores_B = torch.empty(len(responses))
        # Alike in length, so that little of a batch is padding.
        order = sorted(range(len(responses)), key=lambda i: len(str(prompts[i])) + len(responses[i]))
        for first in range(0, len(order), REQUEST_SAMPLES):
            chosen = order[first : first + REQUEST_SAMPLES]
            asked, said = [prompts[i] for i in chosen], [responses[i] for i in chosen]
            answer = self._ask("/score", {"prompts": asked, "responses": said})
            if "refused" in answer:
                raise RunError(str(answer["refused"]))
            scores_B[chosen] = torch.tensor(answer["scores"], dtype=torch.float32)
        return scores_B

    def _ask(self, path: str, content: dict[str, JSONValue]) -> dict[str, JSONValue]:
        """The answer of the process; the request is repeated while the process starts, or starts again."""
        most_seconds = self._settings.timeout_seconds
        answers, failures = list[dict[str, JSONValue]](), list[str]()

        def is_answered() -> bool:
            self._check()
            try:
                answers.append(call(self._endpoint, path, content, timeout_seconds=most_seconds))
            except ServerFailure as failure:
                failures.append(str(failure))
            return bool(answers)

        if not wait_until(
            is_answered, self._settings.start_timeout_seconds + most_seconds, every_seconds=_PAUSE_SECONDS
        ):
            raise RunError(
                f"{failures[-1]}, nor after {_KEY}.start_timeout_seconds and timeout_seconds; look at engines/"
                f"{SERVED.replace(' ', '-')}.log in the run directory"
            )
        return answers[0]
