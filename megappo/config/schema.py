"""The settings of a run: one frozen, validated class per section of the YAML file.

Units stand in the names (`_sequences`, `_tokens`, `_seconds`, `_bytes`); every field says what it means. Rules that
need only one section are checked here, rules between sections, the model and the world size in `derive`. The larger
sections have files of their own: `roles`, `algorithm`, `data`, `engine`, `environment`, `reward`.
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
"""Phases that the watchdog distinguishes; each lasts until the next begins."""
_BUDGET, _ROOM_TOKENS = "microbatch_budget_tokens", 1024
"""Setting of a role that is filled in, and its unit in tokens, so that every layout can pad a sample in it."""


class RunSettings(Settings):
    name: PathText = "run"
    """Name of the experiment; the default run directory is `runs/<name>`, which it cannot leave. Default: the name of
    the configuration file."""
    directory: PathFromText | None = None
    """Folder for everything that the run writes; default: `runs/<name>`."""
    private: bool = False
    """The run directory is readable by you alone (mode 0700); otherwise your umask decides."""
    steps: PositiveInt | None = None
    """PPO steps: each is one rollout and its updates. Either this or `epochs` is given."""
    epochs: PositiveFloat | None = None
    """Passes over `data.train` in place of `steps`; the last step is filled up from the next pass. With `data.mixture`:
    as many prompts as so many passes over all of its sources have."""
    max_hours: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Stop with a checkpoint before the process has run for so long, so that the same command can continue; null: only
    before the end that SLURM has set for the job."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initialisation, shuffling and sampling."""
    export_final_model: bool = True
    """Write the actor as a Hugging Face folder (`<directory>/final`) at the end."""
    files: Annotated[tuple[PathText, ...], Field(strict=False)] = ()
    """Configuration files that the settings come from, each laid over those before it; written by megappo."""
    force_resume: bool = False
    """Continue from a checkpoint although settings changed that make this another run."""

    @field_validator("name")
    @classmethod
    def _stays_in_runs(cls, name: str) -> str:
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise ValueError(
                f"{show(name)} is no folder below runs/; give a name without . and .. between its slashes, and set "
                "run.directory for a folder elsewhere"
            )
        return name

    def broken_rules(self) -> Iterator[str]:
        if self.steps is None and self.epochs is None:
            yield "steps is missing; add it (PPO steps), or epochs (passes over data.train)"
        if self.steps is not None and self.epochs is not None:
            yield f"steps {self.steps} and epochs {self.epochs:g} are both given; keep one of them"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory if self.directory is not None else Path("runs") / self.name


class RuntimeSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    threads_per_rank: Processes | None = None
    """CPU threads of each rank; default: the machine's cores divided by the ranks on it."""
    offload_directory: PathFromText | None = None
    """Folder with room for what rests of the roles (`actor.offload`) on a machine without CUDA; default: the system's
    temporary folder."""
    collective_timeout_seconds: WholeSeconds = 1800
    """A collective that waits longer than this fails; default with the watchdog, which then ends what hangs: a week. It
    must be above every limit of a phase. At the start, missing ranks are waited for no longer than this, and half an
    hour at most."""
    phase_timeout_seconds: Seconds | None = 1500.0
    """A phase of a step that lasts longer ends the run with the stacks of all ranks; null: no watchdog. Time counts
    from the last progress of any rank: tokens that an engine made in a rollout or evaluation, a minibatch, a
    microbatch, a bucket of weights. Where neither this nor a limit of its own is given, a phase may last at least four
    times as long as planned, and the start also as long as its servers may take."""
    phase_timeouts_seconds: dict[str, Seconds] = Field(default_factory=dict)
    """Limits of single phases, such as {rollout: 3600}."""

    def broken_rules(self) -> Iterator[str]:
        for name in self.phase_timeouts_seconds:
            if name not in PHASES:
                yield f"phase_timeouts_seconds has '{name}', which is no phase; they are {', '.join(PHASES)}"


