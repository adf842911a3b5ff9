"""The command `lockstep`: generate, chat, loadtest, stats, health.

Knows flags, output and exit codes; everything else is the library's. Text goes to standard output as it comes, errors
to standard error; exit code 1 is a request that failed, 2 wrong flags, 130 an interrupt.
Invariant: no gRPC is imported before a command needs it.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from client import flags
from client.loadtest_command import loadtest

app = typer.Typer(
    help="Talk to a Lockstep scheduler.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(help="Measure a scheduler under load.")(loadtest)


@contextmanager
def reported() -> Iterator[None]:
    """Turns what can go wrong into a message and an exit code."""
    from client.errors import LockstepError

    try:
        yield
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        for name, why in error.fields.items():
            if why not in str(error):
                print(f"  {name}: {why}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def generate(
    server: flags.Server = flags.SERVER,
    prompt: Annotated[str | None, typer.Option(help="Text; '-' reads standard input.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="Token ids instead of text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message, with --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Absent: to the context limit.")] = None,
    min_tokens: Annotated[int | None, typer.Option()] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Absent: 1.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    presence_penalty: Annotated[float | None, typer.Option()] = None,
    frequency_penalty: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed and request, same bits.")] = None,
    n: Annotated[int | None, typer.Option(help="Independent choices.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeat for several.")] = None,
    stop_token_ids: Annotated[str | None, typer.Option(metavar="1,2,3")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    logprobs: Annotated[int | None, typer.Option(metavar="K", help="Logprobs, with K alternatives.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(metavar="K")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Total deadline.")] = None,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    patience: flags.Patience = flags.PATIENCE,
) -> None:
    """Answer one prompt; text streams as it comes."""
    if (prompt is None) == (prompt_ids is None):
        raise typer.BadParameter("give either --prompt or --prompt-ids")
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "n": n,
        "stop": stop or None,
        "stop_token_ids": _ids(stop_token_ids, "--stop-token-ids") if stop_token_ids else None,
        "ignore_eos": ignore_eos or None,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "timeout_s": timeout,
    }
    from client.blocking import Lockstep
    from client.requests import Chat, build

    asked: Any = _ids(prompt_ids, "--prompt-ids") if prompt_ids is not None else prompt
    if asked == "-":
        asked = sys.stdin.read()
    if chat:
        if prompt_ids is not None:
            raise typer.BadParameter("--chat takes --prompt")
        asked = Chat([*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": asked}])
    with reported():
        request = build(asked, **{name: value for name, value in options.items() if value is not None})
        tls = flags.tls_of(tls_ca, tls_cert, tls_key)
        with Lockstep(server, token=token, tls=tls, retry=flags.policy_of(patience)) as client:
            with client.stream_request(request) as stream:
                for delta in stream:
                    if not as_json and (n or 1) == 1:
                        print(delta.text, end="", flush=True)
            answer = stream.completion
    if as_json:
        print(json.dumps(answer.as_json(), allow_nan=False, ensure_ascii=False))
    elif (n or 1) == 1:
        print()
    else:
        for choice in answer.choices:
            print(f"[{choice.index}] {choice.text}")
    if any(choice.finish_reason not in ("stop", "length") for choice in answer.choices):
        print("lockstep: the request was ended before it was complete", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def chat(
    server: flags.Server = flags.SERVER,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option()] = None,
    temperature: Annotated[float | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    patience: flags.Patience = flags.PATIENCE,
) -> None:
    """Talk with the model; /help inside lists what can be done."""
    from client.blocking import Lockstep
    from client.chat import Talk

    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    options: Any = {name: value for name, value in given.items() if value is not None}
    with reported():
        tls = flags.tls_of(tls_ca, tls_cert, tls_key)
        with Lockstep(server, token=token, tls=tls, retry=flags.policy_of(patience)) as client:
            Talk(client, system, options).run()


@app.command()
def stats(
    server: flags.Server = flags.SERVER,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    watch: Annotated[float | None, typer.Option(metavar="SECONDS", help="Repeat until interrupted.")] = None,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    patience: flags.Patience = flags.PATIENCE,
) -> None:
    """The model behind a scheduler, and its counters."""
    import time

    from client.blocking import Lockstep

    with reported():
        tls = flags.tls_of(tls_ca, tls_cert, tls_key)
        with Lockstep(server, token=token, tls=tls, retry=flags.policy_of(patience)) as client:
            while True:
                _print_stats(client, as_json)
                if watch is None:
                    return
                time.sleep(watch)


@app.command()
def health(
    server: flags.Server = flags.SERVER,
    service: Annotated[str, typer.Option(help="A service's full name; empty asks for the whole server.")] = "",
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait so long for SERVING.")] = 0.0,
    tls_ca: flags.TlsCa = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
) -> None:
    """Ask grpc.health.v1; exit code 0 means SERVING. Also for workers."""
    from client.health import state_of

    with reported():
        state = state_of(server, flags.tls_of(tls_ca, tls_cert, tls_key), service, wait)
    print(state)
    if state != "SERVING":
        raise typer.Exit(1)


def _print_stats(client: Any, as_json: bool) -> None:
    reply, info = client.stats(), client.info()
    facts = {name.name: value for name, value in info.ListFields() if name.name != "fingerprint"}
    facts["eos_token_ids"] = list(info.eos_token_ids)
    facts["fingerprint"] = {"digest": info.fingerprint.digest, "parts": dict(info.fingerprint.parts)}
    if as_json:
        print(json.dumps({"state": reply.state, "stats": dict(reply.values), "info": facts}, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{info.model}: {reply.state}", show_header=False)
    for name, value in facts.items():
        if name != "fingerprint":
            table.add_row(name, str(value))
    table.add_row("fingerprint", info.fingerprint.digest, end_section=True)
    for name, value in sorted(reply.values.items()):
        table.add_row(name, f"{value:,.6g}")
    Console().print(table)


def _ids(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{flag} takes numbers separated by commas, not {text!r}") from None


def main() -> None:
    """The console script."""
    app(prog_name="lockstep")


if __name__ == "__main__":
    main()
