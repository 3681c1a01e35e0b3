"""Numbers of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023).

As printed, with all their digits, so that comparisons know how far they are printed. [P] is in the paper; [AE] in the authors'
artifact (vllm-project/sosp2023-ae); [~] is read off a plot by eye.
"""

from __future__ import annotations

SYSTEMS = {
    "orca_max": "Orca (Max)",
    "orca_pow2": "Orca (Pow2)",
    "orca_oracle": "Orca (Oracle)",
    "paged": "vLLM / pages",
    "faster_transformer": "FasterTransformer",
}
MODELS = {"a100-opt-13b": "OPT-13B", "4xa100-opt-66b": "OPT-66B", "8xa100-opt-175b": "OPT-175B"}
DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}

WASTE = {  # figure 2 [P]: percent of the KV memory; vLLM's three other parts have no labels, and are 3.7 together
    "orca_max": {"tokens": "20.4", "reserved": "13.3", "internal": "57.3", "external": "8.9"},
    "orca_pow2": {"tokens": "26.8", "reserved": "17.9", "internal": "13.6", "external": "41.6"},
    "orca_oracle": {"tokens": "38.2", "reserved": "25.2", "external": "36.6"},
    "paged": {"tokens": "96.3"},
}
WASTE_RATE = 4.0  # [AE] requests a second; the paper does not say

BATCHED = {  # figure 13 [P]: average number of requests that run, OPT-13B
    "sharegpt": {"orca_max": "7.00", "orca_pow2": "9.81", "orca_oracle": "13.62", "paged": "30.42"},
    "alpaca": {"orca_max": "7.00", "orca_pow2": "43.24", "orca_oracle": "72.75", "paged": "132.44"},
}
BATCHED_RATE = {"sharegpt": 2.0, "alpaca": 30.0}  # [P]
BATCHED_RATE_ARTIFACT = 1.5  # [AE] for ShareGPT, against the paper's 2

FT_BATCH = {  # [AE] the largest batch of FasterTransformer
    ("a100-opt-13b", "sharegpt"): 5,
    ("a100-opt-13b", "alpaca"): 14,
    ("4xa100-opt-66b", "sharegpt"): 2,
    ("4xa100-opt-66b", "alpaca"): 8,
    ("8xa100-opt-175b", "sharegpt"): 24,
    ("8xa100-opt-175b", "alpaca"): 80,
}

GRIDS: dict[
    tuple[str, str], dict[str, tuple[float, float]]
] = {  # [AE] least and most rate that the artifact tries: they bracket figure 12's knees
    ("a100-opt-13b", "sharegpt"): {
        "paged": (1.0, 2.0),
        "orca_oracle": (0.5, 1.5),
        "orca_pow2": (0.25, 0.9),
        "orca_max": (0.2, 0.75),
        "faster_transformer": (0.01, 0.35),
    },
    ("4xa100-opt-66b", "sharegpt"): {
        "paged": (0.4, 1.0),
        "orca_oracle": (0.2, 0.5),
        "orca_pow2": (0.1, 0.35),
        "orca_max": (0.1, 0.3),
        "faster_transformer": (0.01, 0.2),
    },
    ("8xa100-opt-175b", "sharegpt"): {
        "paged": (1.5, 3.0),
        "orca_oracle": (0.8, 1.8),
        "orca_pow2": (0.5, 1.5),
        "orca_max": (0.25, 1.25),
        "faster_transformer": (0.01, 0.3),
    },
    ("a100-opt-13b", "alpaca"): {
        "paged": (20, 31.5),
        "orca_oracle": (15, 24),
        "orca_pow2": (7.5, 18),
        "orca_max": (2, 5),
        "faster_transformer": (0.1, 3),
    },
    ("4xa100-opt-66b", "alpaca"): {
        "paged": (11, 20),
        "orca_oracle": (6, 12),
        "orca_pow2": (3, 7),
        "orca_max": (0.05, 0.25),
        "faster_transformer": (0.1, 2.5),
    },
    ("8xa100-opt-175b", "alpaca"): {
        "paged": (15, 22),
        "orca_oracle": (15, 22),
        "orca_pow2": (10, 19),
        "orca_max": (1.25, 7),
        "faster_transformer": (0.1, 5),
    },
}

PARALLEL_SAVED = {2: "6.09", 4: "8.53", 6: "9.79"}  # figure 15a [P], percent; [AE]: Alpaca, 20 requests a second
BEAM_SAVED = {2: "37.56", 4: "53.13", 6: "55.16"}  # figure 15b [P]
SAMPLE_RATE = 20.0

PREFIX_GAIN = {
    80: "1.67",
    341: "3.58",
}  # figure 16 [P]: throughput over Orca (Oracle), LLaMA-13B, WMT16 English to German
CHAT_GAIN = "2"  # figure 17 [P]: rate over all three Orca variants
KERNEL_SLOWDOWN = (1.20, 1.26)  # figure 18a [P]: attention alone, against FasterTransformer's
