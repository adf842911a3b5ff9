"""A conversation in a terminal: `lockstep chat`.

Knows lines, keys and what the conversation so far is; the client library does the rest. Ctrl-C while the model speaks
stops it and keeps what was said; Ctrl-C or Ctrl-D at the prompt leaves. Text is printed as it comes, never parsed as
markup. Invariant: `messages` always alternates user and assistant after the system message.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from client.blocking import Lockstep
from client.errors import LockstepError
from client.requests import Chat

HELP = """\
/clear         forget the conversation      /undo     take back the last question
/retry         answer it again              /system TEXT  set the system message
/set NAME VALUE   e.g. /set temperature 0.7; /set NAME alone clears it; /set alone shows all
/save FILE     write the conversation       /quit     leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in a backslash goes on in the next one."""

_SETTABLE: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}


class Talk:
    """One conversation. `ask` reads a line; EOFError and KeyboardInterrupt from it end the conversation."""

    def __init__(
        self,
        client: Lockstep,
        system: str | None,
        options: dict[str, Any],
        console: Console | None = None,
        ask: Callable[[str], str] = input,
    ) -> None:
        self._client = client
        self._options = options
        self._console = console or Console(highlight=False)
        self._ask = ask
        self._system = system
        self.messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Until the person leaves."""
        info = self._client.info()
        self._say(f"{info.model}, context {info.max_seq_len}; /help lists commands, Ctrl-D leaves")
        with _line_editing():
            while (line := self._line()) is not None:
                if line.startswith("/"):
                    if self._command(line) is False:
                        return
                elif line:
                    self._answer(line)

    def _line(self) -> str | None:
        try:
            line = self._ask("\n> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + self._ask(". ")
            return line.strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None

    def _answer(self, question: str) -> None:
        asked = [*self.messages, {"role": "user", "content": question}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        began, first = time.perf_counter(), None
        stream, note = self._client.stream(Chat([*system, *asked]), **self._options), ""
        try:
            with stream:
                for delta in stream:
                    first = first or time.perf_counter()
                    self._console.out(delta.text, end="", highlight=False)
        except KeyboardInterrupt:
            note = "stopped, "
        except LockstepError as error:
            self._say(f"\n{error}")
            return
        answer, now = stream.completion, time.perf_counter()
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        tokens = len(answer.token_ids)
        rate = f"{(tokens - 1) / (now - first):.1f} tokens/s, " if first and tokens > 1 else ""
        waited = f"first after {first - began:.2f} s" if first else "nothing came"
        cut = ", cut at max_tokens" if answer.choices[0].finish_reason == "length" else ""
        resumed = f", resumed {answer.resumed} times" if answer.resumed else ""
        self._say(f"\n{note}{tokens} tokens, {rate}{waited}{cut}{resumed}")

    def _command(self, line: str) -> bool | None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/clear":
                self.messages = []
                self._say("the conversation is empty")
            case "/undo":
                self.messages = self.messages[:-2]
                self._say(f"{len(self.messages) // 2} questions left")
            case "/retry" if self.messages:
                question = self.messages[-2]["content"]
                self.messages = self.messages[:-2]
                self._answer(question)
            case "/system":
                self._system = rest or None
                self._say("set" if rest else "no system message")
            case "/set":
                self._set(rest)
            case "/save" if rest:
                self._save(Path(rest).expanduser())
            case _:
                self._say(HELP)
        return None

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name in _SETTABLE and not value:
            self._options.pop(name, None)
        elif name in _SETTABLE:
            try:
                self._options[name] = _SETTABLE[name](value)
            except ValueError:
                self._say(f"{name} takes a number")
        elif name:
            self._say(f"can be set: {', '.join(_SETTABLE)}")
        self._say(", ".join(f"{key}={value}" for key, value in self._options.items()) or "all as the server has them")

    def _save(self, path: Path) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        lines = [f"{message['role']}: {message['content']}\n" for message in [*system, *self.messages]]
        try:
            path.write_text("\n".join(lines), encoding="utf-8")
            self._say(f"wrote {path}")
        except OSError as error:
            self._say(f"{path}: {error.strerror}")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


@contextlib.contextmanager
def _line_editing() -> Any:
    """Arrow keys and a history across sessions, where the platform has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    history = Path("~/.cache/lockstep/chat_history").expanduser()
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)
