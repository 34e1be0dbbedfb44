"""Tests of the embedded engine: sampling, log-probabilities, routing, sleep and rejected updates."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megappo.config import ConfigError, load_config
from megappo.config.rollout import RolloutSettings
from megappo.config.sections.engine import EngineCapabilities
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.engines.requests import generate
from megappo.engines.rows import check_answers
from megappo.engines.transformers_engine import TransformersEngine
from megappo.errors import Interrupted, RunError
from megappo.families.declaration import ArchitectureConfig
from megappo.models.model_files import read_architecture
from megappo.models.stop_texts import StopTexts
from megappo.models.tokens import decoded
from megappo.observe.terminal.progress import PROGRESS
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.rollout.answering import find_generation, generated
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout, request_samples, sample_seed
from megappo.runtime.watch.interrupts import Stop
from megappo.types import Prompt, Prompts, RoutingShape
from tests.support.models import VOCAB, stored_parameters, write_model
from tests.support.places import QUICKSTART, TINY

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "model", "llama", 5, initializer_range=0.08)


@pytest.fixture(scope="module")
def model(folder: Path):  # type: ignore[no-untyped-def]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_engine(
    folder: Path, batch: int = 8, stop: Stop | None = None, *, sleeps: bool = False, dtype: torch.dtype = torch.float32
) -> TransformersEngine:
    return TransformersEngine(
        read_architecture(folder),
        dtype=dtype,
        device=torch.device("cpu"),
        generate_batch_sequences=batch,
        sleeps=sleeps,
        stop=stop,
    )


@pytest.fixture(scope="module")
def engine(folder: Path, model, world_of_one: None) -> TransformersEngine:  # type: ignore[no-untyped-def]
    made = make_engine(folder)
    made.update_weights(model.named_parameters(), 3)
    return made


def requests(n: int = 12) -> list[GenerateRequest]:
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, VOCAB, (1 + i % 5,), generator=g).tolist() for i in range(n)]
    return [GenerateRequest(tuple(p), seed=i, prompt_id=i) for i, p in enumerate(prompts)]


def test_special_tokens_are_visible_and_counted() -> None:
    """All samples have the same clean text. A stop token at the end of a response is not counted."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    pad, eos, three = tokenizer.convert_tokens_to_ids(["<pad>", "<eos>", "3"])
    answers = [(three, eos), (pad, three), (pad, pad, three, eos), (three, eos, pad)]
    completions = [Completion(ids, (-1.0,) * len(ids), ids[-1] != eos, 0) for ids in answers]
    prompts = Prompts(tuple(Prompt(i, (three,), "3", None, {}) for i in range(len(answers))), 0)
    sample_requests = request_samples(prompts, samples_per_prompt=1, seed_of=lambda sample_id: sample_id)
    rollouts = finish_rollout(sample_requests, completions, tokenizer)
    assert rollouts.responses == ("3",) * 4
    assert rollouts.raw_responses == ("3<eos>", "<pad>3", "<pad><pad>3<eos>", "3<eos><pad>")
    assert rollouts.special_tokens_B.tolist() == [0, 1, 2, 2]


def test_generation_reports_samples_and_tokens(folder: Path, model) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(folder, batch=2)
    engine.update_weights(model.named_parameters(), 1)
    seen: list[str] = []
    engine.on_tokens = lambda: seen.append(PROGRESS.text())
    PROGRESS.enter("rollout")
    generate(engine, requests(3), SamplingParams(temperature=1.0, max_new_tokens=1, stop_token_ids=()))
    seen.append(PROGRESS.text())
    PROGRESS.leave()
    assert [text.split(": ")[1].split(" samples")[0] for text in seen] == ["0 of 3", "2 of 3", "3 of 3"]
    assert "tokens/s" in seen[2]


PARAMS = SamplingParams(temperature=0.7, max_new_tokens=9, stop_token_ids=(1, 17))


def test_logprobs_equal_a_plain_forward_pass(engine: TransformersEngine, model) -> None:  # type: ignore[no-untyped-def]
    for request, done in zip(requests(), generate(engine, requests(), PARAMS), strict=True):
        tokens = torch.tensor([request.token_ids + done.token_ids])
        logp = (model(tokens).logits[0] / PARAMS.temperature).log_softmax(-1)[len(request.token_ids) - 1 : -1]
        truth = logp.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), truth, rtol=0, atol=1e-5)
        assert done.weight_version == 3


