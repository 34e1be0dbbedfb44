"""Frozen reward model that all ranks share: the process of the run with the model, and the client in each rank."""

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
"""Name of the process, also in `OwnServers.places`. The name has a space, so no judge can have the same name."""
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
        """Return the configuration of `megappo.rewards.model_server`."""
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
    """Return the process that serves `reward.model_path`, if `reward.model_server` is set.

    The call is then a collective of the world. Raises ValueError on every rank for a folder that is not a reward
    model.
    """
    server, path = config.reward.model_server, config.reward.model_path
    if server is None:
        return {}
    assert path is not None, "a validator requires model_path"

    def checked() -> Path:
        folder = model_folder(path, key="reward.model_path").absolute()
        check_folder(str(folder), trust_remote_code=config.model.trust_remote_code)
        return folder

    spec = partial(_spec, config, server, agreed(checked), on_cuda=runtime.on_cuda)
    return {SERVED: OwnServer(server, _KEY, f"the {SERVED}", spec)}


def _spec(
    config: Config, server: RewardModelServerSettings, folder: Path, local_ranks: int, *, on_cuda: bool
) -> ServerSpec:
    return _ModelServerSpec(
        model_folder=folder,
        dtype=config.reward.model_dtype(on_cuda=on_cuda),
        settings=server.as_servers,
        stop_token_ids=(),
        trust_remote_code=config.model.trust_remote_code,
        log_directory=config.run.path.absolute() / "engines",
        cache=PlannedCache(None, 0),
        devices=own_gpus(config, server, _KEY, local_ranks) if on_cuda else (),
        cores=() if on_cuda else own_cores(),
        called=SERVED,
        key=_KEY,
        batch_tokens=server.batch_tokens,
        template_time=config.data.template_time,
    )


class SharedRewardModel:
    """Client of the process with the model. The interface is the interface of `RewardModel`."""

    def __init__(self, place: ServerPlace, settings: RewardModelServerSettings, check: Callable[[], None]) -> None:
        """Create the client. `check` raises an error if the process has failed, on the rank that started the
        process."""
        self._endpoint = Endpoint(0, place.url, place.key, 0, called=SERVED)
        self._settings, self._check = settings, check
        self._has_chat_template: bool | None = None

    @property
    def has_chat_template(self) -> bool:
        """Value of `RewardModel.has_chat_template`, once the process has loaded the model. Raises as `score`."""
        if self._has_chat_template is None:
            self._has_chat_template = bool(self._request("/model_info", {})["has_chat_template"])
        return self._has_chat_template

    def score(self, prompts: Sequence[str | Sequence[Message]], responses: Sequence[str]) -> Tensor:
        """Return scores as `RewardModel.score` does.

        Raises RunError for a text that the model cannot process, and if the process does not answer within its start
        and request timeouts.
        """
        scores_B = torch.empty(len(responses))
        # Requests contain samples of similar length to reduce padding.
        order = sorted(range(len(responses)), key=lambda i: len(str(prompts[i])) + len(responses[i]))
        for first in range(0, len(order), REQUEST_SAMPLES):
            chosen = order[first : first + REQUEST_SAMPLES]
            questions, texts = [prompts[i] for i in chosen], [responses[i] for i in chosen]
            answer = self._request("/score", {"prompts": questions, "responses": texts})
            if "refused" in answer:
                raise RunError(str(answer["refused"]))
            scores_B[chosen] = torch.tensor(answer["scores"], dtype=torch.float32)
        return scores_B

    def _request(self, path: str, content: dict[str, JSONValue]) -> dict[str, JSONValue]:
        """Return the answer of the process. The request is repeated during a start or restart of the process."""
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
                f"{failures[-1]}, also after {_KEY}.start_timeout_seconds and timeout_seconds; see engines/"
                f"{SERVED.replace(' ', '-')}.log in the run directory"
            )
        return answers[0]
