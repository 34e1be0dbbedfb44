"""Settings of a run: one frozen, validated class for each section of the YAML file.

Field names end in a unit (`_sequences`, `_tokens`, `_seconds`, `_bytes`). A section checks the rules between its own
fields. `derive` checks rules between sections, the model and the world size. The larger sections have separate files:
`roles`, `algorithm`, `data`, `rollout`, `engine`, `environment`, `reward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from megappo.config.base import (
    PathFromText,
    PathText,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Settings,
    Text,
    WholeSeconds,
)
from megappo.config.renamed import replace_old_names
from megappo.config.rollout import RolloutSettings
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.config.sections.data import DataSettings
from megappo.config.sections.logs import LoggingSettings, SaveExperienceSettings
from megappo.config.sections.reward import RewardSettings
from megappo.config.sections.roles import ActorSettings, CriticSettings, ReferenceSettings, TrainedRoleSettings
from megappo.errors import show

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

    _old_names: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in(cls, values: Any, validate: ModelWrapValidatorHandler[Config]) -> Config:
        """Fill in missing settings that follow from other settings: a critic for `gae`, and a microbatch budget that
        fits the longest sample. These settings do not count as set (`model_fields_set`)."""
        if not isinstance(values, dict):
            return validate(values)
        filled, old_names = replace_old_names(values)
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
        config._old_names = tuple(old_names)
        return config

    def with_old_names(self, names: Iterable[str]) -> Config:
        """Return the same settings, read from a file or from overrides with these names of older versions."""
        config = self.model_copy()
        config._old_names = (*self._old_names, *names)
        return config

    @property
    def old_names(self) -> tuple[str, ...]:
        """Names of older versions in the file or in the overrides, with the current names."""
        return tuple(dict.fromkeys(self._old_names))

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