@pytest.mark.parametrize("greedy", [False, True])
def test_nan_logprobs_name_engine_and_sample(folder: Path, model, greedy: bool) -> None:  # type: ignore[no-untyped-def]
    """The model has a NaN row for one token of one prompt."""
    engine = make_engine(folder)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    prompts_of_batch = [GenerateRequest(ids, seed=i, prompt_id=i) for i, ids in enumerate([(3, 4), (3, 5), (6, 4)])]
    weights["model.embed_tokens.weight"][5] = float("nan")
    engine.update_weights(weights.items(), 1)
    params = replace(PARAMS, greedy=greedy, stop_token_ids=tuple(range(VOCAB)))
    answers = generate(engine, prompts_of_batch, params)
    sample_requests = SampleRequests(
        tuple(Prompt(i, (3,), "3", None, {}) for i in range(3)), (40, 41, 42), 1, tuple(prompts_of_batch)
    )
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    sentence = (
        r"^the engine 'transformers' answered sample 41 with the log-probability nan of token \d+ at position 1 of"
    )
    with pytest.raises(RunError, match=sentence):
        finish_rollout(sample_requests, answers, tokenizer, VOCAB, "the engine 'transformers'")


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ((-1.0, float("inf")), "the log-probability inf of token 4 at position 2"),
        ((float("-inf"), -1.0), "the log-probability -inf of token 3 at position 1"),
        ((-1.0, None), "the log-probability None of token 4"),
        ((-1.0,), "2 tokens and 1 log-probabilities; return one log-probability for each token"),
    ],
)
def test_invalid_logprobs_are_rejected(logprobs: Any, message: str) -> None:
    answers = [Completion((3, 4), (-1.0, -2.0), True, 0), Completion((3, 4), logprobs, True, 0)]
    with pytest.raises(RunError, match=f"the engine answered sample 8 with {message}"):
        check_answers(answers, None, samples=(7, 8))
    with pytest.raises(RunError, match=f"the engine answered a request with {message}"):
        check_answers(answers, None)


def test_tokens_outside_the_vocabulary_are_named(engine: TransformersEngine) -> None:
    """Any prompt of a batch may have the invalid token."""
    for strange in (VOCAB, -1, 10**6):
        batch = [*requests(2), GenerateRequest((3, strange, 4), seed=9, prompt_id=9)]
        with pytest.raises(RunError, match=f"has a prompt with token {strange}, for which the model has no row"):
            generate(engine, batch, PARAMS)


