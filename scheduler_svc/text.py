"""Token ids to text and back: the tokenizer, text as it grows, stop strings.

Knows nothing of requests and wires. The invariants: the text after k tokens is a pure function of the prompt and those
k tokens, so that a stream can be continued elsewhere; the joined pieces equal decode(prompt + output) without its
longest common prefix with decode(prompt); no piece ends inside a character.
"""

import codecs
import json
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
WINDOW_TOKENS = 24  # a windowed decoder restarts its window when it is longer than this


class Detokenizer(Protocol):
    """The text of one growing sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character may still grow."""
        ...

    def finish(self) -> str:
        """The tail that never became a whole character, as U+FFFD."""
        ...


class Tokenizer:
    """A snapshot's tokenizer. Raises FileNotFoundError when the folder has none."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = _read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(self.config, _read_json(folder / "special_tokens_map.json"))
        self.special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._has_byte_fallback = "ByteFallback" in json.dumps(decoder)
        self._bytes: dict[int, bytes] = {}
        self._visible_bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # A batch, even of one, is encoded without the interpreter's lock; a single text would hold everybody up.
        return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def longest_token(self) -> int:
        """Characters of the longest token, which bounds what so many tokens can say."""
        return max(map(len, self._tokenizer.get_vocab()))

    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id, one member of the union that ends a choice."""
        eos = self.special_tokens.get("eos_token")
        return None if eos is None else self.token_id(eos)

    def detokenizer(self, prompt: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
        """The text of a sequence that continues `prompt`."""
        if self._is_byte_level:
            return _ByteLevelDetokenizer(self, prompt, skip_special_tokens)
        return _WindowedDetokenizer(self, prompt, skip_special_tokens)

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What a token adds to the byte stream of a byte-level tokenizer."""
        table = self._visible_bytes if skip_special_tokens else self._bytes
        found = table.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            hidden = token is None or (skip_special_tokens and token_id in self.special_ids)
            found = table[token_id] = b"" if hidden else _byte_level_bytes(token or "")
        return found

    def joins_next(self, token_id: int) -> bool:
        """Whether the decoder merges this token with its neighbours, so that its text is not final yet."""
        return self._has_byte_fallback and bool(BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or ""))


class _ByteLevelDetokenizer:
    """A byte-level decoder is a concatenation of bytes read as UTF-8 with replacement, so it can run incrementally."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        tail = b""
        for token_id in reversed(prompt):
            tail = tokenizer.token_bytes(token_id, skip_special_tokens) + tail
            if len(tail) >= 4:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        open_bytes = decoder.getstate()[0]
        self._decode(open_bytes)
        # decode(prompt) ended in U+FFFD then; if the character stays broken that sign is the prompt's, not ours.
        self._prompt_is_open = bool(open_bytes)

    def push(self, token_id: int) -> str:
        text = self._decode(self._tokenizer.token_bytes(token_id, self._skip))
        return self._without_prompts_sign(text) if self._prompt_is_open else text

    def finish(self) -> str:
        text = self._decode(b"", True)
        return self._without_prompts_sign(text) if self._prompt_is_open else text

    def _without_prompts_sign(self, text: str) -> str:
        if not text:
            return text
        self._prompt_is_open = False
        return text.removeprefix(REPLACEMENT)


class _WindowedDetokenizer:
    """Any other decoder: decode a short window twice and take the difference.

    The window always starts with visible text, so that what a decoder does to the start of a text (dropping a space)
    falls on text that is already out. A run of byte tokens is decoded as a whole by its decoder (one bad byte spoils
    all of it), so it is held back until another token ends it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt)
        self._shorten()
        self._told = self._text()

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        if self._tokenizer.joins_next(token_id):
            return ""
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._window) < 8 * WINDOW_TOKENS:
            return ""
        new = self._news(text)
        if len(self._window) > WINDOW_TOKENS:
            self._shorten()
            text = self._text()
        self._told = text
        return new

    def finish(self) -> str:
        text = self._text()
        new, self._told = self._news(text), text
        return new

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)

    def _news(self, text: str) -> str:
        if text.startswith(self._told):
            return text[len(self._told) :]
        same = 0
        for one, other in zip(text, self._told):
            if one != other:
                break
            same += 1
        return text[same:]

    def _shorten(self) -> None:
        """Keep the shortest tail, of four tokens or more, that starts with visible text and not inside a byte run."""
        for start in range(len(self._window) - 4, 0, -1):
            first, before = self._window[start], self._window[start - 1]
            if self._tokenizer.joins_next(first) or self._tokenizer.joins_next(before):
                continue
            if self._tokenizer.decode([first], self._skip).strip():
                del self._window[:start]
                return


class StopTable:
    """The stop strings of a request, with what finding their beginnings needs: one for all of its choices.

    borders[i][j]: the longest proper beginning of stop i that ends its first j + 1 characters (Knuth, Morris, Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        self.borders = [_borders(stop) for stop in self.stops]


def _borders(stop: str) -> "array[int]":
    borders = array("H", bytes(2 * len(stop)))
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = borders[length - 1]
        length += stop[at] == stop[length]
        borders[at] = length
    return borders


class StopStrings:
    """Finds stop strings in growing text and holds back what may still become one.

    The match that is completed first ends the choice; of several completed by the same character the longest does.
    """

    def __init__(self, stops: Sequence[str] | StopTable, include: bool = False) -> None:
        self._table = stops if isinstance(stops, StopTable) else StopTable(stops)
        self._include = include
        self._held = ""
        self._open = [0] * len(self._table.stops)  # of each stop, how many of its characters end the text

    def push(self, text: str, honoured: bool) -> tuple[str, str | None]:
        """The text that may go out, and the stop string that `text` completed; not `honoured` (min_tokens): none."""
        if not text:
            return "", None
        start, whole = len(self._held), self._held + text
        best: tuple[int, int, str] | None = None
        if honoured:
            for stop in self._table.stops:
                at = whole.find(stop, max(0, start - len(stop) + 1))
                if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                    best = (at + len(stop), at, stop)
        if best is not None:
            end, at, stop = best
            self._held = ""
            return whole[: end if self._include else at], stop
        self._held = self._open_suffix(whole)
        return whole[: len(whole) - len(self._held)], None

    def finish(self) -> str:
        """What was held back, when nothing completed it."""
        held, self._held = self._held, ""
        return held

    def _open_suffix(self, text: str) -> str:
        """The longest end of `text`, what was held back and what is new, that begins a stop string and is not all."""
        new = text[len(self._held) :]
        for i, (stop, borders) in enumerate(zip(self._table.stops, self._table.borders, strict=True)):
            length = self._open[i]
            if not length and stop[0] not in new:
                continue
            for character in new:
                while length and stop[length] != character:
                    length = borders[length - 1]
                length += stop[length] == character
                if length == len(stop):
                    length = borders[-1]
            self._open[i] = length
        longest = max(self._open, default=0)
        return text[len(text) - longest :]


class ChoiceText:
    """The text of one choice: detokenised, stop strings found, cut where the choice ends.

    A token of `ending_ids` (end of sequence, stop ids) ends the choice and adds no text, or its own text with
    `include`. No kind of stop is honoured up to and including token number `min_tokens`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: Sequence[str] | StopTable = (),
        *,
        include: bool = False,
        min_tokens: int = 0,
        ending_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = detokenizer
        table = stops if isinstance(stops, StopTable) else StopTable(stops)
        self._stops = StopStrings(table, include) if table.stops else None
        self._include = include
        self._min_tokens = min_tokens
        self._ending_ids = ending_ids
        self.num_tokens = 0
        self.ended = False  # by a token or a stop string
        self.stop: str | None = None  # the stop string that ended it

    def push(self, token_id: int) -> str:
        """The text that may go out after one more token."""
        self.num_tokens += 1
        honoured = self.num_tokens > self._min_tokens
        if honoured and token_id in self._ending_ids:
            self.ended = True
            if not self._include:
                return ""
        if self._detokenizer is None:
            return ""
        return self._sift(self._detokenizer.push(token_id), honoured)

    def finish(self) -> str:
        """The rest, once: an unfinished character and what was held back for a stop string."""
        if self.stop is not None or self._detokenizer is None:
            return ""
        text = self._sift(self._detokenizer.finish(), self.num_tokens > self._min_tokens)
        return text if self._stops is None or self.stop is not None else text + self._stops.finish()

    def _sift(self, text: str, honoured: bool) -> str:
        if self._stops is None:
            return text
        text, stop = self._stops.push(text, honoured and not self.ended)
        if stop is not None:
            self.stop, self.ended = stop, True
        return text


def _byte_level_table() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_table()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _read_json(path: Path) -> dict[str, object]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _special_tokens(*configs: dict[str, object]) -> dict[str, str]:
    """bos_token, eos_token and such, which are strings or objects with `content`; the first config wins."""
    tokens: dict[str, str] = {}
    for config in configs:
        for name, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens.setdefault(name, text)
    return tokens
