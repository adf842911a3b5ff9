"""When each request of a load test is due: computed before the run, so that a slow server cannot thin out its own load.

Open loop: inter-arrival times are gamma distributed with mean 1/rate; burstiness 1 is Poisson, below it bursts, above
it regular (the definition of `vllm bench serve`). The schedule is scaled so that the last request is due at n/rate.
Closed loop has no schedule: a request is due when one of the `concurrency` places is free.
"""

import math
from collections.abc import Sequence

import numpy as np


def due_times(num: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start, ascending; rate inf: all at once."""
    if math.isinf(rate):
        return [0.0] * num
    random = np.random.default_rng(seed)
    gaps = random.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=num)
    times = np.cumsum(gaps)
    times *= (num / rate) / times[-1]
    return [float(value) for value in times]


def rescaled(arrivals: Sequence[float], rate: float | None) -> list[float]:
    """A workload's own arrivals, stretched so that their mean rate is `rate`; None keeps them."""
    last = max(arrivals)
    factor = 1.0 if rate is None or last <= 0 else (len(arrivals) / rate) / last
    return [value * factor for value in arrivals]
