"""Settings of a run: one frozen, validated class for each section of the YAML file.

Field names end in a unit (`_sequences`, `_tokens`, `_seconds`, `_bytes`). A section checks the rules between its own
fields. `derive` checks rules between sections, the model and the world size. The larger sections have separate files:
`roles`, `algorithm`, `data`, `engine`, `environment`, `reward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from megappo.config.algorithm import AlgorithmSettings
from megappo.config.base import (
    Bytes,
    Fraction,
    NonNegativeInt,
    PathFromText,
    PathText,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Settings,
    Text,
    TokenIds,
    WholeSeconds,
)
from megappo.config.data import DataSettings
from megappo.config.engine import ENGINES, SGLangSettings
from megappo.config.environment import SINGLE_TURN, EnvironmentSettings
from megappo.config.logs import LoggingSettings, SaveExperienceSettings
from megappo.config.reward import RewardSettings
from megappo.config.roles import ActorSettings, CriticSettings, ReferenceSettings, TrainedRoleSettings
from megappo.errors import show
from megappo.plugins import check_choice, is_import_path

PHASES = (
    "start", "rollout", "reward", "forward", "advantages", "update_critic", "update_actor", "sync", "evaluate",
    "checkpoint", "export",
)  # fmt: skip
"""Phases that the watchdog distinguishes. Each phase lasts until the next phase begins."""
_BUDGET, _ROOM_TOKENS = "microbatch_budget_tokens", 1024
"""Microbatch budget of a role, and the unit in tokens to which its default is rounded up for padding in a layout."""


class RunSettings(Settings):
    name: PathText = "run"
    """Name of the experiment. The default run directory is `runs/<name>`, always inside `runs`. Default: the name of
    the configuration file."""
    directory: PathFromText | None = None
    """Folder for all files that the run writes. Default: `runs/<name>`."""
    private: bool = False
    """Whether only you can read the run directory (mode 0700). If false, your umask sets the mode."""
    steps: PositiveInt | None = None
    """Number of PPO steps. A step is one rollout and its updates. Set either this field or `epochs`."""
    epochs: PositiveFloat | None = None
    """Number of passes over `data.train`, instead of `steps`. Prompts of the next pass fill the last step. With
    `data.mixture`, one pass has as many prompts as all sources together."""
    max_hours: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Maximum runtime of the process in hours. The run stops with a checkpoint before the limit, and the same command
    continues the run. Null: the run stops only before the time limit of its SLURM job."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initialisation, shuffling and sampling."""
    export_final_model: bool = True
    """Whether to export the actor as a Hugging Face folder (`<directory>/final`) at the end."""
    files: Annotated[tuple[PathText, ...], Field(strict=False)] = ()
    """Configuration files of the settings, written by megappo. Later files override earlier files."""
    force_resume: bool = False
    """Whether to continue from a checkpoint even if changed settings make the run a different run."""

    @field_validator("name")
    @classmethod
    def _stays_in_runs(cls, name: str) -> str:
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise ValueError(
                f"{show(name)} is not a folder below runs/; remove parts that are empty, '.' or '..' from the name, or "
                "set run.directory to use another folder"
            )
        return name

    def broken_rules(self) -> Iterator[str]:
        if self.steps is None and self.epochs is None:
            yield "steps is missing; set steps (PPO steps) or epochs (passes over data.train)"
        if self.steps is not None and self.epochs is not None:
            yield f"steps {self.steps} and epochs {self.epochs:g} are both given; keep one of them"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory if self.directory is not None else Path("runs") / self.name


class RuntimeSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainers. `auto` selects CUDA if CUDA is available."""
    threads_per_rank: Processes | None = None
    """CPU threads of each rank. Default: the cores of the machine divided by the number of its ranks."""
    offload_directory: PathFromText | None = None
    """Folder for offloaded parts of roles (`actor.offload`) without CUDA. Default: the system's temporary folder."""
    collective_timeout_seconds: WholeSeconds = 1800
    """Timeout of a collective, which must exceed the limit of every phase. Default with the watchdog: one week,
    because the watchdog then ends a hanging run. At the start, ranks wait for missing ranks at most this long and at
    most 30 minutes."""
    phase_timeout_seconds: Seconds | None = 1500.0
    """Maximum duration of a phase. The watchdog ends a run that exceeds the limit and reports the stacks of all ranks.
    Null: no watchdog. Progress of any rank restarts the clock: tokens of a rollout or an evaluation, a minibatch, a
    microbatch, or a bucket of weights. If this field is not set, the limit of a phase is at least four times its
    planned duration, plus the start timeouts of the servers in the phase `start`."""
    phase_timeouts_seconds: dict[str, Seconds] = Field(default_factory=dict)
    """Limits of single phases, such as {rollout: 3600}."""

    def broken_rules(self) -> Iterator[str]:
        for name in self.phase_timeouts_seconds:
            if name not in PHASES:
                yield f"phase_timeouts_seconds has '{name}', which is not a phase; use one of {', '.join(PHASES)}"


