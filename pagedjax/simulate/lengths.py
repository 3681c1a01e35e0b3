"""Prompt and output lengths like those of the paper's two data sets.

The paper prints means only (Kwon et al. 2023, figure 11). The distributions here are ours: prompt and output independent
and log-normal, redrawn where they add up to max_total or more (the authors' artifact drops such pairs), with the medians
chosen so that the means *after* that are the printed ones.

The spread of the ShareGPT outputs is taken from figure 2. While a request with prompt p runs to output o, it holds p + o/2
tokens on average and o/2 slots are still to be filled; weighted by the time it runs (o), the ratio of token states to
reservation is 1 + 2 E[p] E[o] / E[o^2] if p and o are independent. The figure's 20.4 / 13.3 and 38.2 / 25.2 give 1.52 and
so a standard deviation of 0.9 E[o]: sigma = 0.9 before redrawing. The spreads of the prompts and of Alpaca are guesses.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

_FIT_DRAWS = 100_000


@dataclasses.dataclass(frozen=True)
class LengthModel:
    """Two log-normal lengths. Means are of what is left after pairs of max_total or more were redrawn."""

    mean_prompt: float  # tokens
    mean_output: float
    sigma_prompt: float  # of the logarithm, before redrawing
    sigma_output: float
    max_total: int = 2048

    def sample(self, num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(prompt i32[num], output i32[num]), each at least 1."""
        mu = _fit(self)
        prompt, output = np.empty(0, np.int32), np.empty(0, np.int32)
        while prompt.size < num:
            p, o = self._draw(mu, rng.standard_normal((2, 2 * num + 16)))
            kept = p + o < self.max_total
            prompt, output = np.append(prompt, p[kept]), np.append(output, o[kept])
        return prompt[:num], output[:num]

    def _draw(self, mu: tuple[float, float], normal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        spread = (self.sigma_prompt, self.sigma_output)
        draws = (np.exp(m + s * z) for m, s, z in zip(mu, spread, normal, strict=True))
        # Clipped above, as the exponential of a far tail does not fit 32 bits.
        prompt, output = (np.clip(np.rint(x), 1, self.max_total).astype(np.int32) for x in draws)
        return prompt, output


@functools.lru_cache(maxsize=16)
def _fit(model: LengthModel) -> tuple[float, float]:
    """The medians' logarithms that give the means, found on one fixed set of draws."""
    normal = np.random.default_rng(0).standard_normal((2, _FIT_DRAWS))
    mean = (model.mean_prompt, model.mean_output)
    spread = (model.sigma_prompt, model.sigma_output)
    mu = [float(np.log(m) - s * s / 2) for m, s in zip(mean, spread, strict=True)]
    for _ in range(40):
        p, o = model._draw((mu[0], mu[1]), normal)
        kept = p + o < model.max_total
        mu = [m + float(np.log(want / x[kept].mean())) for m, want, x in zip(mu, mean, (p, o), strict=True)]
    return mu[0], mu[1]


SHAREGPT = LengthModel(161.31, 337.99, sigma_prompt=1.2, sigma_output=0.9)
ALPACA = LengthModel(19.31, 58.45, sigma_prompt=0.5, sigma_output=0.9)
LENGTHS = {"sharegpt": SHAREGPT, "alpaca": ALPACA}
