"""An answer that is an object of a JSON schema, read into a dataclass.

python examples/guided_json.py --model models/gemma-3-270m.toml --mesh mesh_configs/1p1d-cpu.toml
"""

import argparse
import json
from dataclasses import dataclass
from typing import Unpack

import jpd

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "degrees": {"type": "integer", "minimum": -90, "maximum": 60},
    },
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Weather:
    city: str
    degrees: int


def ask(server: jpd.Server, prompt: str, **options: Unpack[jpd.GenerateOptions]) -> Weather:
    """Only tokens that lead to such an object can be chosen; max_tokens may still cut it off."""
    options["response_format"] = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    [answer] = server.generate(prompt, **options)
    if answer.finish_reason != "stop":
        raise RuntimeError(f"the answer was cut off: {answer.text!r}")
    return Weather(**json.loads(answer.text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/gemma-3-270m.toml")
    parser.add_argument("--mesh", default="mesh_configs/1p1d-cpu.toml")
    options = parser.parse_args()
    with jpd.launch(model=options.model, mesh=options.mesh) as server:
        print(ask(server, "The weather, as JSON: ", max_tokens=64))


if __name__ == "__main__":
    main()