class ModelSettings(Settings):
    path: PathText
    """Hugging Face folder or hub name (OWNER/NAME or OWNER/NAME@REVISION). `init: pretrained` needs safetensors."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Source of the weights. `random` draws weights with `initializer_range` of config.json and the seed of the run."""
    family: Text | None = None
    """Custom model family (`file.py:FAMILY` or `package.module:FAMILY`).
    The `model_type` of config.json selects the family of a model."""
    tokenizer: PathText | None = None
    """Folder or hub name of the tokenizer. Append `@REVISION` for a revision other than `main`. Default: `path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of weights and activations. With bfloat16, the optimizer keeps float32 main weights."""
    accelerations: Literal["auto", "torch"] = "torch"
    """Implementation of layers and optimizer. `torch`: layers of megappo and AdamW of torch. `auto`: Transformer
    Engine and NVIDIA Apex on CUDA if both are installed and work. No test and no GPU run has used `auto` yet."""
    pad_vocab_to_multiple_of: int = Field(default=1, gt=0, le=2**20)
    """Unit of vocabulary padding. The padded size is a multiple of this number. 1: of the tensor parallel size."""
    trust_remote_code: bool = False
    """Whether Python code from model folders may run, including the folder of the reward model."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _has_the_range_of_gradients(cls, dtype: object) -> object:
        if dtype in ("float16", "fp16", "half"):
            raise ValueError(
                f"{show(dtype)} has a maximum of 65504 and loses small gradients without loss scaling, which megappo "
                "does not support; set bfloat16, or float32 on GPUs without bfloat16"
            )
        return dtype


class DynamicSamplingSettings(Settings):
    max_rounds: Annotated[int, Field(gt=1, le=1000)] = 4
    """Maximum number of prompt rounds in a step. After the last round, prompts with equal rewards fill the step."""


class RolloutSettings(Settings):
    engine: Text | None = None
    """Generation engine. `sglang`: servers for the prompts of all ranks. `transformers`: an engine inside each rank.
    `file.py:Class` or `package.module:Class`: a custom engine. Default: sglang on CUDA, transformers on a CPU."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a custom engine."""
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
    sglang: SGLangSettings | None = None
    """Servers of `engine: sglang`. Default: on GPUs one per rank on the trainers' devices, on a CPU one server."""
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

    def engine_on(self, *, on_cuda: bool) -> str:
        """Return the name of the engine. The default depends on the device."""
        return self.engine or ("sglang" if on_cuda else "transformers")

    @property
    def has_servers(self) -> bool:
        """Whether SGLang servers generate. The settings must be complete (`resolve`)."""
        return self.engine == "sglang" and self.load_from is None

    @property
    def broadcasts(self) -> bool:
        """Whether servers have separate devices and receive weights by broadcast in process groups."""
        return self.has_servers and self.servers.placement == "disaggregated"

    @property
    def servers(self) -> SGLangSettings:
        """Settings of the SGLang servers, or the defaults."""
        return self.sglang if self.sglang is not None else SGLangSettings()

    def servers_sleep(self, *, on_cuda: bool) -> bool:
        """Return whether servers release their memory between rollouts. Servers sleep only on GPUs that trainers
        share, and only if nothing is generated during training."""
        return on_cuda and self.servers.placement == "colocated" and self.servers.sleep and not self.ahead

    def servers_are_deterministic(self, *, on_cuda: bool) -> bool:
        """Return whether servers are deterministic. Default: true on a CPU and with `when_stopped: keep`."""
        setting = self.servers.deterministic
        return (not on_cuda or self.when_stopped == "keep") if setting is None else setting

    @field_validator("engine")
    @classmethod
    def _engine_is_known(cls, engine: str | None) -> str | None:
        if engine is not None:
            check_choice(engine, ENGINES)
        return engine

    def broken_rules(self) -> Iterator[str]:
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