class ModelSettings(Settings):
    path: PathText
    """Hugging Face folder or hub name, OWNER/NAME or OWNER/NAME@REVISION; safetensors with `init: pretrained`."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` draws the weights from the configuration's `initializer_range` and the run's seed."""
    family: Text | None = None
    """A model family of your own beside the built-in ones: `package.module:FAMILY`; config.json's `model_type`
    chooses."""
    tokenizer: PathText | None = None
    """Folder or hub name of the tokenizer, with `@REVISION` where it is not `main`; default: `path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; bfloat16 keeps float32 main weights in the optimizer."""
    accelerations: Literal["auto", "torch"] = "torch"
    """`torch`: megappo's own layers and torch's AdamW. `auto`: Transformer Engine and NVIDIA's Apex on CUDA, where they
    are installed and work; no test and no GPU run has executed that path yet."""
    pad_vocab_to_multiple_of: int = Field(default=1, gt=0, le=2**20)
    """The vocabulary is padded to this multiple; 1: to a multiple of the tensor parallel size."""
    trust_remote_code: bool = False
    """Allow Python code from the folders of models, the reward model's among them, to run."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _has_the_range_of_gradients(cls, dtype: object) -> object:
        if dtype in ("float16", "fp16", "half"):
            raise ValueError(
                f"{show(dtype)} ends at 65504 and loses small gradients, which want a scaled loss, and megappo scales "
                "none; set bfloat16, or float32 on GPUs without it"
            )
        return dtype


class DynamicSamplingSettings(Settings):
    max_rounds: Annotated[int, Field(gt=1, le=1000)] = 4
    """Most rounds of prompts in a step. After the last one, prompts of equal rewards fill the step up."""


class RolloutSettings(Settings):
    engine: Text | None = None
    """`sglang`: servers that every rank sends its prompts to. `transformers`: embedded in every rank. Or one of your
    own: `package.module:Class`. Default: sglang on CUDA, transformers on a CPU."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an engine of your own."""
    generation: Text | None = None
    """A function of your own that makes responses with the engine, `package.module:function`; default: the engine
    alone."""
    generation_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""
    ahead: Annotated[int, Field(ge=0, le=64)] = 0
    """Steps that are generated ahead of training. 1: the next step's responses or episodes are generated during a
    step's updates, with weights one step old (not with `transformers`). 2 and more: prompts of so many steps are always
    in flight, and a step takes those whose responses or episodes are finished."""
    max_lag: Annotated[int, Field(gt=0, le=1024)] | None = None
    """With `ahead` of 2 and more: most syncs between the weights that began a response and the weights that are trained
    on it; default: 1 with `gae`, which older values bias, and `ahead` otherwise. At least `ahead`."""
    record_arrivals: bool = False
    """With `ahead` of 2 and more: write the samples of each step to `<directory>/arrivals`, which `replay_arrivals`
    reads."""
    replay_arrivals: PathText | None = None
    """The folder `arrivals` of a run that recorded them: steps are trained on the same samples, bit for bit, and the
    engine generates none."""
    save_to: PathText | None = None
    """Folder to which the experience of steps is written, of all steps unless `logging.save_experience` says which;
    default: `<directory>/experience` where that is given."""
    load_from: PathText | None = None
    """Folder of experience that another run saved: each step is trained on the samples and scores of the step of that
    number, and no engine is started."""
    prompts_per_step: int = Field(default=256, gt=0, le=2**24)
    """Prompts in one PPO step over all ranks; recipes have 128 (Open-Reasoner-Zero) to 1,024 (verl, OpenRLHF)."""
    samples_per_prompt: int = Field(default=1, gt=0, le=2**16)
    """Responses drawn for each prompt."""
    max_response_tokens: PositiveInt = 1024
    """Longest response (OpenRLHF's default); of an episode, all turns and what the environment says between them."""
    when_stopped: Literal["drop", "keep"] = "drop"
    """What happens to finished responses of a step when the run is told to stop: generated again (`drop`), or kept in
    the checkpoint (`keep`)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; every logprob of the run is of the scaled distribution."""
    top_p: Fraction = 1.0
    """Must be 1: truncated sampling biases the ratios."""
    top_k: NonNegativeInt = 0
    """Must be 0: truncated sampling biases the ratios."""
    stop_token_ids: TokenIds = ()
    """Tokens that end a response, besides the model's own end-of-sequence tokens. A base model with a chat template may
    need the token that ends a turn of the template: the dry run and the start of a run report where it is missing."""
    stop: Annotated[tuple[Text, ...], Field(strict=False, max_length=16)] = ()
    """Texts that end a response or a turn, wherever tokens begin and end: `["</answer>", "\\n\\nQuestion:"]`. Their
    tokens stay in the response, in what rewards read and in what is trained on."""
    max_total_tokens: PositiveInt | None = None
    """Longest prompt and response together, or all of an episode; default: what both limits allow."""
    min_response_tokens: NonNegativeInt = 0
    """Fewest tokens of a response, or of a turn: stop tokens are not sampled before. Engine, actor and reference
    compute the log-probabilities of these tokens without the stop tokens."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the engine's weights; default: the model's."""
    generate_batch_sequences: PositiveInt = 64
    """Sequences that the embedded engine generates together."""
    sync_bucket_bytes: Bytes = 256 * 2**20
    """Most bytes of weights that a rank receives at a time in a weight sync, unless one tensor is larger."""
    sglang: SGLangSettings | None = None
    """Servers of `engine: sglang`; default: on GPUs one per rank, on the trainers' devices; on a CPU one."""
    dynamic_sampling: DynamicSamplingSettings | None = None
    """Not null: prompts whose samples all have the same reward are replaced by others until the step is full (DAPO)."""
    environment: EnvironmentSettings | None = None
    """Episodes of several turns instead of one response to each prompt; default: none."""

    @property
    def episodes(self) -> EnvironmentSettings | None:
        """The environment of episodes; None where a prompt has one response."""
        return None if self.environment is None or self.environment.name == SINGLE_TURN else self.environment

    @property
    def in_flight(self) -> bool:
        """Whether steps take prompts that are finished instead of waiting for prompts of their own."""
        return self.ahead > 1

    @property
    def replays_arrivals(self) -> bool:
        """Whether steps are trained on recorded samples, and the engine answers evaluations only."""
        return self.in_flight and self.replay_arrivals is not None

    @property
    def keeps_when_stopped(self) -> bool:
        """Whether a run that is told to stop keeps responses of the step that it gives up."""
        return self.in_flight or self.when_stopped == "keep"

    @property
    def reads_text(self) -> bool:
        """Whether servers look at the texts of tokens, and so need the tokenizer."""
        return bool(self.stop) or self.min_response_tokens > 0

    def total_tokens(self, prompt: int, response: int) -> int:
        """Longest prompt and response together, with such limits of each."""
        return prompt + response if self.max_total_tokens is None else min(prompt + response, self.max_total_tokens)

    @property
    def sizes(self) -> tuple[int, int]:
        """Prompts of a step, and samples of each, which say what a sample's number means."""
        return self.prompts_per_step, self.samples_per_prompt

    @property
    def batch_sequences(self) -> int:
        """Samples of one step over all ranks."""
        return self.prompts_per_step * self.samples_per_prompt

    def engine_on(self, *, on_cuda: bool) -> str:
        """The engine, by default that of the device."""
        return self.engine or ("sglang" if on_cuda else "transformers")

    @property
    def has_servers(self) -> bool:
        """Whether SGLang servers generate, in settings that `resolve` has completed."""
        return self.engine == "sglang" and self.load_from is None

    @property
    def broadcasts(self) -> bool:
        """Whether weights are broadcast to servers in process groups: where servers are on devices of their own."""
        return self.has_servers and self.servers.placement == "disaggregated"

    @property
    def servers(self) -> SGLangSettings:
        """Settings of the SGLang servers, defaults where none are given."""
        return self.sglang if self.sglang is not None else SGLangSettings()

    def servers_sleep(self, *, on_cuda: bool) -> bool:
        """Whether servers give their memory to the trainers between rollouts: on shared GPUs, where nothing is
        generated meanwhile."""
        return on_cuda and self.servers.placement == "colocated" and self.servers.sleep and not self.ahead

    def servers_are_deterministic(self, *, on_cuda: bool) -> bool:
        """Whether servers compute a response from its prompt and seed alone: where it costs little, or is needed."""
        given = self.servers.deterministic
        return (not on_cuda or self.when_stopped == "keep") if given is None else given

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
                yield f"generation is {show(self.generation)}, must be a path; write {forms}"
        elif self.generation_options:
            yield "generation_options are for a function of your own, and generation is null; remove them"
        if self.top_p != 1.0 or self.top_k != 0:
            yield (
                f"top_p {self.top_p} and top_k {self.top_k} cut the distribution that the ratios are computed of; "
                "set top_p: 1.0 and top_k: 0 and use temperature instead"
            )


