"""What the sampler must do, written out for one row in float64 numpy, with a full sort."""

from __future__ import annotations

import numpy as np

from pagedjax.types import SamplingParams


def adjusted_logits(
    logits: np.ndarray,
    sampling: SamplingParams,
    prompt_ids: list[int],
    generated_ids: list[int],
    eos_token_ids: tuple[int, ...] = (),
) -> np.ndarray:
    """f64[V]: penalties, then bias, then the ids that min_tokens holds back."""
    x = np.asarray(logits, np.float64).copy()
    for token in set(prompt_ids) | set(generated_ids):
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in set(generated_ids):
        x[token] -= sampling.frequency_penalty * generated_ids.count(token) + sampling.presence_penalty
    for token, bias in (sampling.logit_bias or {}).items():
        x[token] += bias
    if len(generated_ids) < sampling.min_tokens:
        x[[*eos_token_ids, *sampling.stop_token_ids]] = -np.inf
    return x


def kept_tokens(x: np.ndarray, sampling: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Ids that top-k, top-p and min-p keep, best first. `slack` moves the two real-valued limits by that share."""
    order = np.lexsort((np.arange(x.size), -x))
    scaled = (x[order] - x[order[0]]) / sampling.temperature
    if sampling.top_k > 0:
        order, scaled = order[: sampling.top_k], scaled[: sampling.top_k]
    mass = np.exp(scaled)
    keep = np.ones(order.size, bool)
    if sampling.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        keep &= before < sampling.top_p * mass.sum() * (1 + slack)
    if sampling.min_p > 0:
        keep &= mass >= sampling.min_p * (1 - slack)
    keep[0] = True
    return order[keep]


def acceptable_tokens(x: np.ndarray, sampling: SamplingParams, noise: np.ndarray, slack: float = 1e-4) -> set[int]:
    """The token that Gumbel-max chooses; several only where a limit or the winner is within rounding of another."""
    if sampling.greedy:
        return {int(i) for i in np.flatnonzero(x >= x.max() - 1e-5 * max(1.0, abs(x.max())))}
    out: set[int] = set()
    for moved in (-slack, 0.0, slack):
        kept = kept_tokens(x, sampling, moved)
        perturbed = (x[kept] - x.max()) / sampling.temperature + noise[kept]
        # A float32 logit is rounded by up to 6e-8 of its size before the temperature divides it.
        close = slack + 1e-6 * max(1.0, float(np.abs(x[kept]).max())) / sampling.temperature
        out |= {int(i) for i in kept[perturbed >= perturbed.max() - close]}
    return out


def logprobs(logits: np.ndarray, token: int, num: int) -> tuple[float, int, list[int], list[float]]:
    """(log-probability and rank of the token, ids and log-probabilities of the `num` best) of raw logits."""
    x = np.asarray(logits, np.float64)
    finite = x - x.max()
    log_softmax = finite - np.log(np.exp(finite).sum())
    order = np.lexsort((np.arange(x.size), -x))
    best = order[:num]
    return log_softmax[token], int(np.flatnonzero(order == token)[0]) + 1, best.tolist(), log_softmax[best].tolist()
