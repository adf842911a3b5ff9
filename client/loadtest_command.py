"""`lockstep loadtest`: flags, the live display, tables, result files.

Exit code 0: every request ended well. 1: some failed. 2: wrong flags. 3: the run could not be made.
"""

import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from client import flags

if TYPE_CHECKING:
    from client.loadtest import Plan, Result
    from client.records import Goal
    from client.workload import Item


def loadtest(
    server: flags.Server = flags.SERVER,
    workload: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="A workload or prompts.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random prompts instead.")] = False,
    num: Annotated[int | None, typer.Option(help="Requests; of a file: its first ones.")] = None,
    input_len: Annotated[str, typer.Option(metavar="A:B", help="Prompt tokens, with --random.")] = "64:256",
    output_len: Annotated[str, typer.Option(metavar="A:B", help="Output tokens, with --random.")] = "32:128",
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second; 'inf' sends all at once.")] = None,
    burstiness: Annotated[float, typer.Option(help="1 is Poisson; smaller comes in bursts.")] = 1.0,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: requests at a time.")] = None,
    goodput: Annotated[list[str] | None, typer.Option(metavar="METRIC:MS", help="ttft, tpot or e2el; repeat.")] = None,
    find_rate: Annotated[bool, typer.Option("--find-rate", help="Find the highest rate that keeps --goodput.")] = False,
    target: Annotated[float, typer.Option(help="Share of requests that must be good, with --find-rate.")] = 0.95,
    temperature: Annotated[float | None, typer.Option()] = None,
    max_tokens: Annotated[int | None, typer.Option(help="For lines of a file that do not say.")] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    processes: Annotated[int, typer.Option(help="Client processes; 0 chooses.")] = 0,
    warmups: Annotated[int, typer.Option(help="Requests sent before and not counted.")] = 0,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Of one request.")] = None,
    patience: flags.Patience = flags.PATIENCE,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the result.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with plots.")] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="A.json --compare B.json", help="Compare two results; no run.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live display.")] = False,
    label: Annotated[str, typer.Option(help="A name for this run, in its files.")] = "",
    others: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
) -> None:
    """Measure a scheduler under load."""
    from client.loadtest import LoadTestError, Plan
    from client.workload import WorkloadError

    if compare:
        _compare([*compare, *(others or [])])
        return
    if others:
        raise typer.BadParameter(f"unexpected {others[0]}")
    if (workload is None) == (not random):
        raise typer.BadParameter("give either --workload FILE or --random")
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("--rate is open loop, --concurrency is closed loop: give one of them")
    if (rate is not None and not rate > 0) or (concurrency is not None and concurrency < 1) or not burstiness > 0:
        raise typer.BadParameter("--rate, --concurrency and --burstiness are positive")
    tls = flags.tls_of(tls_ca, tls_cert, tls_key)
    goal = _goal(goodput or [])
    common: Any = {"temperature": temperature, "max_tokens": max_tokens}
    common = {name: value for name, value in common.items() if value is not None}
    if rate is None and concurrency is None and random:
        rate = math.inf
    plan = Plan(server, rate, concurrency, burstiness, seed, processes, warmups, timeout, goal, token, tls)
    try:
        items = _items(workload, num, input_len, output_len, seed, common)
        items, info = _fitted(items, plan, patience)
        if find_rate:
            result, probes = _search(items, plan, target)
        else:
            result, probes = _run(items, plan, quiet), None
    except (WorkloadError, LoadTestError) as error:
        print(f"lockstep loadtest: {error}", file=sys.stderr)
        raise typer.Exit(3) from None
    document = _document(result, plan, info, len(items), label, probes)
    _finish(document, result, out, html)


def _goal(texts: list[str]) -> "Goal":
    from client.records import Goal

    limits = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            raise typer.BadParameter(f"--goodput takes METRIC:MS, not {text!r}") from None
        if name not in ("ttft", "tpot", "e2el"):
            raise typer.BadParameter(f"--goodput knows ttft, tpot and e2el, not {name!r}")
    return Goal(limits)


def _items(
    workload: Path | None, num: int | None, input_len: str, output_len: str, seed: int, common: Any
) -> "list[Item]":
    from client.workload import interval, load, random_items

    if workload is not None:
        return load(workload, common)[:num]
    return random_items(num or 100, interval(input_len), interval(output_len), seed, common)