def two_letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with two letters per token."""
    vocabulary = {chr(97 + i // 16) + chr(97 + i % 16): i for i in range(VOCAB)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="aa"))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_stop_text_ends_answer_at_first_occurrence(engine: TransformersEngine) -> None:
    """The two letters of the stop text belong to one token or two tokens. Earlier tokens do not change."""
    letters, free = two_letters(), replace(PARAMS, stop_token_ids=(), max_new_tokens=30)
    whole = generate(engine, requests(), free)
    texts = [decoded(letters, answer.token_ids) for answer in whole]
    across = texts[0][3:5]
    answers = generate(engine, requests(), replace(free, stop_texts=StopTexts((across, "no such text"), letters)))
    places = [text.find(across) for text in texts]
    lengths = [30 if place < 0 else (place + 1) // 2 + 1 for place in places]
    assert [len(answer.token_ids) for answer in answers] == lengths
    assert lengths[0] <= 3 and 30 in lengths
    assert any(place % 2 for place in places)
    for answer, truth in zip(answers, whole, strict=True):
        length = len(answer.token_ids)
        assert (answer.token_ids, answer.truncated) == (truth.token_ids[:length], length == 30)
        assert answer.logprobs == pytest.approx(truth.logprobs[:length], abs=1e-5)
    generated_tokens: list[None] = []
    engine.on_tokens = lambda: generated_tokens.append(None)
    generate(engine, requests()[:1], replace(free, stop_texts=StopTexts((across,), letters)))
    engine.on_tokens = lambda: None
    assert len(generated_tokens) == lengths[0]  # no further tokens were generated


def test_answers_have_a_minimum_length(engine: TransformersEngine, model) -> None:  # type: ignore[no-untyped-def]
    """Stop tokens are excluded from the distribution of the first tokens. The log-probabilities use the same
    distribution."""
    ends = tuple(range(0, VOCAB, 2))
    params, batch = replace(PARAMS, stop_token_ids=ends, min_new_tokens=3), requests()
    batch[1] = replace(batch[1], min_new_tokens=1)
    answers = generate(engine, batch, params)
    assert len({len(answer.token_ids) for answer in answers}) > 2
    for number, (request, done) in enumerate(zip(batch, answers, strict=True)):
        least = 1 if number == 1 else 3
        assert all(token % 2 for token in done.token_ids[:least])
        logits = model(torch.tensor([request.token_ids + done.token_ids])).logits[0, len(request.token_ids) - 1 : -1]
        logits[:least, ::2] = -torch.inf
        logp = (logits / PARAMS.temperature).log_softmax(-1)
        truth = logp.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), truth, rtol=0, atol=1e-5)


def test_generation_ends_with_the_longest_answer(engine: TransformersEngine) -> None:
    """A batch takes one step per token of its longest answer."""
    batch, steps = requests(8), list[None]()
    engine.on_tokens = lambda: steps.append(None)
    try:
        answers = generate(engine, batch, replace(PARAMS, stop_token_ids=tuple(range(2, VOCAB)), max_new_tokens=100))
    finally:
        engine.on_tokens = lambda: None
    assert len(steps) == max(len(answer.token_ids) for answer in answers) < 100


def test_total_tokens_of_prompt_and_answer_are_limited(engine: TransformersEngine) -> None:
    prompts = Prompts(tuple(Prompt(i, (3,) * (i + 1), "", None, {}) for i in range(8)), 0)
    sample_requests = request_samples(prompts, samples_per_prompt=1, seed_of=lambda i: i, max_total_tokens=10)
    answers = generate(engine, sample_requests.requests, replace(PARAMS, stop_token_ids=(), max_new_tokens=6))
    assert [len(answer.token_ids) for answer in answers] == [6, 6, 6, 6, 5, 4, 3, 2]
    assert all(answer.truncated for answer in answers)


def custom_generation(path: str, **options: Any) -> RolloutSettings:
    settings = {"prompts_per_step": 1, "max_response_tokens": 9, "generation": path, "generation_options": options}
    return RolloutSettings.model_validate(settings)


def test_custom_generation_function_matches_engine(engine: TransformersEngine) -> None:
    """The example generates greedily in segments. Tokens and log-probabilities equal those of one pass."""
    batch, greedy = requests(), replace(PARAMS, greedy=True)
    ends = generate(engine, batch, greedy)[0].token_ids[1]  # some answers end at once, others never
    greedy = replace(greedy, stop_token_ids=(ends,))
    function = find_generation(custom_generation("configs/examples/13_segments/segments.py:segments", tokens=4))
    assert function is not None
    answers, whole = generated(function, engine, (), batch, greedy), generate(engine, batch, greedy)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in whole]
    assert [answer.truncated for answer in answers] == [answer.truncated for answer in whole]
    assert any(len(answer.token_ids) == 9 for answer in answers) and any(len(a.token_ids) < 5 for a in answers)
    for mine, truth in zip(answers, whole, strict=True):
        assert mine.logprobs == pytest.approx(truth.logprobs, abs=1e-5)
    assert generated(function, engine, (), [], greedy) == []
    assert generated(function, engine, (), batch, PARAMS) == generated(function, engine, (), batch, PARAMS)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "returned a NoneType, must be a list of 1 completions"),
        ([], "returned 0 of them, must be a list of 1"),
        ([Completion((), (), True, 0)], "at least one token and a log-probability"),
        ([Completion((1, 2), (0.0,), True, 0)], "a log-probability for each token"),
        ([Completion((1,) * 10, (0.0,) * 10, True, 0)], "returned 10 tokens, above the limit of 9"),
    ],
)
def test_invalid_custom_responses_are_rejected(engine: TransformersEngine, returned: Any, sentence: str) -> None:
    with pytest.raises(RunError, match=sentence):
        generated(lambda **_: returned, engine, (), requests(1), PARAMS)


def test_unknown_generation_functions_are_rejected() -> None:
    assert find_generation(RolloutSettings(prompts_per_step=1, max_response_tokens=9)) is None
    with pytest.raises(ValueError, match="did you mean 'configs/examples/13_segments/segments.py:segments'"):
        find_generation(custom_generation("configs/examples/13_segments/segments.py:segment"))
    with pytest.raises(ValueError, match="unexpected keyword argument 'token'; change its parameters"):
        find_generation(custom_generation("configs/examples/13_segments/segments.py:segments", token=4))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_engine_returns_routed_experts_of_tokens(tmp_path: Path, family: str) -> None:
    """The experts equal the choice of transformers' routers for the whole sequence, independent of the batch."""
    folder = write_model(tmp_path / "model", family, 5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine, shape = make_engine(folder, batch=5), RoutingShape.of(read_architecture(folder))
    assert engine.capabilities.routing and shape is not None and shape.dtype == torch.uint8
    with torch.no_grad():
        engine.update_weights(stored_parameters(model), 1)
    routed, plain = (generate(engine, requests(), p) for p in (replace(PARAMS, routing=shape), PARAMS))
    assert routed == plain and all(answer.routing is None for answer in plain)
    for request, answer in zip(requests(), routed, strict=True):
        tokens = torch.tensor([request.token_ids + answer.token_ids])
        scores = model(tokens, output_router_logits=True).router_logits
        chosen = torch.stack([of_layer.topk(2).indices[:-1] for of_layer in scores], dim=1)
        assert answer.routing is not None and answer.routing.dtype == torch.uint8
        assert torch.equal(answer.routing.long().sort(-1).values, chosen.sort(-1).values)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "qwen3_next"])
