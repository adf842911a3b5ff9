"""Joined pieces are decode(prompt + output) without decode(prompt), for every tokenizer; stops cut it exactly."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from scheduler_svc import limits
from scheduler_svc import text as text_module
from scheduler_svc.text import ChoiceText, StopStrings, StopTable
from scheduler_svc.text import Tokenizer as SnapshotTokenizer
from tests.services.pseudo import EOS, WORD, V, ids_of, write_tokenizer

REPLACEMENT = "\ufffd"
FUZZ = settings(max_examples=120, deadline=None)


def save(folder, tokenizer):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return SnapshotTokenizer(folder)


def byte_fallback(folder):
    """As Llama 2 and Mistral have it: bytes are tokens of their own, one bad byte spoils its whole run."""
    words = ["▁the", "▁", "a", "b", "é", "日", "▁<", "x\n", "▁▁"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return save(folder, tokenizer)


def word_pieces(folder):
    words = [
        "[UNK]",
        "[CLS]",
        "un",
        "##aff",
        "##able",
        "hello",
        ".",
        ",",
        "'",
        "s",
        "n't",
        "do",
        "é",
        "##日",
        "i",
        "'m",
    ]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens([AddedToken("[CLS]", special=True)])
    return save(folder, tokenizer)


def metaspace(folder):
    words = ["▁hello", "▁", "wor", "ld", "▁▁", "é", "日本", ".", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel(vocab={word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True)])
    return save(folder, tokenizer)


KINDS = {"byte level": None, "byte fallback": byte_fallback, "word pieces": word_pieces, "metaspace": metaspace}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {name: make(folder / name) for name, make in KINDS.items() if make is not None}
    found["byte level"] = SnapshotTokenizer(write_tokenizer(folder / "byte level"))
    return found


def rest(whole, start):
    """`whole` without its longest common prefix with `start`."""
    same = 0
    while same < min(len(whole), len(start)) and whole[same] == start[same]:
        same += 1
    return whole[same:]


def pieces(tokenizer, prompt, output, skip=True):
    detokenizer = tokenizer.detokenizer(prompt, skip)
    return [*(detokenizer.push(token) for token in output), detokenizer.finish()]


def ids(size):
    """Token ids, many of them bytes and runs of one character's bytes; some that the tokenizer does not know."""
    character = st.sampled_from(["é", "日", "😀", "a", "\ufffd", "\u0301"]).map(lambda c: list(c.encode()))
    broken = st.lists(st.integers(0x80, 0xFF), max_size=3)
    anything = st.integers(0, size + 3).map(lambda token: [token])
    return st.lists(st.one_of(character, broken, anything), max_size=14).map(
        lambda parts: [token for part in parts for token in part]
    )


SIZES = {"byte level": (V, 0), "byte fallback": (268, 3), "word pieces": (16, 0), "metaspace": (9, 0)}


