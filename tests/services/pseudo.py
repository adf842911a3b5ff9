"""A model without weights behind the real core, sampler and services: logits are a hash of the tokens so far.

    Pseudo(scripts={(1, 2): [65, 66]})    a prompt of ids 1, 2 is followed by ids 65, 66, whatever the temperature

Tests slow it down, block it, lose its group or poison its logits. The vocabulary is bytes, three special tokens and a
few longer words; `write_tokenizer` writes the snapshot folder that the front end reads.
"""

import json
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from protos.step import CannotForm, Description, EpochLost, StepResult, int32s, step_digest
from worker_svc.slots import SlotTable

BOS, EOS, PAD = 256, 257, 258
WORDS = ("ABC", "DEF", "GHIJ", "XAB", "CY", "。\n", "é", "日本", " the", "\n\n")
WORD = {word: 259 + at for at, word in enumerate(WORDS)}
V = 259 + len(WORDS)
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{{ '<|bos|>' + m['role'] + '\n' + m['content'] + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bos|>assistant\n' }}{% endif %}"
)


def byte_symbols():
    """The byte-level alphabet in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]


def write_tokenizer(folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    symbols = byte_symbols()
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    vocabulary |= {"".join(symbols[byte] for byte in word.encode()): index for word, index in WORD.items()}
    # placeholders keep the ids of the specials free until they are added
    vocabulary |= {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|bos|>", "<|eos|>", "<|pad|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids_of(text):
    """Byte tokens of a text."""
    return list(text.encode())


class Pseudo:
    """An Executor. `calls` counts joins; steps run on one thread, in order."""

    def __init__(self, folder="", *, scripts=None, step_s=0.0, max_position_embeddings=512, num_blocks=256, eos=(EOS,)):
        self.folder, self.step_s, self.eos = str(folder), step_s, tuple(eos)
        self.scripts = {tuple(prompt): list(output) for prompt, output in (scripts or {}).items()}
        self.max_position_embeddings, self.num_blocks = max_position_embeddings, num_blocks
        self.fingerprint = {"numerics": "pseudo 1", "device": "test"}
        self.poisoned = {}  # prompt -> output index whose logits hold a NaN
        self.breaking = None  # the prompt whose every step ends the epoch
        self._permits = threading.Semaphore(0)
        self._held = False
        self.down = False  # nobody answers
        self.cannot_form = 0  # joins to come that a rank has no memory for
        self.refused_joins = 0
        self.on_lost = None
        self.joins = []
        self.num_steps = 0
        self._epoch = 0
        self._steps = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def describe(self):
        if self.down:
            raise EpochLost("rank 0 cannot be reached")
        return Description(
            rank=0,
            tp=1,
            model="pseudo",
            model_path=self.folder,
            vocab_size=V,
            max_position_embeddings=self.max_position_embeddings,
            num_layers=1,
            kv_heads=1,
            head_dim=1,
            dtype="float32",
            kv_dtype="float32",
            device="cpu",
            memory_bytes=1 << 20,
            kv_bytes_per_token=8,
            eos_token_ids=self.eos,
            bos_token_id=BOS,
            fingerprint=self.fingerprint,
        )

    def join(self, config):
        if self.down:
            raise EpochLost("rank 0 cannot be reached")
        if self.cannot_form:
            self.cannot_form -= 1
            self.refused_joins += 1
            raise CannotForm("rank 1: out of memory")
        self.joins.append(config)
        num_blocks = config.num_blocks or self.num_blocks
        self._table = SlotTable(
            config.max_num_seqs,
            -(-config.max_seq_len // config.block_size),
            block_size=config.block_size,
            num_blocks=num_blocks,
        )
        self._rows = {}
        self._epoch = config.epoch
        return num_blocks

    def step(self, batch):
        future = Future()
        self._steps.put((batch, future))
        return future

    def hold(self):
        """From now on a step runs only when it is allowed."""
        self._held = True

    def allow(self, steps):
        self._permits.release(steps)

    def go(self):
        self._held = False
        self._permits.release(100)

    def lose(self, reason="rank 1 died"):
        """The group falls now; it cannot be formed again while `down`."""
        epoch, self._epoch = self._epoch, 0
        if self.on_lost is not None and epoch:
            self.on_lost(EpochLost(f"epoch {epoch}: {reason}"))

    def close(self):
        self._epoch = 0

    def _run(self):
        while True:
            batch, future = self._steps.get()
            if self._held:
                self._permits.acquire()
            if self.step_s:
                time.sleep(self.step_s)
            if batch.epoch != self._epoch:
                future.set_exception(EpochLost(f"epoch {batch.epoch} is over"))
                continue
            try:
                future.set_result(self._compute(batch))
            except Exception as error:
                future.set_exception(EpochLost(repr(error)))

    def _compute(self, batch):
        from worker_svc.sampling import SamplerRow, sample  # here: a front-end process that names this class needs none

        self.num_steps += 1
        plan = self._table.apply(batch)
        if any(tuple(row.token_ids[: row.num_prompt].tolist()) == self.breaking for row in plan.rows):
            raise MemoryError("no memory for this step")
        for slot in batch.retired.tolist():
            self._rows.pop(slot, None)
        for row in batch.rows:
            self._rows[row.slot] = SamplerRow(row)
        sampling = [row for row, samples in zip(plan.rows, plan.samples) if samples]
        logits = np.stack([self._logits(row) for row in sampling]) if sampling else np.zeros((0, V), np.float32)
        rows = [self._rows[row.slot] for row in sampling]
        drawn = sample(logits, rows)
        for sampler, token in zip(rows, drawn.token_ids.tolist()):
            sampler.append(token)
        self._table.drawn(plan, drawn.token_ids)
        asking = [row.sampling.return_logits for row in sampling]
        values, ids, alternatives = self._scores(plan)
        digest = step_digest(batch.epoch, batch.seq, drawn.token_ids, drawn.logprobs, drawn.failed_slots)
        return StepResult(
            batch.epoch,
            batch.seq,
            digest,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            alternative_ids=drawn.alternative_ids,
            alternative_logprobs=drawn.alternative_logprobs,
            prompt_logprobs=values,
            prompt_alternative_ids=ids,
            prompt_alternative_logprobs=alternatives,
            failed_slots=drawn.failed_slots,
            logits=logits[asking] if any(asking) else None,
            run_ms=1.0,
        )

    def _scores(self, plan):
        from worker_svc.sampling import score

        found = [[], [], []]
        for at, row in enumerate(plan.rows):
            if row.prompt_logprobs is None:
                continue
            first = int(plan.first_position[at])
            for position in range(first, min(first + int(plan.num_new[at]), row.num_prompt - 1)):
                logits = logits_after(row.token_ids[: position + 1].tolist())[None]
                columns = score(logits, row.token_ids[position + 1 : position + 2], row.prompt_logprobs)
                for column, values in zip(found, columns):
                    column.append(np.asarray(values).reshape(-1))
        kinds = (np.float32, np.int32, np.float32)
        return [np.concatenate(c).astype(kind) if c else np.array([], kind) for c, kind in zip(found, kinds)]

    def _logits(self, row):
        tokens = self._table.tokens(row.slot).tolist()
        prompt, index = tuple(tokens[: row.num_prompt]), len(tokens) - row.num_prompt
        logits = logits_after(tokens)
        script = self.scripts.get(prompt, ())
        if index < len(script):
            logits[script[index]] = 1000.0
        if self.poisoned.get(prompt) == index:
            logits[3] = np.nan
        return logits


def logits_after(tokens):
    """[V] float32: the whole model."""
    state = 1469598103934665603
    for token in tokens:
        state = ((state ^ (token + 1)) * 1099511628211) & ((1 << 64) - 1)
    return (np.random.default_rng(state).standard_normal(V) * 2).astype(np.float32)


def greedy(prompt, count):
    """What the model says by itself."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


def no_ids():
    return int32s()