def test_experts_of_any_width_are_computed_in_bfloat16(tmp_path: Path, family: str) -> None:
    """Rows of 20 numbers are 40 bytes, which torch's grouped product does not take. The log-probabilities match
    transformers, which computes the experts one by one."""
    width = "intermediate_size" if family in ("gpt_oss", "mixtral") else "moe_intermediate_size"
    folder = write_model(tmp_path / "model", family, 5, **{width: 20})
    settings: Any = {"dtype": torch.bfloat16, "experts_implementation": "eager", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    engine = make_engine(folder, batch=1, dtype=torch.bfloat16)
    with torch.no_grad():
        engine.update_weights(stored_parameters(model), 1)
    (answer,) = generate(engine, requests()[:1], PARAMS)
    tokens = torch.tensor([requests()[0].token_ids + answer.token_ids])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(requests()[0].token_ids) - 1 : -1].float() / PARAMS.temperature
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=0.05)


def test_router_replay_requires_routing_from_engine(tmp_path: Path) -> None:
    """By default, the routers choose again if the engine returns no routing. A dense model needs no routing."""
    experts, dense = (read_architecture(write_model(tmp_path / name, name, 5)) for name in ("qwen3_moe", "llama"))

    def replayed_routing(arch: ArchitectureConfig, engine: object, *overrides: str) -> RoutingShape | None:
        config = load_config(QUICKSTART, list(overrides))
        parts: Any = SimpleNamespace(config=config, actor=SimpleNamespace(arch=arch), engine=engine)
        getter: Any = RunComponents.replayed_routing
        routing: RoutingShape | None = getter.fget(parts)
        return routing

    returning, silent = (SimpleNamespace(capabilities=EngineCapabilities(routing=routing)) for routing in (True, False))
    assert replayed_routing(experts, returning) == RoutingShape(4, 2, 8)
    assert replayed_routing(experts, returning, "algorithm.router_replay=false") is None
    assert replayed_routing(experts, silent) is None
    assert replayed_routing(dense, returning) is None
    with pytest.raises(ConfigError, match="algorithm.router_replay is true, but the engine .* does not report"):
        replayed_routing(experts, silent, "algorithm.router_replay=true")


def test_engine_generates_again_after_sleep(folder: Path, engine: TransformersEngine, model) -> None:  # type: ignore[no-untyped-def]
    """A sleeping engine first needs new weights. An engine without sleep support is not affected."""
    sleeper = make_engine(folder, sleeps=True)
    assert not sleeper.capabilities.separate_processes
    for _ in range(2):
        sleeper.update_weights(model.named_parameters(), 3)
        assert generate(sleeper, requests(), PARAMS) == generate(engine, requests(), PARAMS)
        sleeper.sleep()
        with pytest.raises(RuntimeError, match="no complete set of weights"):
            generate(sleeper, requests(), PARAMS)
    engine.sleep()
    assert generate(engine, requests(1), PARAMS)


def test_responses_end_at_the_first_stop_token(engine: TransformersEngine) -> None:
    done = generate(engine, requests(40), PARAMS)
    ended = [d for d in done if not d.truncated]
    assert ended
    assert all(d.token_ids[-1] in PARAMS.stop_token_ids for d in ended)
    assert all(len(d.token_ids) == PARAMS.max_new_tokens for d in done if d.truncated)
    assert all(t not in PARAMS.stop_token_ids for d in done for t in d.token_ids[:-1])