def sequences(kind):
    size, first_byte = SIZES[kind]
    if size < 259:
        some = st.lists(st.integers(0, size), max_size=40)
        return st.tuples(some, some)
    shifted = ids(size - first_byte).map(lambda tokens: [token + first_byte for token in tokens])
    return st.tuples(shifted, shifted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_joined_pieces_are_the_decoded_whole_without_the_prompt(tokenizers, kind, skip):
    tokenizer = tokenizers[kind]

    @FUZZ
    @given(sequences(kind))
    def check(both):
        prompt, output = both
        joined = "".join(pieces(tokenizer, prompt, output, skip))
        assert joined == rest(tokenizer.decode(prompt + output, skip), tokenizer.decode(prompt, skip))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_k_tokens_depends_on_those_tokens_alone(tokenizers, kind):
    """A stream that is taken up after k tokens says exactly what the first one would have said from there."""
    tokenizer = tokenizers[kind]

    @settings(max_examples=60, deadline=None)
    @given(sequences(kind), st.integers(0, 60))
    def check(both, k):
        prompt, output = both
        whole = pieces(tokenizer, prompt, output)
        resumed = tokenizer.detokenizer(prompt)
        assert [resumed.push(token) for token in output[:k]] == whole[: len(output[:k])]
        assert [*(resumed.push(token) for token in output[k:]), resumed.finish()] == whole[len(output[:k]) :]

    check()


@FUZZ
@given(st.text(max_size=12))
def test_no_piece_ends_inside_a_character(tokenizers, message):
    told = pieces(tokenizers["byte level"], ids_of("x"), ids_of(message))
    assert "".join(told) == message
    assert [len(piece) for piece in told[:-1]] == [
        int(at == len(character.encode()) - 1) for character in message for at in range(len(character.encode()))
    ]


def test_emoji_of_four_byte_tokens_arrives_once_and_whole(tokenizers):
    assert pieces(tokenizers["byte level"], [1], ids_of("😀!")) == ["", "", "", "😀", "!", ""]


def test_unfinished_character_is_flushed_at_the_end(tokenizers):
    assert pieces(tokenizers["byte level"], [1], list("😀".encode()[:3])) == ["", "", "", REPLACEMENT]
    fallback = tokenizers["byte fallback"]
    assert pieces(fallback, [261], [3 + 0xE2, 3 + 0x82]) == ["", "", REPLACEMENT * 2]


def test_character_that_the_prompt_began_is_completed_by_the_output(tokenizers):
    emoji = list("😀".encode())
    assert "".join(pieces(tokenizers["byte level"], emoji[:2], emoji[2:])) == "😀"
    assert "".join(pieces(tokenizers["byte level"], emoji[:2], ids_of("x"))) == "x"  # the sign belongs to the prompt


def test_long_outputs_restart_their_window_without_a_trace(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    output = [259, 261, 3 + ord("q"), 264, 265, 266, 260, 267] * 60
    assert "".join(pieces(tokenizer, [259], output)) == rest(tokenizer.decode([259, *output]), tokenizer.decode([259]))


@pytest.mark.parametrize(
    "mutate",
    [
        lambda m: m.setattr(text_module._ByteLevelDetokenizer, "finish", lambda self: ""),
        lambda m: m.setattr(text_module._ByteLevelDetokenizer, "_without_prompts_sign", lambda self, text: text),
        lambda m: m.setattr(
            text_module._ByteLevelDetokenizer,
            "push",
            lambda self, token: self._tokenizer.decode([token], self._skip),
        ),
        lambda m: m.setattr(text_module.Tokenizer, "joins_next", lambda self, token: False),
        lambda m: m.setattr(text_module._WindowedDetokenizer, "_shorten", lambda self: self._window.clear()),
    ],
    ids=["tail dropped", "prompt's sign kept", "token by token", "byte runs not held", "window without context"],
)
def test_broken_detokenizers_do_not_pass(tokenizers, mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(BaseException):  # noqa: B017 (several distinct failures arrive as a group)
        for kind in ("byte level", "byte fallback"):
            test_joined_pieces_are_the_decoded_whole_without_the_prompt(tokenizers, kind, True)


# Stop strings


def cut(text, stops, include=False):
    """The rule, from its words: the earliest end wins, of equal ends the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(stops, parts, include=False):
    matcher, told = StopStrings(stops, include), ""
    for part in parts:
        piece, stop = matcher.push(part, True)
        told += piece
        if stop is not None:
            return told, stop
    return told + matcher.finish(), None


letters = st.text("abc", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(st.lists(letters, min_size=1, max_size=4), st.lists(st.text("abc", max_size=4), max_size=12), st.booleans())
def test_stops_are_found_wherever_tokens_cut_them(stops, parts, include):
    assert run(stops, parts, include) == cut("".join(parts), stops, include)


@settings(max_examples=150, deadline=None)
@given(st.lists(letters, min_size=1, max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_what_is_held_back_is_no_more_than_a_stop_could_need(stops, parts):
    matcher, told, whole = StopStrings(stops), "", ""
    for part in parts:
        piece, stop = matcher.push(part, True)
        if stop is not None:
            return
        told, whole = told + piece, whole + part
        held = whole[len(told) :]
        assert held == max((s[:k] for s in stops for k in range(len(s)) if whole.endswith(s[:k])), key=len)


@pytest.mark.parametrize(
    ("stops", "output", "expected", "stop"),
    [
        (["DEFGHIJ"], "abcDEFGHIJklm", "abc", "DEFGHIJ"),
        (["AB", "ABC"], "xABCy", "x", "AB"),  # completed first
        (["BC", "ABCD"], "ABCD", "A", "BC"),
        (["ABC", "C"], "xABC", "x", "ABC"),  # the same character completes both: the longest
        (["。\n"], "はい。\nx", "はい", "。\n"),
        (["QQQQQQQQ"], "end QQQ", "end QQQ", None),
    ],
)
def test_stop_rules_by_example(tokenizers, stops, output, expected, stop):
    choice = ChoiceText(tokenizers["byte level"].detokenizer([1]), stops)
    told = ""
    for token in ids_of(output):
        told += choice.push(token)
        if choice.ended:
            break
    assert (told + choice.finish(), choice.stop) == (expected, stop)


def test_stop_that_begins_inside_a_token_cuts_the_token(tokenizers):
    choice = ChoiceText(tokenizers["byte level"].detokenizer([1]), ["BC"])
    assert choice.push(WORD["XAB"]) == "XA" and choice.push(WORD["CY"]) == "" and choice.stop == "BC"
    included = ChoiceText(tokenizers["byte level"].detokenizer([1]), ["BC"], include=True)
    assert included.push(WORD["XAB"]) + included.push(WORD["CY"]) == "XABC"


def test_min_tokens_masks_stop_strings_up_to_that_token(tokenizers):
    choice = ChoiceText(tokenizers["byte level"].detokenizer([1]), ["\n"], min_tokens=3)
    assert "".join(choice.push(token) for token in ids_of("a\nb\nc")[:3]) == "a\nb" and not choice.ended
    assert choice.push(ord("\n")) == "" and choice.stop == "\n" and choice.num_tokens == 4


def test_ending_token_adds_no_text_unless_it_is_asked_for(tokenizers):
    for include, expected in ((False, "a"), (True, "ab")):
        choice = ChoiceText(
            tokenizers["byte level"].detokenizer([1]), include=include, ending_ids=frozenset({ord("b"), EOS})
        )
        assert choice.push(ord("a")) + choice.push(ord("b")) + choice.finish() == expected
        assert choice.ended and choice.stop is None


@pytest.mark.parametrize(
    "mutate",
    [
        lambda m: m.setattr(StopStrings, "_open_suffix", lambda self, text: ""),
        lambda m: m.setattr(StopStrings, "finish", lambda self: ""),
        lambda m: m.setattr(text_module, "max", lambda a, b: b, raising=False),
    ],
    ids=["nothing held", "held text lost", "search from the new text only"],
)
def test_broken_stop_matchers_do_not_pass(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(BaseException):  # noqa: B017
        test_stops_are_found_wherever_tokens_cut_them()


def test_special_tokens_are_read_in_both_spellings(tmp_path):
    write_tokenizer(tmp_path)
    config = {"eos_token": {"content": "<|eos|>"}, "bos_token": "<|bos|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = SnapshotTokenizer(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "<|eos|>", "bos_token": "<|bos|>"}
    assert tokenizer.eos_token_id() == EOS


def test_choices_of_one_request_share_a_table_and_nothing_else():
    table = StopTable(["abcabd", "abcx"])
    one, other = StopStrings(table), StopStrings(table)
    assert one.push("zabcab", True) == ("z", None)
    assert other.push("c", True) == ("c", None)
    assert one.push("x", True) == ("abcabx", None)
    assert one.push("abcab", True) == ("", None) and one.push("cabd", True) == ("abc", "abcabd")
    assert other.push("abcx", True) == ("", "abcx")


def test_the_longest_stop_strings_there_may_be_cost_little():
    stops = [f"{i:02}" + "ab" * 511 for i in range(limits.MAX_STOP_STRINGS)]
    table = StopTable(stops)
    assert sum(len(borders) * borders.itemsize for borders in table.borders) < 1 << 18
    matcher = StopStrings(table)
    assert matcher.push(stops[3][:-1], True) == ("", None)
    assert matcher.push("b", True) == ("", stops[3])
