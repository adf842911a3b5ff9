"""What the front end knows of the model once a group stands: facts to validate against, text, the fingerprint.

Learned from the workers' answers and, for text, from the snapshot's folder where this process can read it. Immutable:
another group is another KnownModel.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protos import generation_pb2 as pb
from scheduler_svc.chat import ChatError, ChatTemplate
from scheduler_svc.messages import EngineFacts
from scheduler_svc.sampling_fields import ModelFacts
from scheduler_svc.text import ChoiceText, StopTable, Tokenizer
from scheduler_svc.validation import TextRules

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class KnownModel:
    """`tokenizer` is None when its folder cannot be read here; then only token ids are served."""

    engine: EngineFacts
    facts: ModelFacts
    fingerprint: pb.Fingerprint
    tokenizer_folder: Path
    tokenizer: Tokenizer | None

    def choice_text(self, prompt: Sequence[int], rules: TextRules, stops: StopTable) -> ChoiceText:
        """The text of a choice that continues `prompt`; `stops` are those of the rules, shared by all choices."""
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer(prompt, rules.skip_special_tokens)
        return ChoiceText(
            detokenizer,
            stops,
            include=rules.include_stop,
            min_tokens=rules.min_tokens,
            ending_ids=rules.ending_ids,
        )


def learn(engine: EngineFacts, tokenizer_folder: Path | None, before: KnownModel | None) -> KnownModel:
    """`tokenizer_folder` None: the folder that the workers name. `before` spares reading an unchanged tokenizer."""
    description = engine.description
    folder = tokenizer_folder or Path(description.model_path)
    if before is not None and before.tokenizer_folder == folder:
        tokenizer = before.tokenizer
    else:
        tokenizer = _read_tokenizer(folder)
    encoder = _Encoder(tokenizer, folder, engine.max_seq_len) if tokenizer is not None else None
    own_eos = tokenizer.eos_token_id() if tokenizer is not None else None
    eos_ids = {*description.eos_token_ids, *(() if own_eos is None else (own_eos,))}
    parts = dict(engine.fingerprint)
    fingerprint = pb.Fingerprint(digest=digest_of(parts), parts=parts)
    facts = ModelFacts(
        vocab_size=description.vocab_size,
        max_seq_len=engine.max_seq_len,
        eos_ids=frozenset(token_id for token_id in eos_ids if token_id < description.vocab_size),
        fingerprint=fingerprint.digest,
        encode=encoder.text if encoder is not None else None,
        encode_chat=encoder.chat if encoder is not None else None,
    )
    return KnownModel(engine, facts, fingerprint, folder, tokenizer)


def digest_of(parts: Mapping[str, str]) -> str:
    """One name for all parts of a fingerprint."""
    state = hashlib.blake2b(digest_size=16)
    for name, value in sorted(parts.items()):
        for text in (name, value):
            data = text.encode()
            state.update(len(data).to_bytes(4, "little") + data)
    return state.hexdigest()


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    try:
        return Tokenizer(folder)
    except FileNotFoundError as error:
        logger.warning("no tokenizer, so only token ids are served: %s", error)
        return None


class _Encoder:
    """Text and chat messages to token ids. Raises ValueError with a reason for the caller.

    What cannot fit the context however it is tokenized is refused by its length, since tokenizing megabytes takes
    seconds. The slack is for normalisers that shorten text.
    """

    SLACK = 4

    def __init__(self, tokenizer: Tokenizer, folder: Path, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._max_characters = self.SLACK * tokenizer.longest_token() * max_seq_len
        self._template = ChatTemplate.of_snapshot(folder, tokenizer.config, tokenizer.special_tokens)

    def text(self, text: str) -> list[int]:
        self._check_length(text)
        return self._tokenizer.encode(text)

    def chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        try:
            text = self._template.render(messages, add_generation_prompt)
        except ChatError as error:
            raise ValueError(str(error)) from error
        self._check_length(text)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _check_length(self, text: str) -> None:
        if len(text) > self._max_characters:
            raise ValueError(
                f"the prompt has {len(text)} characters, more than fit the context of {self._max_seq_len} tokens"
            )
