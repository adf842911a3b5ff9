"""Random requests of every kind that the engine serves. Plain messages, so that a reproducer can hold them.

A crowd wants to collide: prompts share beginnings (so that prefixes are found), lengths cross a KV block, a chunk and
the 256-key split of attention, and settings differ from neighbour to neighbour.
"""

import random
from dataclasses import dataclass

from protos import generation_pb2 as pb


@dataclass(frozen=True)
class Limits:
    """What the model allows. max_len: prompt and output of one choice."""

    vocab_size: int
    max_len: int = 400
    longest_output: int = 64


class RequestSource:
    """Draws requests; the same seed draws the same ones."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.rng = random.Random(seed)
        self.limits = limits
        lengths = (
            4,
            16,
            33,
            64,
            120,
            250,
            520,
            1024,
        )  # the last two have whole splits, which a GPU reads once for many
        self._prefixes = [self._ids(length) for length in lengths if length < limits.max_len - 80]
        self._count = 0

    def draw(self) -> pb.GenerateRequest:
        rng = self.rng
        prompt = self._prompt()
        room = self.limits.max_len - len(prompt)
        self._count += 1
        return pb.GenerateRequest(
            request_id=f"r{self._count}",
            token_ids=pb.TokenIds(ids=prompt),
            sampling=self._sampling(min(room, rng.choice((1, 3, 12, 24, 40, self.limits.longest_output)))),
            priority=rng.choice((0, 0, 0, 1)),
        )

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.limits.vocab_size) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng = self.rng
        own = self._ids(rng.choice((1, 2, 7, 15, 16, 17, 40)))
        if rng.random() < 0.35:
            return own
        shared = rng.choice(self._prefixes)
        return shared[: rng.choice((len(shared), rng.randint(1, len(shared))))] + own

    def _sampling(self, max_tokens: int) -> pb.SamplingParams:
        rng, vocab_size = self.rng, self.limits.vocab_size
        sampling = pb.SamplingParams(
            seed=rng.choice((rng.getrandbits(64), rng.randrange(4))),
            temperature=rng.choice((0.0, 0.5, 0.8, 1.0, 1.0, 1.7)),
            max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.8,
        )
        if rng.random() < 0.15:
            sampling.n = rng.choice((2, 3))
        if rng.random() < 0.3:
            sampling.top_k = rng.choice((1, 5, 50, vocab_size + 7))
        if rng.random() < 0.3:
            sampling.top_p = rng.choice((0.3, 0.9, 0.99))
        if rng.random() < 0.15:
            sampling.min_p = rng.choice((0.02, 0.3))
        if rng.random() < 0.2:
            sampling.presence_penalty, sampling.frequency_penalty = rng.choice(((0.7, 0.0), (0.3, 0.4), (-0.5, 0.1)))
        if rng.random() < 0.2:
            sampling.repetition_penalty = rng.choice((0.8, 1.3))
        if rng.random() < 0.15:
            for token in self._ids(3):
                sampling.logit_bias[token] = rng.choice((-4.0, 2.5))
        if rng.random() < 0.1:
            sampling.bad_token_ids.extend(self._ids(5))
        if rng.random() < 0.1:
            sampling.allowed_token_ids.extend(sorted(set(self._ids(40))))
        if rng.random() < 0.2:
            sampling.stop_token_ids.extend(self._ids(2))
            sampling.min_tokens = rng.randint(0, max_tokens)
        if rng.random() < 0.6:
            sampling.logprobs = rng.choice((0, 0, 1, 5, 20))
            if rng.random() < 0.3:
                sampling.logprob_mode = pb.LOGPROB_MODE_RAW
        if rng.random() < 0.12:
            sampling.prompt_logprobs = rng.choice((0, 2))
        if rng.random() < 0.08 and vocab_size < 10_000:
            sampling.return_logits = True
        return sampling
