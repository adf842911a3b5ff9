"""Which twin runs: the compiled loops where numba is installed, else the plain ones. It decides speed, not bits."""

import numpy as np

from worker_svc.sampling.philox import round_keys
from worker_svc.sampling.plain import BLOCK

try:
    from worker_svc.sampling.compiled import complements, exp_blocks, race, race_ids
except ImportError:  # not installed, or not for this numpy
    from worker_svc.sampling.philox import complements
    from worker_svc.sampling.plain import exp_blocks, race, race_ids

__all__ = ["BLOCK", "complements", "exp_blocks", "race", "race_ids", "warm_up"]


def warm_up() -> None:
    """Load the compiled loops, or compile them where no cache holds them yet (about two seconds, once a machine)."""
    x, one, room = np.zeros(8, np.float32), np.ones(1, np.float32), np.empty(BLOCK, np.int32)
    e, sums, keys = np.empty((1, BLOCK), np.float32), np.empty(1, np.float32), round_keys(0)
    for writeable in (True, False):  # logits that came over a wire are not, which is another type to the compiler
        x.flags.writeable = writeable
        exp_blocks(x, np.zeros(1, np.float32), 1.0, e, sums)
    race(keys, 0, 0, e, one, room)
    complements(keys, 0, 0, room[:1])
    race_ids(keys, 0, 0, np.zeros(1, np.int32), one, room)
