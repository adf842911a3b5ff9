"""A model's architecture as one frozen value, and the reader of Hugging Face configs that refuses what is unsupported.

Knows shapes, flags and how ranks divide them. Does not know tensors, names of weights or devices. Invariant: a
`ModelSpec` that exists can be computed by the layers here; everything else ended in `ModelRefused`, which lists every
violation, not only the first.

    ModelRefused            the snapshot, or the way it is to be split, is not supported
      SnapshotRefused       (loading/snapshot.py) files are missing, damaged or disagree
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

VOCAB_BLOCK = 1024  # vocabulary shards are whole blocks of this many ids
MAX_LEAVES = 8


class ModelRefused(ValueError):
    """The model cannot be served as asked. `violations` are sentences that name the field and its value."""

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(self.violations))


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `original_length` and what follows matter to yarn and llama3 only."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MoeSpec:
    num_experts: int
    experts_per_token: int
    renormalise: bool  # divide the chosen experts' probabilities by their sum


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture of a decoder. `intermediate_size` is an expert's in a mixture. `windows[i]` 0: full attention."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    tied_head: bool
    windows: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    clip_qkv: float | None = None
    moe: MoeSpec | None = None
    dtype: str = "bfloat16"  # of the checkpoint, as its config states it
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def leaves(self) -> int:
        """L, the number of fixed slices that K of a row-parallel matmul is cut into, whatever the number of ranks.

        The largest divisor <= 8 of gcd(heads, intermediate / unit), unit being 32 unless a finer one allows more.
        """
        return leaf_plan(self.num_heads, self.intermediate_size)

    @property
    def norm_leaves(self) -> int:
        """Leaves of the sum of squares of a norm over all heads, queries and keys alike."""
        return math.gcd(self.leaves, self.num_kv_heads)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def violations(self, tp: int) -> tuple[str, ...]:
        """Why `tp` ranks cannot share this model; empty if they can. Each names the number that does not fit."""
        if tp < 1:
            return (f"tp {tp} is not a positive number",)
        heads, kv = self.num_heads, self.num_kv_heads
        found = []
        if heads % tp:
            found.append(f"tp {tp} does not divide {heads} attention heads")
        if kv % tp if tp <= kv else tp % kv:
            found.append(f"tp {tp} neither divides nor is a multiple of {kv} kv heads")
        if self.qk_norm == "full" and tp > kv:
            found.append(f"tp {tp} exceeds {kv} kv heads, whose norm goes over all of them once")
        if self.intermediate_size % tp:
            found.append(f"tp {tp} does not divide intermediate_size {self.intermediate_size}")
        if not found and self.leaves % tp:
            found.append(f"tp {tp} does not divide the {self.leaves} leaves of row-parallel products")
        return tuple(found)

    def check_tp(self, tp: int) -> None:
        """Raises ModelRefused with every violation and the values of tp that work."""
        if found := self.violations(tp):
            valid = [n for n in range(1, self.num_heads + 1) if not self.violations(n)]
            raise ModelRefused([*found, f"valid values of tp: {', '.join(map(str, valid))}"])


def leaf_plan(num_heads: int, intermediate_size: int) -> int:
    common = math.gcd(num_heads, intermediate_size)
    return next(n for n in range(MAX_LEAVES, 0, -1) if common % n == 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part: which heads, which columns, which ids."""

    rank: int = 0
    tp: int = 1

    def part(self, total: int) -> range:
        """The rank's equal part of `total` things."""
        assert total % self.tp == 0, (total, self.tp)
        size = total // self.tp
        return range(self.rank * size, (self.rank + 1) * size)

    def kv_heads(self, total: int) -> range:
        """The kv heads this rank's query heads read; with more ranks than heads, several ranks hold the same one."""
        if self.tp <= total:
            return self.part(total)
        head = self.rank * total // self.tp
        return range(head, head + 1)

    def vocabulary(self, vocab_size: int) -> range:
        """The rank's ids: whole blocks of 1024, perhaps none."""
        return vocabulary_part(vocab_size, self.rank, self.tp)


