"""The rules of sampling once more, in double precision and without a thought for speed; no code of the product's.

Worked out from sorted Python lists and integers of any size, from the published description of Philox4x32-10 and from
the order of processing: bias, penalties, masks, temperature, top-k, top-p, min-p.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protos.step import RowSampling

TAG = 0x4C4B5354
MASK = 0xFFFFFFFF
Float64s = NDArray[np.float64]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & MASK, (p >> 32) ^ c[3] ^ k[1], p & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def gumbels(seed: int, index: int, choice: int, vocab_size: int) -> list[float]:
    noise = []
    for group in range(-(-vocab_size // 4)):
        for word in philox((index, group, choice, TAG), (seed & MASK, seed >> 32)):
            noise.append(-math.log(-math.log((word + 0.5) * 2.0**-32)))
    return noise[:vocab_size]


def processed(logits: Float64s, sampling: RowSampling, prompt: Sequence[int], output: Sequence[int]) -> Float64s:
    """Logits after bias, penalties and masks."""
    z = [float(value) for value in logits]
    for token, bias in zip(sampling.bias_ids.tolist(), sampling.bias_values.tolist()):
        z[token] += bias
    for token in {*prompt, *output}:
        repetition = float(np.float32(sampling.repetition_penalty))
        z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
    for token in set(output):
        z[token] -= float(np.float32(sampling.frequency_penalty)) * list(output).count(token)
        z[token] -= float(np.float32(sampling.presence_penalty))
    masked = set(sampling.bad_ids.tolist())
    if len(sampling.allowed_ids):
        masked |= set(range(len(z))) - set(sampling.allowed_ids.tolist())
    if len(output) < sampling.min_tokens:
        masked |= set(sampling.stop_ids.tolist())
    return np.array([-math.inf if token in masked else value for token, value in enumerate(z)])


def softmax(z: Float64s, temperature: float) -> Float64s:
    weights = np.exp((z - z.max()) / temperature)
    return weights / math.fsum(weights)


def distribution(logits: Float64s, sampling: RowSampling, prompt: Sequence[int], output: Sequence[int]) -> Float64s:
    """The probability of each token to be drawn."""
    z = processed(logits, sampling, prompt, output)
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    temperature = float(np.float32(sampling.temperature))
    if temperature <= 1e-5:
        order = order[:1]
    else:
        if 0 < sampling.top_k:
            order = order[: sampling.top_k]
        if sampling.top_p < 1:
            shares = softmax(z[order], temperature)
            for count in range(1, len(order) + 1):
                if math.fsum(shares[:count]) >= float(np.float32(sampling.top_p)) * (1 - 1e-15):
                    order = order[:count]
                    break
        largest = z[order[0]]
        order = [
            token
            for token in order
            if math.exp((z[token] - largest) / temperature) >= float(np.float32(sampling.min_p))
        ]
    result = np.zeros(len(z))
    result[order] = softmax(z[order], temperature) if temperature > 1e-5 else 1.0
    return result


def draw(probabilities: Float64s, seed: int, index: int, choice: int) -> int:
    """Gumbel-max over the distribution."""
    noise = gumbels(seed, index, choice, len(probabilities))
    alive = [token for token, p in enumerate(probabilities) if p > 0]
    return max(alive, key=lambda token: (math.log(probabilities[token]) + noise[token], -token))


def log_softmax(logits: Float64s, temperature: float) -> Float64s:
    scaled = (logits - logits.max()) / temperature
    return scaled - math.log(math.fsum(np.exp(scaled)))