def _fitted(items: "list[Item]", plan: "Plan", patience: float) -> "tuple[list[Item], dict[str, Any]]":
    """Ids inside the model's vocabulary, and what the server says of itself; waits for a server that is starting."""
    from client.blocking import Lockstep
    from client.errors import LockstepError
    from client.loadtest import LoadTestError
    from client.workload import folded

    try:
        with Lockstep(plan.address, token=plan.token, tls=plan.tls, retry=flags.policy_of(patience)) as client:
            info = client.info()
    except LockstepError as error:
        raise LoadTestError(f"{plan.address} does not answer: {error}") from None
    fitted, changed = folded(items, info.vocab_size)
    if changed:
        print(f"note: ids of {changed} prompts were folded into a vocabulary of {info.vocab_size}", file=sys.stderr)
    facts = {"model": info.model, "dtype": info.dtype, "tp": info.tp, "fingerprint": info.fingerprint.digest}
    return fitted, facts


def _run(items: "list[Item]", plan: "Plan", quiet: bool) -> "Result":
    from client.live import Live
    from client.loadtest import run

    if quiet or not sys.stderr.isatty():
        return run(items, plan)
    with Live(len(items)) as live:
        return run(items, plan, live.watch)


def _search(items: "list[Item]", plan: "Plan", target: float) -> "tuple[Result, list[dict[str, float]]]":
    from client.loadtest import LoadTestError, Probe, find_rate

    def tell(probe: Probe) -> None:
        word = "keeps" if probe.kept else "misses"
        print(f"{probe.rate:8.2f} requests/s: {probe.good_share:6.1%} good, {word} the goal", file=sys.stderr)

    probes = find_rate(items, plan, target, plan.rate if plan.rate and math.isfinite(plan.rate) else 1.0, watch=tell)
    best = max((probe for probe in probes if probe.kept), key=lambda probe: probe.rate, default=None)
    if best is None:
        raise LoadTestError("no rate kept the goal")
    print(f"highest rate that keeps the goal for {target:.0%} of the requests: {best.rate:.2f} requests/s")
    tried = [{"rate": probe.rate, "good_share": probe.good_share, "kept": float(probe.kept)} for probe in probes]
    return best.result, tried


def _document(
    result: "Result", plan: "Plan", info: dict[str, Any], num: int, label: str, probes: list[dict[str, float]] | None
) -> dict[str, Any]:
    rate = plan.rate if plan.rate is not None and math.isfinite(plan.rate) else ("inf" if plan.rate else None)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "backend": "lockstep",
        "label": label,
        "model_id": info["model"],
        "server": info,
        "num_prompts": num,
        "request_rate": rate,
        "burstiness": plan.burstiness,
        "max_concurrency": plan.concurrency,
        "seed": plan.seed,
        "goodput": dict(plan.goal.limits),
        "interrupted": result.interrupted,
        **result.figures,
        "client": result.client,
        "find_rate": probes,
        "requests": [record.as_json() for record in sorted(result.records, key=lambda record: record.sent)],
    }


def _finish(document: dict[str, Any], result: "Result", out: Path | None, html: Path | None) -> None:
    from rich.console import Console

    from client.tables import notes, summary

    console = Console()
    console.print(summary(document))
    for note in notes(document):
        console.print(note, markup=False)
    try:
        if out is not None:
            out.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
            console.print(f"wrote {out}", markup=False)
        if html is not None:
            from client.report import page

            html.write_text(page(document), encoding="utf-8")
            console.print(f"wrote {html}", markup=False)
    except OSError as error:
        print(f"lockstep loadtest: {error.filename}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(3) from None
    if result.interrupted:
        raise typer.Exit(130)
    if document["failed"]:
        raise typer.Exit(1)


def _compare(paths: list[Path]) -> None:
    from rich.console import Console

    from client.tables import comparison

    if len(paths) != 2:
        raise typer.BadParameter("--compare takes two result files")
    documents = []
    for path in paths:
        try:
            documents.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{path}: {error}") from None
    Console().print(comparison(documents[0], documents[1], [path.name for path in paths]))
