"""A result as tables for a terminal: one run, or two side by side."""

from typing import Any

from rich.table import Table

ROWS = (
    ("Successful requests", "completed", "", 0),
    ("Failed requests", "failed", "", 0),
    ("Benchmark duration", "duration", "s", 2),
    ("Total input tokens", "total_input_tokens", "", 0),
    ("Total generated tokens", "total_output_tokens", "", 0),
    ("Request throughput", "request_throughput", "req/s", 2),
    ("Request goodput", "request_goodput", "req/s", 2),
    ("Output token throughput", "output_throughput", "tok/s", 1),
    ("Peak output token throughput", "max_output_tokens_per_s", "tok/s", 1),
    ("Peak concurrent requests", "max_concurrent_requests", "", 0),
    ("Total token throughput", "total_token_throughput", "tok/s", 1),
)

LATENCIES = (
    ("TTFT", "ttft"),
    ("TPOT", "tpot"),
    ("ITL", "itl"),
    ("E2EL", "e2el"),
    ("gap per token", "token_gap"),
    ("TTFT from intended start", "ttft_intended"),
    ("E2EL from intended start", "e2el_intended"),
)
STATISTICS = ("mean", "median", "p90", "p99")

# Whether more is better, for colours; a figure that is not here has no good direction.
_BETTER = {"throughput": 1, "goodput": 1, "max_output_tokens_per_s": 1, "failed": -1, "duration": -1, "_ms": -1}


def summary(document: dict[str, Any]) -> Table:
    """One run: totals, then latencies in milliseconds."""
    loop = (
        f"concurrency {document['max_concurrency']}"
        if document["max_concurrency"]
        else (f"{document['request_rate']} requests/s" if document["request_rate"] else "the workload's arrivals")
    )
    table = Table(title=f"{document['model_id']}: {document['num_prompts']} requests, {loop}", title_justify="left")
    for name in ("ms", *STATISTICS):
        table.add_column("" if name == "ms" else name, justify="left" if name == "ms" else "right")
    for title, key, unit, digits in ROWS:
        value = document.get(key)
        if value is not None:
            table.add_row(f"{title} ({unit})" if unit else title, f"{value:,.{digits}f}", "", "", "")
    table.add_section()
    for title, key in LATENCIES:
        values = [document[f"{statistic}_{key}_ms"] for statistic in STATISTICS]
        if values[0] is not None:
            table.add_row(f"{title} (ms)", *(f"{value:,.2f}" for value in values))
    return table


def notes(document: dict[str, Any]) -> list[str]:
    """What a reader must know beside the figures: failures, and whether the client itself was the limit."""
    said = [f"{count} requests failed with {code}" for code, count in sorted(document["errors"].items())]
    first_errors = {record["code"]: record["error"] for record in document["requests"] if record["error"]}
    said.extend(f"  {code}: {message}" for code, message in sorted(first_errors.items()))
    client = document["client"]
    if client["bottleneck"]:
        said.append(
            f"the client was the bottleneck: {client['cpu_share']:.0%} of a core, timers {client['p99_lag_ms']:.0f} ms "
            f"late at p99; its latencies are too long. Use --processes {2 * client['processes']}."
        )
    if client["starved"]:
        said.append(
            f"the client's machine was busy: it used {client['cpu_share']:.0%} of a core and its timers were still "
            f"{client['p99_lag_ms']:.0f} ms late at p99, which is in every latency above. Give it a core of its own."
        )
    if document["request_rate"] not in (None, "inf") and client["max_late_send_ms"] > 20:
        said.append(f"a request was sent {client['max_late_send_ms']:.0f} ms late; see the rows from intended start")
    if document["interrupted"]:
        said.append("interrupted: these are the requests that had ended")
    return said


def comparison(first: dict[str, Any], second: dict[str, Any], names: list[str]) -> Table:
    """Two runs and the change from the first to the second; green is better."""
    table = Table(title="the change is from the first to the second", title_justify="left")
    table.add_column("")
    for name in (*names, "change"):
        table.add_column(name, justify="right")
    keys = [(f"{title} ({unit})" if unit else title, key, digits) for title, key, unit, digits in ROWS]
    for title, key in LATENCIES:
        keys.extend((f"{statistic} {title} (ms)", f"{statistic}_{key}_ms", 2) for statistic in ("mean", "p99"))
    for title, key, digits in keys:
        before, after = first.get(key), second.get(key)
        if before is None or after is None:
            continue
        table.add_row(title, f"{before:,.{digits}f}", f"{after:,.{digits}f}", _change(key, before, after))
    for key in ("model_id", "server", "num_prompts", "request_rate", "max_concurrency"):
        if first.get(key) != second.get(key):
            table.add_row(f"differs: {key}", str(first.get(key)), str(second.get(key)), "")
    return table


def _change(key: str, before: float, after: float) -> str:
    if before == 0:
        return "" if after == 0 else "new"
    change = after / before - 1
    direction = next((sign for word, sign in _BETTER.items() if word in key), 0)
    if abs(change) < 0.02 or direction == 0:
        return f"{change:+.1%}"
    return f"[{'green' if change * direction > 0 else 'red'}]{change:+.1%}[/]"
