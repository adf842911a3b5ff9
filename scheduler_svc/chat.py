"""Chat messages to a prompt, through the model's own template in a sandbox.

The template comes with the snapshot, the messages from anyone; messages are only ever values, never template text.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatError(Exception):
    """The template is missing, or refuses these messages; the text is for the caller."""


class _Generation(Extension):
    """`{% generation %}` marks what training counts; in a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The chat template of one snapshot."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        if source is not None:
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
            )
            environment.filters["tojson"] = _to_json
            environment.globals["raise_exception"] = _raise
            environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
            self._template = environment.from_string(source)

    @classmethod
    def of_snapshot(
        cls, folder: Path, config: Mapping[str, object], special_tokens: Mapping[str, str]
    ) -> "ChatTemplate":
        return cls(_source(folder, config), special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises ChatError."""
        if self._template is None:
            raise ChatError("the model has no chat template")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ChatError(f"the model's chat template refuses these messages: {error}") from error


def _source(folder: Path, config: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    template: object = config.get("chat_template")
    if template is None and (folder / "chat_template.json").exists():
        template = json.loads((folder / "chat_template.json").read_text("utf-8")).get("chat_template")
    if isinstance(template, list):  # several named ones
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
