"""Random families, configurations, layouts and options match transformers or are rejected.

A case is drawn from its seed: `python -m tests.families.test_random_models SEED` prints and runs one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megappo.config import ConfigError, check_run, load_config
from tests.support.harness import run_worker
from tests.support.models import stored_parameters, write_model
from tests.support.places import BASE
from tests.support.quick import cases
from tests.support.random_models import RandomModel, random_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]

CASES = 10
"""Cases of a test, which share two processes."""
BATCHES = 50
SEEDS = 3 * CASES
"""Seeds of a test, enough for `CASES` supported models."""
RATE, EPS = 0.01, 0.01
LOGPROB_TOLERANCE = 2e-5
"""In nats, against float64."""
UPDATE_TOLERANCE = 1e-4
"""Error of the updated weights, as a share of the path of the update, against float64."""
LENGTHS = [(3, 9), (1, 12), (5, 4), (2, 15), (8, 8), (4, 1)]
"""(prompt, response) of each sample, in tokens."""
PLAIN = (
    "critic=null", "reference=null", "algorithm={estimator: grpo}", "evaluation=null", "data.validation=null",
    "data.max_prompt_tokens=16", "rollout.max_response_tokens=16", "actor.microbatch_budget_tokens=48",
    "actor.optimizer.schedule=constant", "actor.optimizer.warmup_updates=0", f"actor.optimizer.learning_rate={RATE}",
    f"actor.optimizer.eps={EPS}",
)  # fmt: skip


def overrides_of(model: RandomModel, folder: Path) -> list[str]:
    return [*PLAIN, *model.settings, f"model.path={folder}", "model.init=pretrained", f"run.directory={folder}-run"]


def refusal(model: RandomModel, folder: Path) -> list[str]:
    """Return the reasons to reject the model or the layout. The list is empty for a supported model."""
    try:
        check_run(load_config(BASE, overrides_of(model, folder)), 2)
    except ConfigError as error:
        return list(error.problems)
    return []


def tokens_of(model: RandomModel, vocabulary: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(model.seed)
    # transformers has no gradient for the embedding of the padding token, 0.
    return [torch.randint(1, vocabulary, (p + r,), generator=g).tolist() for p, r in LENGTHS]


def expected(model: RandomModel, folder: Path, tokens: list[list[int]]) -> tuple[list[Tensor], dict[str, Any]]:
    """Return log-probabilities, and the value of each tensor before and after one AdamW update on their sum. The
    values are computed with transformers and torch in float64."""
    exact: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager", "attn_implementation": "eager"}
    lm: Any = AutoModelForCausalLM.from_pretrained(folder, **exact)
    lm.train()
    options = dict(text.split("=") for text in model.settings)
    temperature, decay = float(options["rollout.temperature"]), float(options["actor.optimizer.weight_decay"])
    before = {name: tensor.detach().clone() for name, tensor in stored_parameters(lm)}
    logprobs = []
    for ids, (_, response) in zip(tokens, LENGTHS, strict=True):
        row = torch.tensor(ids)
        logits = lm(row[None]).logits[0, -response - 1 : -1].double() / temperature
        logprobs.append(logits.log_softmax(-1).gather(1, row[-response:, None])[:, 0])
    (-torch.cat(logprobs).sum()).backward()
    named = [(name, p) for name, p in lm.named_parameters() if p.requires_grad]
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    clip = float(options["actor.optimizer.clip_grad_norm"])
    if clip:
        torch.nn.utils.clip_grad_norm_([p for _, p in named], clip)
    spared = [p for name, p in named if p.dim() <= 1 or name.endswith("bias")]
    others = [p for name, p in named if p.dim() > 1 and not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": decay}, {"params": spared, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=EPS).step()
    after = {name: tensor.detach() for name, tensor in stored_parameters(lm)}
    return [row.detach() for row in logprobs], {name: (before[name], after[name]) for name in after}


def compare(model: RandomModel, rows: list[list[float]], out: Path, truth: tuple[list[Tensor], dict[str, Any]]) -> str:
    """Return the largest errors of a case as text. The text starts with "wrong" if an error is too large."""
    logprobs, weights = truth
    gap = max(float((torch.tensor(row).double() - t).abs().max()) for row, t in zip(rows, logprobs, strict=True))
    mine = load_file(out)
    if mine.keys() != weights.keys():
        return f"wrong: {model}: {mine.keys() ^ weights.keys()}"
    errors = {name: float((mine[name].double() - after).norm()) for name, (_, after) in weights.items()}
    paths = {name: float((after - before).norm()) for name, (before, after) in weights.items()}
    path = sum(p**2 for p in paths.values()) ** 0.5
    # A tensor without a gradient, such as the router of one expert, changes only by rounding.
    shares = {name: errors[name] / (paths[name] + 1e-3 * path) for name in errors}
    worst, whole = max(shares, key=lambda name: shares[name]), sum(e**2 for e in errors.values()) ** 0.5 / path
    text = f"{model}: gap {gap:.2g} nats, update {whole:.2g}, {worst} {errors[worst]:.2g} of {paths[worst]:.2g}"
    is_right = whole < UPDATE_TOLERANCE and shares[worst] < 10 * UPDATE_TOLERANCE
    return text if is_right and gap < LOGPROB_TOLERANCE else f"wrong: {text}"


def check(seeds: Iterable[int], root: Path, most: int = CASES) -> tuple[list[str], list[str]]:
    """Run the first supported cases of some seeds. Return the results of compared models and the problems of rejected
    models."""
    models, refused = list[tuple[RandomModel, Path, list[list[int]]]](), list[str]()
    for seed in seeds:
        if len(models) == most:
            break
        model, folder = random_model(seed), root / str(seed)
        print(model, flush=True)
        try:
            write_model(folder, model.family, seed, **model.fields)
        except Exception as error:  # noqa: BLE001 - transformers refuses impossible sizes in many ways
            print(f"  transformers has no such model: {str(error).splitlines()[0]}")
            continue
        if problems := refusal(model, folder):
            print(f"  refused: {'; '.join(problems)}")
            refused += problems
        else:
            models.append((model, folder, tokens_of(model, model.fields["vocab_size"])))
    requests = [
        {
            "config": str(BASE), "overrides": overrides_of(model, folder), "tokens": tokens,
            "responses": [response for _, response in LENGTHS], "out": f"{folder}.safetensors",
        }
        for model, folder, tokens in models
    ]  # fmt: skip
    results = run_worker("random_models_worker.py", 2, {"cases": requests}) if requests else []
    compared = [
        compare(model, rows, Path(f"{folder}.safetensors"), expected(model, folder, tokens))
        for (model, folder, tokens), rows in zip(models, results, strict=True)
    ]
    print(*compared, sep="\n")
    return compared, refused


@pytest.mark.parametrize("batch", cases(range(BATCHES), quick=[0], exhaustive=range(2, BATCHES)))
def test_random_models_match_transformers(tmp_path: Path, batch: int) -> None:
    compared, refused = check(range(SEEDS * batch, SEEDS * (batch + 1)), tmp_path)
    assert len(compared) == CASES and not [text for text in compared if text.startswith("wrong")]
    for problem in refused:
        assert problem[0] not in " ;" and any(mark in problem for mark in (";", "must", "use ", "nearest")), problem


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        check([int(seed) for seed in sys.argv[1:]], Path(folder))


if __name__ == "__main__":
    main()
