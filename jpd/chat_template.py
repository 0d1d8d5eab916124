"""Chat templates: Jinja2 programs that come with a model, run in a sandbox as transformers does.

A model without a template, or with a broken one, still serves completions: the fault is told to
whoever asks for chat. Knows no tokenizer. Called by `jpd.tokenizer` and the tokenizers of
`jpd.checkpoint`.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jpd.errors import ConfigError, Problem, RequestError

logger = logging.getLogger(__name__)

DEFAULT = "default"
TOOL_USE = "tool_use"
PLAIN_CHAT = ({"role": "user", "content": "Hello"},)
NO_TEMPLATE = "this model has no chat template; use completions, or start with --chat-template FILE"


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own tojson escapes HTML, which would change the prompt."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplates:
    """The templates of one model by name, compiled once."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._faults: dict[str, str] = {}
        for name, source in self._sources.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                self._faults[name] = str(error)

    @classmethod
    def from_folder(
        cls, folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> "ChatTemplates":
        """Files of the folder before the entry in tokenizer_config.json."""
        templates = cls(_folder_sources(folder, config), special_tokens)
        templates.warn_of_faults(str(folder))
        return templates

    def warn_of_faults(self, location: str) -> None:
        """Say at load what chat requests will be told: a template there is broken, or fails."""
        for name, fault in self._faults.items():
            message = "%s: its chat template (%s) is broken, chat will be refused: %s"
            logger.warning(message, location, name, fault)
        if DEFAULT not in self._compiled:
            return
        try:
            self.render(PLAIN_CHAT, None, True, {})
        except RequestError as error:
            message = "%s: its chat template fails on one plain user message: %s"
            logger.warning(message, location, error.rule)

    def with_override(self, path: Path) -> "ChatTemplates":
        """The same with the default template from `path`. Raises ConfigError when it is broken."""
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = Problem(str(path), "--chat-template", str(error), "must be a readable file")
            raise ConfigError([problem]) from error
        templates = ChatTemplates({DEFAULT: source}, self._special_tokens)
        if templates._faults:
            rule = "must be a valid Jinja2 template"
            problem = Problem(str(path), "--chat-template", templates._faults[DEFAULT], rule)
            raise ConfigError([problem])
        return templates

    @property
    def default(self) -> str | None:
        return self._sources.get(DEFAULT)

    @property
    def for_tools(self) -> str | None:
        return self._sources.get(TOOL_USE, self.default)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. Raises RequestError without a template, or if it fails on the messages."""
        name = TOOL_USE if tools and TOOL_USE in self._sources else DEFAULT
        if name in self._faults:
            rule = f"the model's chat template is broken: {self._faults[name]}; use completions"
            raise RequestError("messages", "chat template", rule)
        if name not in self._compiled:
            raise RequestError("messages", "chat", NO_TEMPLATE)
        context = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._compiled[name].render(context)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            rule = f"refused by the model's chat template: {error}"
            raise RequestError("messages", list(messages), rule) from error
        except (AttributeError, RecursionError, MemoryError) as error:
            rule = f"the model's chat template failed: {type(error).__name__}: {error}"
            raise RequestError("messages", list(messages), rule) from error


def _folder_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    sources = _config_sources(config.get("chat_template"))
    json_path = folder / "chat_template.json"
    if json_path.exists():
        sources.update(_config_sources(_read_json(json_path).get("chat_template")))
    jinja_path = folder / "chat_template.jinja"
    if jinja_path.exists():
        sources[DEFAULT] = _read_template(jinja_path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read_template(path)
    return sources


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = "must be a readable file of UTF-8 text"
        raise ConfigError([Problem(str(path), "chat template", str(error), rule)]) from error


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(str(path), path.name, str(error), "must be JSON")]) from error
    return values if isinstance(values, Mapping) else {}


def _config_sources(value: Any) -> dict[str, str]:
    """A string, a list of {name, template}, or a table of them by name."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, Mapping):
        return {str(name): str(template) for name, template in value.items()}
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, Mapping)]
        return {str(row.get("name")): str(row.get("template")) for row in rows}
    return {}