class EvaluationSettings(Settings):
    every_steps: PositiveInt
    """Number of steps between evaluations. An evaluation also follows the last step."""
    before_training: bool = True
    """Whether to evaluate before the first step."""
    max_response_tokens: PositiveInt | None = None
    """Maximum length of a response. Default: `rollout.max_response_tokens`."""

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether an evaluation follows step `step` of `steps`. Step 0 is the time before the first step."""
        return self.before_training if step == 0 else step % self.every_steps == 0 or step == steps


class CheckpointSettings(Settings):
    """Checkpoints in `<directory>/checkpoints`. A killed run continues from a checkpoint with identical results."""

    every_steps: PositiveInt = 50
    """Number of steps between checkpoints. A checkpoint is also written at the end and when the run is stopped."""
    every_minutes: PositiveFloat | None = 60.0
    """Maximum number of minutes between checkpoints by the clock of the first rank. A checkpoint is written if the
    next step would end after the limit. Null: only steps count."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep. With 1, no other checkpoint remains if the newest checkpoint is damaged."""
    keep_best: Text | None = None
    """Metric whose best checkpoint is kept, such as reward/mean. The highest value is best, or the lowest with a
    leading `-`. The run must log the metric in a step with a checkpoint."""
    keep_every_steps: PositiveInt | None = None
    """Number of steps between additional checkpoints that are never deleted. Null: none."""
    huggingface_every_steps: PositiveInt | None = None
    """Number of steps between exports of the actor as Hugging Face folders (`<directory>/huggingface/step-...`), which
    are never deleted. Null: only the export at the end."""
    asynchronous: bool = True
    """Whether to write checkpoints in the background, from a copy in host memory, during training."""

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether a checkpoint follows step `step` of `steps`, apart from `every_minutes`."""
        return step == steps or any(n is not None and step % n == 0 for n in (self.every_steps, self.keep_every_steps))


def _configured(values: Mapping[str, Any], section: str, name: str, settings: type[Settings]) -> Any:
    """Return a setting of the user, or its default."""
    fields, default = values.get(section), settings.model_fields[name].default
    return fields.get(name, default) if isinstance(fields, dict) else default


class Config(Settings):
    """Settings of a whole run."""

    run: RunSettings
    """Name, length, seed."""
    runtime: RuntimeSettings = RuntimeSettings()
    """Device and threads."""
    model: ModelSettings
    """Model of the actor."""
    actor: ActorSettings = ActorSettings()
    """Layout, optimizer and batches of the policy."""
    critic: CriticSettings | None = None
    """The value model. Default: a critic with default settings if the estimator is `gae`, otherwise none."""
    reference: ReferenceSettings | None = None
    """The frozen policy. KL terms need a reference."""
    data: DataSettings
    """Prompts."""
    rollout: RolloutSettings = RolloutSettings()
    """Generation."""
    reward: RewardSettings
    """Scoring."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """PPO itself."""
    evaluation: EvaluationSettings | None = None
    """Periodic evaluation on `data.validation` and `data.validation_sets`."""
    checkpoint: CheckpointSettings | None = CheckpointSettings()
    """Checkpoints for stopped runs to continue from. Null: no checkpoints."""
    logging: LoggingSettings = LoggingSettings()
    """Files, loggers and the console."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in(cls, values: Any, validate: ModelWrapValidatorHandler[Config]) -> Config:
        """Fill in missing settings that follow from other settings: a critic for `gae`, and a microbatch budget that
        fits the longest sample. These settings do not count as set (`model_fields_set`)."""
        if not isinstance(values, dict):
            return validate(values)
        filled = dict(values)
        if "critic" not in values and _configured(values, "algorithm", "estimator", AlgorithmSettings) == "gae":
            filled["critic"] = {}
        prompt = _configured(values, "data", "max_prompt_tokens", DataSettings)
        response = _configured(values, "rollout", "max_response_tokens", RolloutSettings)
        if type(prompt) is not int or type(response) is not int:
            return validate(filled)  # raises an error
        raised, budget = [], -(-(prompt + response) // _ROOM_TOKENS) * _ROOM_TOKENS
        for role in ("actor", "critic"):
            settings = filled.get(role, {} if role == "actor" else None)
            default = _configured({role: settings}, role, _BUDGET, TrainedRoleSettings)
            if isinstance(settings, dict) and _BUDGET not in settings and budget > default:
                filled[role] = {**settings, _BUDGET: budget}
                raised.append(role)
        config = validate(filled)
        for role in raised:
            config.trained[role].model_fields_set.discard(_BUDGET)
        config.model_fields_set.intersection_update(values)
        return config

    @property
    def saves_experience(self) -> SaveExperienceSettings | None:
        """Settings of saved experience. None: no experience is saved."""
        settings = self.logging.save_experience
        return settings or (None if self.rollout.save_to is None else SaveExperienceSettings())

    @property
    def experience_folder(self) -> Path:
        """Folder of saved experience."""
        folder = self.rollout.save_to
        return self.run.path / "experience" if folder is None else Path(folder)

    @property
    def pretrains_critic(self) -> bool:
        """Whether the run trains only the critic, on saved experience."""
        return self.critic is not None and self.critic.pretraining is not None

    @property
    def trained(self) -> dict[str, ActorSettings | CriticSettings]:
        """Actor and critic by name, without the critic if there is none."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def offloads(self) -> bool:
        """Whether any part of a role leaves the device while the role is idle."""
        return any(role.offload.parts for role in (*self.trained.values(), self.reference) if role is not None)

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum length of prompt and response together, evaluations excluded."""
        return self.rollout.total_tokens(self.data.max_prompt_tokens, self.rollout.max_response_tokens)
