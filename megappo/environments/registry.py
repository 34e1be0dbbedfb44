"""Creates the environment of the settings and the shared state of its episodes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from megappo.config import Config
from megappo.config.sections.environment import ENVIRONMENTS, EnvironmentSettings
from megappo.environments.chat import ChatTokens
from megappo.environments.gateway.server import Gateway
from megappo.environments.protocol import Environment
from megappo.environments.session import SharedEpisodeState
from megappo.environments.tools.tool_pool import ToolPool
from megappo.models.tokens import TokenRows
from megappo.plugins import check_call, load, users_code

_SETTING = "rollout.environment.name"


def make_environment(settings: EnvironmentSettings) -> Environment:
    """Return the environment of the settings. Raises ValueError if the class cannot be created or has no `run`."""
    made = load(ENVIRONMENTS.get(settings.name, settings.name), _SETTING, inspect.isclass, "class")
    what, remedy = f"{_SETTING} '{settings.name}'", "change its parameters, or rollout.environment.arguments"
    check_call(made, (), settings.arguments, what=what, remedy=remedy)
    with users_code(f"{what} cannot be made", remedy, keeps_ours=True):
        environment: Environment = made(**settings.arguments)
    if not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        raise ValueError(f"{what} has no `async def run(self, session)`; give it one")
    return environment


@dataclass(frozen=True)
class EnvironmentContext:
    """An environment with the shared state of its episodes, except the engine."""

    environment: Environment
    shared: SharedEpisodeState

    def again(self) -> EnvironmentContext:
        """Return a copy for another event loop, with separate tools and a separate gateway."""
        tools, gateway = self.shared.tools.again(), self.shared.gateway.again()
        return replace(self, shared=replace(self.shared, tools=tools, gateway=gateway))


def make_environment_context(
    config: Config,
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
    rows: TokenRows,
) -> EnvironmentContext:
    """Return the environment of the run and the shared state of its episodes.

    `rows`: token ids with embedding rows in the models. Raises ValueError if the environment, its tools or the chat
    template cannot be used.
    """
    settings = config.rollout.episodes
    assert settings is not None, "validated: episodes need an environment in the settings"
    role, schemas = getattr(environment, "role", "user"), getattr(environment, "schemas", [])
    time = config.data.template_time
    chat = ChatTokens(tokenizer, stop_token_ids, schemas, time) if config.data.apply_chat_template else None
    if chat is not None:
        chat.check(role)
    if getattr(environment, "serves", False) and tokenizer.chat_template is None:
        raise ValueError(
            f"rollout.environment.name '{settings.name}' serves agents, whose messages need a chat template, and the "
            "tokenizer has none; give model.tokenizer one"
        )
    tools = ToolPool(getattr(environment, "tools", {}), settings.tools, getattr(environment, "programs", {}))
    gateway, most = Gateway(settings.gateway_host), config.data.max_prompt_tokens
    return EnvironmentContext(
        environment, SharedEpisodeState(settings, tokenizer, rows.count, chat, role, tools, gateway, most, time)
    )
