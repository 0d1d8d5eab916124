"""jpd: serve large language models from JAX, prefill and decode on separate device meshes.

Names are resolved when they are first used, so that `import jpd` loads no JAX.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpd.api import Server as Server
    from jpd.api import launch as launch
    from jpd.errors import ConfigError as ConfigError
    from jpd.errors import DeadlineError as DeadlineError
    from jpd.errors import JpdError as JpdError
    from jpd.errors import ModelNotFoundError as ModelNotFoundError
    from jpd.errors import OverloadedError as OverloadedError
    from jpd.errors import Problem as Problem
    from jpd.errors import RequestCancelledError as RequestCancelledError
    from jpd.errors import RequestError as RequestError
    from jpd.errors import TransferError as TransferError
    from jpd.errors import WorkerError as WorkerError
    from jpd.errors import WorkerLostError as WorkerLostError
    from jpd.frontend.chat_session import Session as Session
    from jpd.frontend.options import ChatOptions as ChatOptions
    from jpd.frontend.options import GenerateOptions as GenerateOptions
    from jpd.frontend.server import Endpoints as Endpoints
    from jpd.frontend.service import Generation as Generation
    from jpd.frontend.service import TextDelta as TextDelta
    from jpd.frontend.tool_calls import ToolCallDelta as ToolCallDelta
    from jpd.request import Timeline as Timeline
    from jpd.request import TokenLogprobs as TokenLogprobs

_HOMES = {
    "jpd.api": ("Server", "launch"),
    "jpd.frontend.chat_session": ("Session",),
    "jpd.frontend.options": ("ChatOptions", "GenerateOptions"),
    "jpd.frontend.tool_calls": ("ToolCallDelta",),
    "jpd.errors": (
        "ConfigError",
        "DeadlineError",
        "JpdError",
        "ModelNotFoundError",
        "OverloadedError",
        "Problem",
        "RequestCancelledError",
        "RequestError",
        "TransferError",
        "WorkerError",
        "WorkerLostError",
    ),
    "jpd.frontend.server": ("Endpoints",),
    "jpd.frontend.service": ("Generation", "TextDelta"),
    "jpd.request": ("Timeline", "TokenLogprobs"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jpd' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(ModuleType):
    """`jpd.launch` is the function, though a subpackage has the same name.

    Importing the subpackage sets the attribute; a property keeps the function in its place.
    """

    @property
    def launch(self) -> object:
        return __getattr__("launch")

    @launch.setter
    def launch(self, subpackage: ModuleType) -> None:
        """What the import system does; `from jpd.launch.x import y` does not need it."""


sys.modules[__name__].__class__ = _Package