def test_response_depends_only_on_its_seed(folder: Path, model) -> None:  # type: ignore[no-untyped-def]
    together, alone = make_engine(folder, 64), make_engine(folder, 1)
    for e in (together, alone):
        e.update_weights(model.named_parameters(), 1)
    first = generate(together, requests(), PARAMS)
    assert [d.token_ids for d in generate(alone, requests(), PARAMS)] == [d.token_ids for d in first]
    backwards = generate(together, requests()[::-1], PARAMS)[::-1]
    assert [d.token_ids for d in backwards] == [d.token_ids for d in first]
    other = generate(together, [GenerateRequest(r.token_ids, r.seed + 99, r.prompt_id) for r in requests()], PARAMS)
    assert [d.token_ids for d in other] != [d.token_ids for d in first]


class StopAfter:
    """Requests a stop after the given number of checks."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0

    def check(self) -> None:
        if self.left < 0:
            raise Interrupted(signal.SIGUSR1)


@pytest.mark.parametrize("looks", [0, 9, 10, 19])
def test_stop_interrupts_generation_between_tokens(folder: Path, model, looks: int) -> None:  # type: ignore[no-untyped-def]
    """Completed batches are returned. A partial batch is dropped."""
    reference_engine = make_engine(folder, 1)
    stopped = make_engine(folder, 1, StopAfter(looks))
    for engine in (reference_engine, stopped):
        engine.update_weights(model.named_parameters(), 1)
    answers = generate(reference_engine, requests(), PARAMS)
    futures = stopped.submit(requests(), PARAMS)
    with pytest.raises(Interrupted):
        stopped.poll(0.0)
    done = {i: future.result() for i, future in enumerate(futures) if future.done()}
    order = sorted(range(len(answers)), key=lambda i: len(requests()[i].token_ids))
    lengths = [len(answers[i].token_ids) for i in order]
    whole = max(n for n in range(len(order)) if sum(lengths[:n]) <= looks)
    assert [i for i in order if i in done] == order[:whole]
    assert all(done[i] == answers[i] for i in done)
    stopped.pause("abort")  # returns the other requests without tokens
    rest = [future.result() for i, future in enumerate(futures) if i not in done]
    assert len(rest) == len(answers) - whole and all(answer == rest[0] for answer in rest)
    assert rest[0] == Completion((), (), False, 1, broken_off=True)


def test_tokens_are_sampled_with_their_probability(folder: Path, model) -> None:  # type: ignore[no-untyped-def]
    n, prompt = 4000, (5, 6, 7)
    params = SamplingParams(temperature=1.3, max_new_tokens=1, stop_token_ids=())
    big = make_engine(folder, batch=2000)
    big.update_weights(model.named_parameters(), 1)
    done = generate(big, [GenerateRequest(prompt, seed, prompt_id=0) for seed in range(n)], params)
    counts = torch.bincount(torch.tensor([d.token_ids[0] for d in done]), minlength=VOCAB).double()
    p = (model(torch.tensor([prompt])).logits[0, -1] / 1.3).softmax(-1).double()
    chi2 = float(((counts - n * p) ** 2 / (n * p)).sum())
    # 130 degrees of freedom: mean 130, standard deviation 16.
    assert 130 - 5 * 16 < chi2 < 130 + 5 * 16


def test_greedy_sampling_selects_the_most_likely_token(engine: TransformersEngine, model) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(temperature=0.7, max_new_tokens=4, stop_token_ids=(), greedy=True)
    for request, done in zip(requests(), generate(engine, requests(), params), strict=True):
        tokens = torch.tensor([request.token_ids + done.token_ids])
        assert tuple(model(tokens).logits[0, len(request.token_ids) - 1 : -1].argmax(-1).tolist()) == done.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named[1:], "'model.embed_tokens.weight' did not arrive"),
        (lambda named: [*named, ("model.layers.9.x", torch.zeros(1))], "'model.layers.9.x' is unknown"),
        (lambda named: [named[0], *named], "'model.embed_tokens.weight' arrived twice"),
        (lambda named: [(named[0][0], torch.zeros(2, 2)), *named[1:]], r"has shape \(2, 2\), not \(131, 32\)"),
    ],
)
def test_invalid_weight_updates_name_the_tensor(folder: Path, model, change, message: str) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(folder)
    engine.update_weights(model.named_parameters(), 1)
    with pytest.raises(ValueError, match=message):
        engine.update_weights(change(list(model.named_parameters())), 2)
    assert engine.version == 1
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        generate(engine, requests(1), PARAMS)
    engine.update_weights(model.named_parameters(), 2)
    assert generate(engine, requests(1), PARAMS)[0].weight_version == 2


def test_seeds_are_distinct_and_stable() -> None:
    seeds = {sample_seed(s, t, i) for s in range(3) for t in range(5) for i in range(50)}
    assert len(seeds) == 750
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3) < 2**63
