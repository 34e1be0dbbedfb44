"""Example results of the benchmarks in the format of `--json`."""

from __future__ import annotations

from typing import Any

STAGES = ("rollout", "forward", "update_critic", "update_actor", "sync")
TRL_ROWS = [
    {"profile": profile, "precision": precision, "ranks": ranks, "median_speed": 1.5, "trl_samples_per_second": 1.0,
     "megappo_samples_per_second": 1.5, "trl_peak_bytes": 8e9, "megappo_peak_bytes": 6e9}
    for profile, precision, ranks in (
        ("full:64", "mixed", 1), ("even:1-64", "mixed", 2), ("tail:32-256", "bfloat16", 1)
    )
]  # fmt: skip
CURVES = [{"seed": seed, "trl": [0.1, 0.2, 0.5], "megappo": [0.1, 0.3, 0.4]} for seed in (1, 2)]
SCALING = [
    {"kind": kind, "axis": "data", "processes": n, "seconds": [1.0, 1.2], "median_seconds": 1.1,
     "tokens_per_second": 100.0 * n}
    for kind in ("weak", "strong") for n in (1, 2, 4)
]  # fmt: skip
UPDATES = [{"role": role, "ratios": [1.0, 1.2, 1.1], "median_ratio": 1.1} for role in ("actor", "critic")]
GENERATION = {
    "sequences": 4, "response_tokens": 8, "generate_seconds": [1.0, 1.1], "engine_seconds": [0.9, 1.0]
}  # fmt: skip
LEARNED: list[dict[str, Any]] = [
    {"task": task, "method": method, "lag": lag, "seed": seed, "rewards": [0.1, 0.3 * seed, 0.45 * seed],
     "explained": [] if method == "grpo" else [0.0, 0.2, 0.1 * seed], "left_out": [0.0, 0.1 * seed], "seconds": 3.0}
    for task in ("sums", "tool") for method in ("clip", "dis", "grpo") for lag in (0, 1) for seed in (1, 2)
]  # fmt: skip
DOCUMENTS: dict[str, dict[str, Any]] = {
    "trl": {"threads": 2, "rows": TRL_ROWS, "curves": CURVES},
    "scaling": {"cores": 2, "rows": SCALING},
    "update": {"size": {"shortest": 1, "longest": 64}, "ranks": 2, "rows": UPDATES},
    "rollout": {"generation": GENERATION, "answers": [{"tokens": 64, "per_second": 2000.0}]},
    "step": {"config": "a.yaml", "ranks": 2, "outside_share": 0.02,
             "stages": [{"stage": name, "median_seconds": 2.0} for name in (*STAGES, "step")]},
    "overhead": {"config": "a.yaml", "rows": [
        {"samples": n, "cpu_seconds_per_sample": 1e-3, "cpu_seconds": [1e-3 * n, 2e-3 * n]} for n in (64, 4096)]},
    "planned": {"rows": [{"words": size, "planned": dict.fromkeys(STAGES, 1.0), "measured": dict.fromkeys(STAGES, 1.1)}
                         for size in ("small", "middle", "large")]},
    "learning": {"runs": LEARNED},
}  # fmt: skip
