"""Settings of generation (`rollout`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from megappo.config.base import (
    Bytes,
    Fraction,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Settings,
    Text,
    TokenIds,
)
from megappo.config.sections.engine import (
    DEFAULT_ENGINE,
    ENGINES,
    IN_PROCESS,
    EngineCapabilities,
    ServerSettings,
    find_capabilities,
)
from megappo.config.sections.environment import SINGLE_TURN, EnvironmentSettings
from megappo.errors import show
from megappo.plugins import check_choice, is_import_path


class DynamicSamplingSettings(Settings):
    max_rounds: Annotated[int, Field(gt=1, le=1000)] = 4
    """Maximum number of prompt rounds in a step. After the last round, prompts with equal rewards fill the step."""


class RolloutSettings(Settings):
    engine: Text | None = None
    """Generation engine inside each rank: `transformers`, or a custom engine (`file.py:Class` or
    `package.module:Class`). Default: `transformers` on a CPU, and `servers` on CUDA."""
    servers: ServerSettings | None = None
    """Servers that generate for all ranks, instead of an `engine`. Default on CUDA: one server per rank on the
    trainers' devices."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a custom engine (`engine` or `servers.kind`)."""
    generation: Text | None = None
    """Custom function for generation: `file.py:function` or `package.module:function`. Default: the engine."""
    generation_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function in `generation`."""
    ahead: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of steps that are generated ahead of training. With 1, the responses or episodes of the next step are
    generated during the updates of a step, with weights one step old (not with `transformers`). With 2 or more,
    prompts of this many steps are always in flight, and a step takes finished responses or episodes."""
    max_lag: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Maximum number of syncs between the weights that began a response and the weights that are trained on the
    response. Needs an `ahead` of at least 2, and must be at least `ahead`. Default: 1 with `gae`, because older values
    bias `gae`, and `ahead` otherwise."""
    record_arrivals: bool = False
    """Whether to write the samples of each step to `<directory>/arrivals`. Needs an `ahead` of at least 2."""
    replay_arrivals: PathText | None = None
    """Folder `arrivals` of a run that recorded its samples. Steps train on the same samples bit for bit, and the
    engine generates no samples for training."""
    save_to: PathText | None = None
    """Folder for saved experience. All steps are saved unless `logging.save_experience` selects steps. Default:
    `<directory>/experience` if `logging.save_experience` is set."""
    load_from: PathText | None = None
    """Folder of experience that another run saved. Each step trains on the samples and scores of the step with the
    same number, and no engine is started."""
    prompts_per_step: int = Field(default=256, gt=0, le=2**24)
    """Prompts of one PPO step over all ranks. Recipes use 128 (Open-Reasoner-Zero) to 1,024 (verl, OpenRLHF)."""
    samples_per_prompt: int = Field(default=1, gt=0, le=2**16)
    """Number of responses to each prompt."""
    max_response_tokens: PositiveInt = 1024
    """Maximum length of a response (OpenRLHF's default), or of all turns of an episode together with the texts of the
    environment between them."""
    when_stopped: Literal["drop", "keep"] = "drop"
    """Treatment of the finished responses of a step when the run is stopped. `drop`: the responses are generated
    again. `keep`: the checkpoint contains the responses."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Every logprob of the run refers to the scaled distribution."""
    top_p: Fraction = 1.0
    """Threshold of nucleus sampling. Must be 1, because truncated sampling biases the ratios."""
    top_k: NonNegativeInt = 0
    """Number of candidates of top-k sampling. Must be 0, because truncated sampling biases the ratios."""
    stop_token_ids: TokenIds = ()
    """Tokens that end a response, in addition to the end-of-sequence tokens of the model. A base model with a chat
    template may need the end-of-turn token of the template. The dry run and the start of a run report a missing token.
    """
    stop: Annotated[tuple[Text, ...], Field(strict=False, max_length=16)] = ()
    """Texts that end a response or a turn, at any token boundary: `["</answer>", "\\n\\nQuestion:"]`. Their tokens
    stay in the response, in the input of rewards and in the training data."""
    max_total_tokens: PositiveInt | None = None
    """Maximum length of prompt and response together, or of an episode. Default: the sum of both limits."""
    min_response_tokens: NonNegativeInt = 0
    """Minimum length of a response or a turn. Stop tokens are not sampled before this length. Engine, actor and
    reference exclude stop tokens from the logprobs of these tokens."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the engine's weights. Default: `model.dtype`."""
    generate_batch_sequences: PositiveInt = 64
    """Number of sequences that the embedded engine generates together."""
    sync_bucket_bytes: Bytes = 256 * 2**20
    """Maximum bytes of weights that a rank receives at a time in a weight sync. A larger tensor exceeds the limit."""
    dynamic_sampling: DynamicSamplingSettings | None = None
    """Not null: replace prompts whose samples all have the same reward until the step is full (DAPO)."""
    environment: EnvironmentSettings | None = None
    """Environment of episodes with several turns. Default: one response to each prompt."""

    @property
    def episodes(self) -> EnvironmentSettings | None:
        """Settings of the environment of episodes, or None if each prompt gets one response."""
        return None if self.environment is None or self.environment.name == SINGLE_TURN else self.environment

    @property
    def in_flight(self) -> bool:
        """Whether a step takes finished prompts instead of waiting for its own prompts."""
        return self.ahead > 1

    @property
    def replays_arrivals(self) -> bool:
        """Whether steps train on recorded samples. The engine then generates only for evaluations."""
        return self.in_flight and self.replay_arrivals is not None

    @property
    def keeps_when_stopped(self) -> bool:
        """Whether a stopped run keeps the finished responses of the interrupted step."""
        return self.in_flight or self.when_stopped == "keep"

    @property
    def reads_text(self) -> bool:
        """Whether servers inspect the texts of tokens. The servers then need the tokenizer."""
        return bool(self.stop) or self.min_response_tokens > 0

    def total_tokens(self, prompt: int, response: int) -> int:
        """Return the maximum length of prompt and response together, for the given limits of both."""
        return prompt + response if self.max_total_tokens is None else min(prompt + response, self.max_total_tokens)

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of prompts of a step and number of samples of each prompt, which define the numbering of samples."""
        return self.prompts_per_step, self.samples_per_prompt

    @property
    def batch_sequences(self) -> int:
        """Number of samples of one step over all ranks."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def engine_name(self) -> str | None:
        """Name or import path of the engine: `servers.kind` or `engine`. None: the device selects the engine."""
        return self.engine if self.servers is None else self.servers.kind

    @property
    def engine_setting(self) -> str:
        """Name of the setting that selects the engine, for messages."""
        return "rollout.engine" if self.servers is None else "rollout.servers.kind"

    @property
    def engine_text(self) -> str:
        """Setting and name of the engine, for messages."""
        return f"{self.engine_setting} '{self.engine_name}'"

    @property
    def is_custom(self) -> bool:
        """Whether the engine is a class or a function of the user."""
        return self.engine_name is not None and self.engine_name not in ENGINES

    def with_engine(self, *, on_cuda: bool) -> RolloutSettings:
        """Return the settings with the engine of the device if no engine is set."""
        if self.engine_name is not None:
            return self
        return self.model_copy(update={"servers": ServerSettings()} if on_cuda else {"engine": DEFAULT_ENGINE})

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of the engine. No capabilities without an engine (`load_from`), and before `resolve` selects
        the engine. Raises ConfigError if a custom engine cannot be imported."""
        if self.engine_name is None or self.load_from is not None:
            return EngineCapabilities()
        return find_capabilities(self.engine_name, self.engine_setting)

    @property
    def broadcasts(self) -> bool:
        """Whether servers have separate devices and receive weights by broadcast in process groups."""
        return self.capabilities.separate_processes and self.server_settings.placement == "disaggregated"

    @property
    def server_settings(self) -> ServerSettings:
        """Settings of the servers, or the defaults."""
        return ServerSettings() if self.servers is None else self.servers

    def servers_sleep(self, *, on_cuda: bool) -> bool:
        """Return whether servers release their memory between rollouts. Servers sleep only on GPUs that trainers
        share, and only if nothing is generated during training."""
        return (
            on_cuda and self.server_settings.placement == "colocated" and self.server_settings.sleep and not self.ahead
        )

    def servers_are_deterministic(self, *, on_cuda: bool) -> bool:
        """Return whether servers are deterministic. Default: true on a CPU and with `when_stopped: keep`."""
        setting = self.server_settings.deterministic
        return (not on_cuda or self.when_stopped == "keep") if setting is None else setting

    @field_validator("engine")
    @classmethod
    def _engine_is_known(cls, engine: str | None) -> str | None:
        if engine is not None:
            try:
                check_choice(engine, IN_PROCESS)
            except ValueError as error:
                raise ValueError(f"{error}, or set rollout.servers to generate with servers") from None
        return engine

    def broken_rules(self) -> Iterator[str]:
        if self.engine is not None and self.servers is not None:
            yield f"engine '{self.engine}' and servers are both given; remove servers, or remove engine"
        if self.generation is not None:
            if not is_import_path(self.generation):
                forms = "package.module:function or path/to/file.py:function"
                yield f"generation is {show(self.generation)}, must be an import path; write {forms}"
        elif self.generation_options:
            yield "generation_options need a function in generation, which is null; remove generation_options"
        for name, value, unused in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0)):
            if value != unused:
                problem = f"{name} {value} truncates the distribution, which biases the ratios"
                yield f"{problem}; set {name} to {unused}, and use temperature instead"
