"""One row's side of sampling: its parameters as the sampler uses them, and what has been said so far.

Knows penalties, bias and masks; does not know probabilities. The history is kept as columns of distinct ids and their
counts, so that a new token costs O(1) and a step O(distinct ids), never O(V) in Python.

Parameters are rounded to single precision here, as they would be on the wire, so that a row means the same in one
process and over gRPC.
"""

import numpy as np
from numpy.typing import NDArray

from protos.step import Float32s, Floats, Int32s, Row
from worker_svc.sampling.philox import round_keys

GREEDY_BELOW = 1e-5  # temperatures up to this are greedy


def _single(value: float) -> float:
    return float(np.float32(value))


class SamplerRow:
    """Args:
    row: the introduction. Its tokens past the prompt are output: they count for penalties, min_tokens and the index.
    """

    def __init__(self, row: Row) -> None:
        sampling = row.sampling
        self.slot = row.slot
        self.sampling = sampling
        self.choice = row.choice
        self.keys = round_keys(row.seed)
        self.temperature = _single(sampling.temperature)
        self.greedy = self.temperature <= _single(GREEDY_BELOW)
        self.top_k = sampling.top_k
        self.top_p = _single(sampling.top_p)
        self.min_p = _single(sampling.min_p)
        # Reported probabilities: of logits / report_temperature.
        self.report_temperature = 1.0 if sampling.raw_logprobs or self.greedy else self.temperature
        self.num_output = len(row.token_ids) - row.num_prompt
        self._repetition = np.float32(sampling.repetition_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._penalised = bool(self._repetition != 1 or self._presence or self._frequency)
        self._places: dict[int, int] = {}
        self._ids: Int32s = np.empty(64, np.int32)  # the first len(_places) are distinct ids seen
        self._counts: Float32s = np.zeros(64, np.float32)  # how often in the output
        if self._penalised:
            if self._repetition != 1:
                for token in np.unique(row.token_ids[: row.num_prompt]).tolist():
                    self._see(token, 0)
            for token in row.token_ids[row.num_prompt :].tolist():
                self._see(token, 1)

    def append(self, token_id: int) -> None:
        """One more output token is known."""
        self.num_output += 1
        if self._penalised:
            self._see(token_id, 1)

    def _see(self, token_id: int, times: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += times

    @property
    def plain(self) -> bool:
        """Nothing stands between the model's logits and the temperature."""
        sampling = self.sampling
        return not (
            self._penalised
            or len(sampling.bias_ids)
            or len(sampling.allowed_ids)
            or len(sampling.bad_ids)
            or self._stops_masked
        )

    @property
    def _stops_masked(self) -> bool:
        return self.num_output < self.sampling.min_tokens and len(self.sampling.stop_ids) > 0

    def process(self, logits_V: Floats) -> Floats:
        """Bias, penalties and masks, in this order, in the dtype of the logits; the argument is left as it is."""
        sampling = self.sampling
        z = logits_V.copy()
        if len(sampling.bias_ids):
            z[sampling.bias_ids] += sampling.bias_values.astype(z.dtype)
        if self._penalised:
            self._penalise(z)
        if len(sampling.allowed_ids):
            allowed = z[sampling.allowed_ids]
            z.fill(-np.inf)
            z[sampling.allowed_ids] = allowed
        if len(sampling.bad_ids):
            z[sampling.bad_ids] = -np.inf
        if self._stops_masked:
            z[sampling.stop_ids] = -np.inf
        return z

    def _penalise(self, z: Floats) -> None:
        seen = len(self._places)
        ids, counts = self._ids[:seen], self._counts[:seen].astype(z.dtype)
        values: NDArray[np.floating] = z[ids]
        repetition = z.dtype.type(self._repetition)
        values = np.where(values > 0, values / repetition, values * repetition)
        values = values - counts * z.dtype.type(self._frequency)
        z[ids] = values - (counts > 0).astype(z.dtype) * z.dtype.type(self._presence)