class EvaluationSettings(Settings):
    every_steps: PositiveInt
    """Evaluate after every so many steps, and after the last."""
    before_training: bool = True
    """Evaluate also before the first step."""
    max_response_tokens: PositiveInt | None = None
    """Longest response; default: the rollout's."""

    def is_due(self, step: int, steps: int) -> bool:
        """Whether an evaluation follows `step` of `steps`; 0: before the first."""
        return self.before_training if step == 0 else step % self.every_steps == 0 or step == steps


class CheckpointSettings(Settings):
    """Everything that a killed run needs to continue as if it had not been killed, in `<directory>/checkpoints`."""

    every_steps: PositiveInt = 50
    """Write a checkpoint after every so many steps; one is always written at the end and when the run is stopped."""
    every_minutes: PositiveFloat | None = 60.0
    """Also write a checkpoint where the next step would end later than this after the last one, by the first rank's
    clock; null: count steps only."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep; with 1 no other is left where the newest is damaged."""
    keep_best: Text | None = None
    """Also keep the checkpoint with the highest value of this metric, such as reward/mean (`-` in front: the
    lowest); a metric that the run logs in a step with a checkpoint."""
    keep_every_steps: PositiveInt | None = None
    """Also write a checkpoint after every so many steps, and keep these for good; null: none."""
    huggingface_every_steps: PositiveInt | None = None
    """Write the actor as a Hugging Face folder after every so many steps, to `<directory>/huggingface/step-...`, and
    keep all of them; null: at the end alone."""
    asynchronous: bool = True
    """Write checkpoints in the background from a copy in the host's memory while training goes on."""

    def is_due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint follows `step` of `steps`, apart from `every_minutes`."""
        return step == steps or any(n is not None and step % n == 0 for n in (self.every_steps, self.keep_every_steps))


def _said(given: Mapping[str, Any], section: str, name: str, settings: type[Settings]) -> Any:
    """A setting as the user wrote it, or its default."""
    found, default = given.get(section), settings.model_fields[name].default
    return found.get(name, default) if isinstance(found, dict) else default


class Config(Settings):
    """A whole run."""

    run: RunSettings
    """Name, length, seed."""
    runtime: RuntimeSettings = RuntimeSettings()
    """Device and threads."""
    model: ModelSettings
    """The actor's model."""
    actor: ActorSettings = ActorSettings()
    """Layout, optimizer and batches of the policy."""
    critic: CriticSettings | None = None
    """The value model; default: one with its defaults where the estimator is `gae`, otherwise none."""
    reference: ReferenceSettings | None = None
    """The frozen policy; needed by a KL term."""
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
    """Checkpoints, from which a stopped run continues; null: none are written."""
    logging: LoggingSettings = LoggingSettings()
    """Files, loggers and the console."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in(cls, given: Any, validate: ModelWrapValidatorHandler[Config]) -> Config:
        """Fill in settings that are not given and follow from others: a critic for `gae`, and microbatches that have
        room for the longest sample. They do not count as set (`model_fields_set`)."""
        if not isinstance(given, dict):
            return validate(given)
        filled = dict(given)
        if "critic" not in given and _said(given, "algorithm", "estimator", AlgorithmSettings) == "gae":
            filled["critic"] = {}
        prompt = _said(given, "data", "max_prompt_tokens", DataSettings)
        response = _said(given, "rollout", "max_response_tokens", RolloutSettings)
        if type(prompt) is not int or type(response) is not int:
            return validate(filled)  # which is refused
        raised, budget = [], -(-(prompt + response) // _ROOM_TOKENS) * _ROOM_TOKENS
        for role in ("actor", "critic"):
            settings = filled.get(role, {} if role == "actor" else None)
            default = _said({role: settings}, role, _BUDGET, TrainedRoleSettings)
            if isinstance(settings, dict) and _BUDGET not in settings and budget > default:
                filled[role] = {**settings, _BUDGET: budget}
                raised.append(role)
        config = validate(filled)
        for role in raised:
            config.trained[role].model_fields_set.discard(_BUDGET)
        config.model_fields_set.intersection_update(given)
        return config

    @property
    def saves_experience(self) -> SaveExperienceSettings | None:
        """Which experience of steps is saved; None: none."""
        given = self.logging.save_experience
        return given or (None if self.rollout.save_to is None else SaveExperienceSettings())

    @property
    def experience_folder(self) -> Path:
        """Folder to which experience is saved."""
        given = self.rollout.save_to
        return self.run.path / "experience" if given is None else Path(given)

    @property
    def pretrains_critic(self) -> bool:
        """Whether the critic alone is trained, on saved experience."""
        return self.critic is not None and self.critic.pretraining is not None

    @property
    def trained(self) -> dict[str, ActorSettings | CriticSettings]:
        """Actor and critic, where there is one, by their names."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def offloads(self) -> bool:
        """Whether anything of a role leaves the device while it rests."""
        return any(role.offload.parts for role in (*self.trained.values(), self.reference) if role is not None)

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt and response together, evaluation aside."""
        return self.rollout.total_tokens(self.data.max_prompt_tokens, self.rollout.max_response_tokens)