def vocabulary_part(vocab_size: int, rank: int, tp: int) -> range:
    blocks = -(-vocab_size // VOCAB_BLOCK)
    first, last = blocks * rank // tp, blocks * (rank + 1) // tp
    return range(min(vocab_size, first * VOCAB_BLOCK), min(vocab_size, last * VOCAB_BLOCK))


class Config:
    """A Hugging Face config being read: typed access, null like absent, and a list of everything that is wrong."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.violations: list[str] = []

    def refuse(self, sentence: str) -> None:
        self.violations.append(sentence)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.refuse(f"{key} must be an integer of at least {minimum}, not {value!r}")
            return max(minimum, 1)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(f"{key} must be a finite number, not {value!r}")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(f"{key} must be true or false, not {value!r}")
            return default
        return value

    def must_be(self, key: str, *allowed: Any) -> None:
        """The first allowed value is what an absent field means."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(v) for v in allowed)
            self.refuse(f"{key} {value!r} is not supported, only {wanted}")

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key, ())
        listed = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
            self.refuse(f"{key} must be a token id or a list of them, not {value!r}")
            return ()
        return tuple(listed)

    def dtype(self) -> str:
        name = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        if name not in ("float64", "float32", "bfloat16", "float16"):
            self.refuse(f"dtype {name!r} is not supported")
        return name

    def windows(self, num_layers: int, window: int) -> tuple[int, ...]:
        """One window a layer, from `layer_types` where the config has them."""
        kinds = self.get("layer_types")
        if kinds is None:
            return (window,) * num_layers
        known = {"full_attention": 0, "sliding_attention": window}
        if len(kinds) != num_layers or any(kind not in known for kind in kinds):
            self.refuse(f"layer_types {kinds!r} is not one of {sorted(known)} for each of {num_layers} layers")
            return (window,) * num_layers
        return tuple(known[kind] for kind in kinds)

    def finish(self) -> None:
        if self.violations:
            raise ModelRefused(self.violations)


def read_rope(config: Config) -> RopeSpec:
    """Rope from `rope_parameters`, from `rope_theta` and `rope_scaling`, or from both where they agree."""
    new, old = dict(config.get("rope_parameters", {})), dict(config.get("rope_scaling", {}))
    theta = config.get("rope_theta")
    if any(isinstance(v, dict) for v in new.values()):
        config.refuse(f"rope_parameters per layer type are not supported: {new!r}")
        return RopeSpec()
    for spelling in (new, old):
        spelling.setdefault("rope_type", spelling.pop("type", "default"))
    if new.get("rope_theta") is not None and theta is not None and float(new["rope_theta"]) != float(theta):
        config.refuse(f"rope_theta {theta} contradicts rope_parameters.rope_theta {new['rope_theta']}")
    if config.get("rope_parameters") and config.get("rope_scaling"):
        differing = {k for k in new.keys() | old.keys() if k != "rope_theta" and new.get(k) != old.get(k)}
        if differing:
            config.refuse(f"rope_scaling contradicts rope_parameters in {', '.join(sorted(differing))}")
    merged = Config(
        {**old, **{k: v for k, v in new.items() if v is not None}} if config.get("rope_parameters") else old
    )
    base = merged.number("rope_theta", 10000.0 if theta is None else theta)
    if merged.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        config.refuse("partial_rotary_factor other than 1 is not supported")
    rope = _rope_of_kind(config, merged, base)
    config.violations += [f"rope: {v}" for v in merged.violations]
    return rope


def _rope_of_kind(config: Config, rope: Config, theta: float) -> RopeSpec:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec("linear", theta, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            "llama3",
            theta,
            factor=rope.number("factor"),
            original_length=rope.integer("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        length = config.get("max_position_embeddings", 1)
        original = rope.integer("original_max_position_embeddings", length)
        factor = rope.number("factor", length / max(1, original))
        return RopeSpec(
            "yarn",
            theta,
            factor=factor,
            original_length=original,
            beta_fast=rope.number("beta_fast", 32.0) or 32.0,
            beta_slow=rope.number("beta_slow", 1.0) or 1.0,
            attention_factor=_yarn_attention_factor(rope, factor),
            truncate=rope.flag("truncate", True),
        )
    reason = ": its frequencies depend on the length, so bits would depend on the chunking" if kind == "dynamic" else ""
    config.refuse(f"rope kind {kind!r} is not supported{reason}")
    return RopeSpec()


def _yarn_attention_factor(rope: Config, factor: float) -> float:
    """As transformers computes it: given, or from mscale, or the paper's 0.1 ln(s) + 1."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return mscale(over) / mscale(under) if over and under else mscale(1.0)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelRefused, naming the file."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelRefused([f"{path} cannot be read as JSON: {error}"]) from error
    if not isinstance(values, dict):
        raise ModelRefused([f"{path} does not hold a JSON object"])
    return values
