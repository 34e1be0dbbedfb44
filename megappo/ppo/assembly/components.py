"""Assembly of a run's components from its configuration: models on their layouts, engine, data, rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from megappo.config import Config, ConfigError, Derived
from megappo.config.role_models import role_folder
from megappo.data import PromptDataset, TrainingCursor, TrainingPrompts, training_cursor
from megappo.data.curriculum import Curriculum
from megappo.data.mixture import MixedPrompts
from megappo.engines.protocol import Completion, Engine, EngineFactory, GenerateRequest, SamplingParams
from megappo.engines.registry import find_engine, make_engine
from megappo.engines.requests import RequestTracker, generate
from megappo.environments.episodes import EpisodePool
from megappo.environments.registry import make_environment_context
from megappo.megatron.roles import Role
from megappo.models.stop_texts import StopTexts
from megappo.ppo.assembly.methods import check_methods
from megappo.ppo.assembly.models import ROLES, ModelBuilder
from megappo.ppo.assembly.rank_agreement import check_data
from megappo.ppo.rollout.answering import Generation, find_generation, generated
from megappo.preflight.inputs import RunInputs, read_inputs
from megappo.reshard.mtp import MTPLayers
from megappo.reshard.stream import WeightStream
from megappo.rewards.registry import check_prompts
from megappo.rewards.scorer import RewardScorer
from megappo.rewards.served.servers import start_reward_servers
from megappo.runtime.process import Runtime
from megappo.runtime.watch.interrupts import NeverStop, Stop
from megappo.types import Prompt, RoutingShape


@dataclass(frozen=True)
class RunMode:
    """Purpose of the components: training, or evaluation and export."""

    training: bool = True
    """Whether to train. If False, an actor can generate, but there is no optimizer, critic or reference."""
    inputs: RunInputs | None = None
    """Tokenizer, prompts and environment, if already read."""
    engine: EngineFactory | None = None
    """Factory of the engine. By default the settings select the engine."""
    resumed: bool = False
    """Whether a checkpoint will replace the weights. See `ModelBuilder`."""
    stop: Stop = field(default_factory=NeverStop)
    """Signals when to stop generating."""


@dataclass(frozen=True)
class RunComponents:
    """All components of the trainer."""

    config: Config
    derived: Derived
    runtime: Runtime
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    train_prompts: TrainingPrompts
    cursor: TrainingCursor
    curriculum: Curriculum | None
    """Pauses prompts that the policy answers well. None without `data.curriculum`."""
    validation_prompts: Mapping[str, PromptDataset]
    """Prompts of each validation set by name. See `DataSettings.evaluated`."""
    reward: RewardScorer | None
    """Scores responses. None if samples have saved scores (`rollout.load_from`)."""
    engine: Engine
    requests: RequestTracker
    """Submits requests to the engine, and continues interrupted requests."""
    episodes: EpisodePool | None
    """Runs episodes on the engine. None without an environment."""
    actor: Role
    critic: Role | None
    reference: Role | None
    weights: WeightStream
    mtp_layers: MTPLayers
    """Untrained layers of the policy model. Exports contain their weights."""
    stop: Stop
    generation: Generation | None = None
    """User function for generation, which calls the engine. None without `rollout.generation`."""
    origins: tuple[str, ...] = ()
    """Messages that name the weights of each model that starts with weights from another folder."""

    @property
    def trained(self) -> list[Role]:
        """Trained roles: the actor, and the critic if there is one. Value pretraining trains only the critic."""
        if self.config.pretrains_critic:
            assert self.critic is not None
            return [self.critic]
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    @property
    def vocabulary(self) -> int:
        """Number of token ids with an embedding in every model of the run."""
        models = (self.actor, self.critic, self.reference)
        return min(role.arch.vocab_size for role in models if role is not None)

    @property
    def answerer(self) -> str:
        """Name of the generator of responses in error messages."""
        return f"the engine '{self.config.rollout.engine_name}'"

    @property
    def replayed_routing(self) -> RoutingShape | None:
        """Shape of the routing that the engine returns and the actor replays. None if the actor's routers choose
        experts.

        Raises ConfigError if `algorithm.router_replay` is set and the engine returns no routing.
        """
        if not self.config.algorithm.replays_routing(self.actor.arch.experts):
            return None
        if self.engine.capabilities.routing:
            return RoutingShape.of(self.actor.arch)
        if self.config.algorithm.router_replay:
            raise ConfigError(
                f"algorithm.router_replay is true, but the engine '{self.config.rollout.engine_name}' does not report "
                "which experts computed a token; remove the setting, or add the capability `routing` to the engine"
            )
        return None

    def sampling(
        self, most_tokens: int, *, temperature: float | None = None, trained_on: bool = False
    ) -> SamplingParams:
        """Return sampling parameters for responses of at most `most_tokens` tokens.

        The default temperature is `rollout.temperature`. A temperature of 0 is greedy. `trained_on`: whether the
        actor is trained on the responses.
        """
        routing = self.replayed_routing if trained_on else None
        scale = temperature or self.config.rollout.temperature
        rollout = self.config.rollout
        texts = StopTexts(rollout.stop, self.tokenizer) if rollout.stop else None
        least = rollout.min_response_tokens
        return SamplingParams(scale, most_tokens, self.stop_token_ids, temperature == 0.0, routing, texts, least)

    def answer(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerateRequest], params: SamplingParams
    ) -> list[Completion]:
        """Return one sample per request: a response of the engine, or an episode. A collective of the world.

        `prompts` are the prompts of the requests. Raises the exceptions of `Engine.poll`.
        """
        if self.generation is not None:
            return generated(self.generation, self.engine, prompts, requests, params, self.vocabulary)
        if self.episodes is None:
            return generate(self.engine, requests, params)
        return self.episodes.generate(prompts, requests, params)

    def close(self) -> None:
        """Close worker processes and engines."""
        if self.reward is not None:
            self.reward.close()
        if self.episodes is not None:
            self.episodes.close()
        self.engine.close()


def check_answers(config: Config, train: TrainingPrompts, validation: Iterable[PromptDataset]) -> None:
    """Raise ValueError for prompts with a reference answer that the reward cannot use."""
    for data in (*(train.sources if isinstance(train, MixedPrompts) else (train,)), *validation):
        check_prompts(config.reward, [data[i] for i in range(len(data))], data.source)


def make_scorer(config: Config, runtime: Runtime) -> RewardScorer:
    """Return the reward scorer of a run with its servers. A collective of the world.

    Raises ValueError like `start_reward_servers` and `RewardScorer`.
    """
    return RewardScorer(
        config.reward,
        runtime.device,
        start_reward_servers(config, runtime),
        trust_remote_code=config.model.trust_remote_code,
        template_time=config.data.template_time,
        notices=runtime.notices,
    )


def assemble(config: Config, derived: Derived, runtime: Runtime, mode: RunMode | None = None) -> RunComponents:
    """Create every component. A collective of the world.

    Errors in data and rewards are raised before any model is built.
    """
    mode = mode if mode is not None else RunMode()
    inputs = mode.inputs if mode.inputs is not None else read_inputs(config, training=mode.training)
    tokens, prompts, validation_prompts = inputs.tokens, inputs.training, inputs.validation
    tokenizer, rows, stop_token_ids = tokens.tokenizer, tokens.rows, tokens.stop_token_ids
    cursor, curriculum = training_cursor(prompts, config.data, config.run.seed), None
    if config.data.curriculum is not None:
        ahead = 0 if config.rollout.in_flight else config.rollout.ahead  # in flight, draws follow rewards
        curriculum = Curriculum(config.data.curriculum, cursor, ahead)
    check_data(prompts, validation_prompts)
    check_answers(config, prompts, validation_prompts.values())
    folder = role_folder(config, "actor")
    generation = find_generation(config.rollout)
    reward, stage = None, None
    if config.rollout.load_from is None:
        if inputs.environment is not None:
            stage = make_environment_context(config, inputs.environment, tokenizer, stop_token_ids, rows)
        reward = make_scorer(config, runtime)
    if mode.training:
        check_methods(config)
    alone = mode.training and config.pretrains_critic
    roles = ("actor", "critic") if alone else ROLES if mode.training else ("actor",)
    models = ModelBuilder(config, derived, runtime, roles=roles, resumed=mode.resumed, stop_token_ids=stop_token_ids)
    actor = models.actor(trained=mode.training and not alone)
    reference = models.reference(actor) if "reference" in roles else None
    critic = models.critic() if mode.training else None
    weights = WeightStream(actor, config.rollout.sync_bucket_bytes)
    factory = mode.engine if mode.engine is not None else find_engine(config.rollout)
    engine = make_engine(factory, config, folder, stop_token_ids, runtime, mode.stop)
    requests = RequestTracker(engine, rows.count)
    return RunComponents(
        config=config,
        derived=derived,
        runtime=runtime,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        train_prompts=prompts,
        cursor=cursor,
        curriculum=curriculum,
        validation_prompts=validation_prompts,
        reward=reward,
        actor=actor,
        reference=reference,
        critic=critic,
        weights=weights,
        mtp_layers=models.mtp_layers(),
        engine=engine,
        requests=requests,
        episodes=None if stage is None else EpisodePool(stage, engine, requests, mode.stop),
        generation=generation,
        origins=tuple(models.origins),
        stop=mode.stop,
    )
