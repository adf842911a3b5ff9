"""The command: what it sends, what it prints, how it ends."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from client import Lockstep
from client.chat import Talk
from tests.client.mock_server import MockServer, Script

LOCKSTEP = [sys.executable, "-m", "client.app"]


def lockstep(*arguments: str, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*LOCKSTEP, *arguments], capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def test_text_streams_as_it_comes(server: MockServer) -> None:
    server.servicer.default = Script(ttft=0.1, gap=0.15)
    process = subprocess.Popen(
        [*LOCKSTEP, "generate", "--server", server.address, "--prompt", "abc", "--max-tokens", "8"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    seen, text = [], b""
    while chunk := os.read(process.stdout.fileno(), 1000):
        seen.append(time.monotonic())
        text += chunk
    assert process.wait() == 0 and text.decode() == "3 4 5 6 7 8 9 10 \n"
    assert len(seen) >= 5 and seen[-1] - seen[0] > 0.6


def test_json_is_one_strict_object(server: MockServer) -> None:
    done = lockstep(
        *("generate", "--server", server.address, "--prompt-ids", "1,2,3", "--max-tokens", "4", "--logprobs", "0"),
        *("--seed", "0", "--n", "2", "--json"),
    )

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    answer = json.loads(done.stdout, parse_constant=refuse)
    assert done.stdout.count("\n") == 1
    assert [choice["token_ids"] for choice in answer["choices"]] == [[3, 4, 5, 6], [4, 5, 6, 7]]
    assert answer["choices"][0]["logprobs"] == [None, -0.5, None, -0.5]  # -inf is null
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 8
    assert isinstance(answer["seed"], int) and answer["choices"][0]["text"] == "3 4 5 6 "


def test_every_flag_reaches_the_wire(server: MockServer) -> None:
    lockstep(
        *("generate", "--server", server.address, "--prompt", "hi", "--max-tokens", "1", "--temperature", "0"),
        *("--top-p", "0.5", "--top-k", "-1", "--min-p", "0.1", "--seed", "18446744073709551615", "--n", "1"),
        *("--stop", "a", "--stop", "b", "--logprobs", "2", "--prompt-logprobs", "1", "--min-tokens", "0"),
        *("--presence-penalty", "1", "--frequency-penalty", "2", "--repetition-penalty", "1.5", "--ignore-eos"),
        *("--stop-token-ids", "4,5", "--chat", "--system", "be brief", "--timeout", "20"),
    )
    (sent,) = server.sent.values()
    request, sampling = sent.requests[0], sent.requests[0].sampling
    assert [message.role for message in request.chat.messages] == ["system", "user"]
    assert sampling.temperature == 0 and sampling.HasField("temperature") and sampling.top_k == -1
    assert sampling.seed == 2**64 - 1 and list(sampling.stop) == ["a", "b"] and list(sampling.stop_token_ids) == [4, 5]
    assert sampling.logprobs == 2 and sampling.prompt_logprobs == 1 and sampling.ignore_eos
    assert sampling.HasField("min_tokens") and sampling.top_p == 0.5 and sampling.repetition_penalty == 1.5
    assert 19_000 < request.timeout_ms <= 20_000


@pytest.mark.parametrize("seed", ["-1", "18446744073709551616", "-9223372036854775809"])
def test_a_seed_that_the_wire_cannot_carry_is_named(server: MockServer, seed: str) -> None:
    done = lockstep("generate", "--server", server.address, "--prompt", "x", "--seed", seed, code=1)
    assert "seed" in done.stderr and "INVALID" not in done.stdout and not server.sent


def test_errors_have_their_field_and_exit_codes(server: MockServer) -> None:
    assert "prompt: bad" in lockstep("generate", "--server", server.address, "--prompt", "bad", code=1).stderr
    lockstep("generate", "--server", server.address, code=2)
    lockstep("generate", "--server", server.address, "--prompt-ids", "1,x", code=2)
    gone = lockstep("generate", "--server", "127.0.0.1:1", "--prompt", "x", "--patience", "0.5", code=1)
    assert "UNAVAILABLE" in gone.stderr and "Traceback" not in gone.stderr


def test_an_answer_that_somebody_ended_is_printed_and_is_no_success(server: MockServer) -> None:
    server.servicer.default = Script(aborted=True)
    done = lockstep("generate", "--server", server.address, "--prompt", "abc", "--max-tokens", "2", code=1)
    assert done.stdout == "3 4 \n" and "ended before it was complete" in done.stderr


def test_an_interrupt_cancels_and_exits_130(server: MockServer) -> None:
    server.servicer.default = Script(gap=0.1)
    process = subprocess.Popen(
        [*LOCKSTEP, "generate", "--server", server.address, "--prompt", "abc", "--max-tokens", "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130 and b"Traceback" not in errors
    (sent,) = server.sent.values()
    assert sent.cancelled == 1


def test_help_needs_neither_grpc_nor_torch() -> None:
    code = (
        "import sys; sys.argv = ['lockstep', '--help']\n"
        "try:\n    from client.app import main; main()\n"
        "except SystemExit: pass\n"
        "print({'grpc', 'torch', 'numpy', 'google.protobuf'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
    assert all(word in done.stdout for word in ("generate", "chat", "loadtest", "stats", "health"))


def test_stats_and_health(server: MockServer) -> None:
    assert "generation_tokens_total" in lockstep("stats", "--server", server.address).stdout
    assert json.loads(lockstep("stats", "--server", server.address, "--json").stdout)["info"]["model"] == "mock"
    assert lockstep("health", "--server", server.address).stdout.strip() == "SERVING"
    assert "UNAVAILABLE" in lockstep("health", "--server", "127.0.0.1:1", code=1).stdout


def test_loadtest_writes_its_files_and_compares(server: MockServer, tmp_path: Path) -> None:
    out, html = tmp_path / "r.json", tmp_path / "r.html"
    common = ("loadtest", "--server", server.address, "--random", "--num", "6", "--input-len", "3:5")
    shown = lockstep(*common, "--output-len", "4", "--concurrency", "2", "--out", str(out), "--html", str(html))
    assert all(word in shown.stdout for word in ("TTFT", "TPOT", "ITL", "E2EL", "Output token throughput"))
    result = json.loads(out.read_text())
    assert result["completed"] == 6 and result["total_output_tokens"] == 24 and len(result["requests"]) == 6
    assert html.read_text().startswith("<!doctype html>")
    assert "change" in lockstep("loadtest", "--compare", str(out), str(out)).stdout


def test_loadtest_refuses_what_makes_no_run(server: MockServer, tmp_path: Path) -> None:
    for wrong in (
        ["--random", "--workload", "x"],
        ["--random", "--rate", "1", "--concurrency", "1"],
        ["--random", "--goodput", "speed:3"],
        ["--random", "--rate", "0"],
    ):
        lockstep("loadtest", "--server", server.address, *wrong, code=2)
    assert "no-such" in lockstep("loadtest", "--workload", str(tmp_path / "no-such.jsonl"), code=3).stderr
    gone = lockstep("loadtest", "--server", "127.0.0.1:1", "--random", "--patience", "0.5", code=3)
    assert "does not answer" in gone.stderr


class Person:
    """Types lines; an exception stands for a key."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)

    def __call__(self, prompt: str) -> str:
        del prompt
        line = self._lines.pop(0) if self._lines else EOFError
        if isinstance(line, str):
            return line
        raise line


