"""How often `fast` tells a request something else in a crowd than alone; `invariant` beside it as the control.

    python bench/fast_differs.py [--model DIR | --flat] [--sequences 64] [--tokens 64] [--dtype bfloat16] [--json]

Each sequence is run alone, then among all the others at once, greedy and sampled (temperature 1, the same seed): the
share of sequences with another token somewhere, and the share of positions up to there whose logprob has other bits.
--flat is a tiny random model whose best tokens are nearly alike, the hardest case; the demo model is the ordinary one.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.crowd.answers import Answer
from bench.crowd.driving import Arrival, Driver
from bench.invariant_cost import available_cores, demo_model
from protos import generation_pb2 as pb
from tests.cluster import Cluster

TEXTS = (
    "The history of the lighthouse begins",
    "To make a good soup you need",
    "Explain why the sky is blue:",
    "def fibonacci(n):",
    "Once upon a time in a small village",
    "The three most important rules of chess are",
    "Dear Sir or Madam,",
    "Photosynthesis is the process by which",
)


@dataclass(frozen=True)
class Share:
    model: str
    dtype: str
    numerics: str
    kind: str
    sequences: int
    changed: int
    positions: int
    other_bits: int


def requests(count: int, tokens: int, temperature: float, vocab_size: int | None) -> list[pb.GenerateRequest]:
    """vocab_size: random ids below it; None: texts, each with a number so that no two are alike."""
    rng = random.Random(7)
    made = []
    for number in range(count):
        sampling = pb.SamplingParams(
            temperature=temperature, seed=number, max_tokens=tokens, logprobs=0, ignore_eos=True
        )
        request = pb.GenerateRequest(request_id=f"r{number}", sampling=sampling)
        if vocab_size is None:
            request.text = f"{number + 1}. {TEXTS[number % len(TEXTS)]}"
        else:
            request.token_ids.ids.extend(rng.randrange(vocab_size) for _ in range(rng.randint(4, 40)))
        made.append(request)
    return made


def compare(alone: Answer, crowd: Answer) -> tuple[bool, int, int]:
    """Whether a token differs; positions up to the first one that does; those whose logprob has other bits."""
    one, other = alone.choices[0], crowd.choices[0]
    length = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids)) if a != b), len(one.token_ids))
    bits = sum(a != b for a, b in zip(one.details[:length], other.details[:length]))
    return length < len(one.token_ids), length, bits


def study(model: Path, name: str, dtype: str, numerics: str, count: int, tokens: int, vocab: int | None) -> list[Share]:
    flags = {"dtype": dtype, "numerics": numerics, "max_num_seqs": count, "threads": available_cores()}
    shares = []
    with Cluster(model, log_level="warning", ready_timeout_s=180, no_prefix_cache=True, **flags) as cluster:
        driver = Driver(cluster.address)
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            asked = requests(count, tokens, temperature, vocab)
            alone = {request.request_id: driver.alone(request) for request in asked}
            crowd = driver.crowd([Arrival(request) for request in asked])
            refused = [answer.refusal for answer in (*alone.values(), *crowd.values()) if answer.refusal]
            if refused:
                raise SystemExit(f"{refused[0]}\n{cluster.text}")
            found = [compare(alone[key], crowd[key]) for key in alone]
            changed, positions, bits = (sum(column) for column in zip(*found))
            shares.append(Share(name, dtype, numerics, kind, count, changed, positions, bits))
            print(line(shares[-1]), file=sys.stderr, flush=True)
    return shares


def line(share: Share) -> str:
    return (
        f"{share.model} {share.dtype} {share.numerics} {share.kind}: {share.changed} of {share.sequences} sequences "
        f"changed; {share.other_bits} of {share.positions} positions before that have other bits"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="default: the demo model")
    which.add_argument("--flat", action="store_true")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lockstep-fast-") as scratch:
        vocab = None
        if options.flat:
            from tests.tiny_models import make_tiny

            # Small weights make flat distributions: the best tokens lie within rounding of one another.
            vocab = 2500
            model = make_tiny(Path(scratch) / "flat", "llama", vocab_size=vocab, initializer_range=0.05)
        else:
            model = options.model or demo_model()
        name = "tiny flat" if options.flat else model.name
        shares = [
            share
            for numerics in ("fast", "invariant")
            for share in study(model, name, options.dtype, numerics, options.sequences, options.tokens, vocab)
        ]
    print(json.dumps([asdict(share) for share in shares], indent=1) if options.json else "\n".join(map(line, shares)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
