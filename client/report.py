"""The page of a load test: one self-contained HTML file, its plots drawn by our own script from the data inside it."""

import json
from importlib.resources import files
from typing import Any

_MAX_POINTS = 20_000  # messages that a page draws; more are thinned


def page(document: dict[str, Any]) -> str:
    """The page as text. It loads nothing from anywhere."""
    folder = files("client")
    script = (folder / "report.js").read_text(encoding="utf-8")
    template = (folder / "report.html").read_text(encoding="utf-8")
    # "</" inside a JSON string would end the script element.
    data = json.dumps(_thinned(document), allow_nan=False).replace("</", "<\\/")
    return template.replace("/*SCRIPT*/", script).replace("/*DATA*/", data)


def _thinned(document: dict[str, Any]) -> dict[str, Any]:
    requests = document["requests"]
    messages = sum(len(request["times"]) for request in requests)
    keep = max(1, messages // _MAX_POINTS)
    if keep == 1:
        return document
    thin = []
    for request in requests:
        times, counts = request["times"], request["counts"]
        # The first message and the last stay; the tokens of those between are added to the next one that is kept.
        kept_times, kept_counts, held = [], [], 0
        for index, (time, count) in enumerate(zip(times, counts, strict=True)):
            held += count
            if index == 0 or index == len(times) - 1 or index % keep == 0:
                kept_times.append(time)
                kept_counts.append(held)
                held = 0
        thin.append({**request, "times": kept_times, "counts": kept_counts})
    return {**document, "requests": thin}