def talk(server: MockServer, *lines: str | type[BaseException], **options: Any) -> tuple[Talk, str]:
    screen = Console(file=io.StringIO(), width=200, force_terminal=False)
    with Lockstep(server.address) as client:
        made = Talk(client, None, {"max_tokens": 5, **options}, screen, Person(*lines))
        made.run()
    assert isinstance(screen.file, io.StringIO)
    return made, screen.file.getvalue()


def test_chat_keeps_the_history_and_tells_the_rate(server: MockServer) -> None:
    made, screen = talk(server, "hello", "and\\", "more")
    assert [message["role"] for message in made.messages] == ["user", "assistant"] * 2
    assert made.messages[2]["content"] == "and\nmore"
    assert "1 2 3 4 5 " in screen and "3 4 5 6 7 " in screen and "tokens/s" in screen
    last = list(server.sent.values())[-1].requests[0]
    assert [message.role for message in last.chat.messages] == ["user", "assistant", "user"]


def test_chat_commands(server: MockServer, tmp_path: Path) -> None:
    saved = tmp_path / "talk.txt"
    made, screen = talk(
        server,
        *("/system be brief", "/set temperature 0.5", "hello", "/retry", "/undo", "/set", "hi", f"/save {saved}"),
        *("/set top_p x", "/nonsense", "/quit", "never asked"),
    )
    assert len(made.messages) == 2 and "hi" in saved.read_text() and "be brief" in saved.read_text()
    assert "temperature=0.5" in screen and "takes a number" in screen and "/clear" in screen
    request = next(iter(server.sent.values())).requests[0]
    assert request.chat.messages[0].role == "system" and request.sampling.temperature == 0.5


def test_an_interrupt_stops_the_answer_and_not_the_conversation(
    server: MockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.servicer.default = Script(gap=0.02)
    out = Console.out
    written: list[str] = []

    def impatient(self: Console, text: str, **options: Any) -> None:
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt
        out(self, text, **options)

    monkeypatch.setattr(Console, "out", impatient)
    made, screen = talk(server, "hello", "again", max_tokens=50)
    assert "stopped, 3 tokens" in screen
    assert made.messages[1]["content"] == "1 2 3 " and len(made.messages) == 4
    assert next(iter(server.sent.values())).cancelled == 1


def test_an_error_in_a_chat_is_shown_and_forgotten(server: MockServer) -> None:
    server.servicer.default = Script(fail_at=2)
    made, screen = talk(server, "hello")
    assert "INTERNAL" in screen and made.messages == []
