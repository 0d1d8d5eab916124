"""What the doors know of a model, from the model itself and its deployment.

Called by `jpd.api` and the command line.
"""

from jpd.checkpoint.model_source import Model
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem
from jpd.frontend.prompts import ServedModel
from jpd.frontend.tool_formats import FORMATS, ToolFormat, format_of_template


def served_model(
    model: Model, deployment: DeploymentConfig, tool_call_parser: str | None = None
) -> ServedModel:
    """What the doors know of the model, with the recommendations of its authors as defaults."""
    return ServedModel(
        name=model.name,
        tokenizer=model.tokenizer,
        vocab_size=model.config.vocab_size,
        max_model_len=deployment.engine.served_len(model.config.max_len),
        short_context=model.config.short_context,
        eos_token_ids=model.eos_token_ids,
        default_sampling=model.generation.given(),
        tool_format=_tool_format(model, tool_call_parser),
    )


def _tool_format(model: Model, name: str | None) -> ToolFormat | None:
    """By its name, or else as the chat template has it. Raises ConfigError."""
    if name is None and model.tokenizer is not None:
        name = format_of_template(model.tokenizer.tool_template)
    if name is not None and name not in FORMATS:
        rule = f"must be one of {', '.join(FORMATS)}"
        raise ConfigError([Problem("launch()", "tool_call_parser", name, rule)])
    return None if name is None else FORMATS[name]
