"""epdsl: a Python-embedded language for expert-parallel communication kernels.

Everything a kernel author uses is a name of this package: `import epdsl as ep`. Importing it loads neither MLIR, NumPy nor a GPU
library: the names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from epdsl_runtime import VERSION as __version__  # noqa: F401

if TYPE_CHECKING:
    from epdsl.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        api = importlib.import_module("epdsl.api")
        globals().update({public: getattr(api, public) for public in api.__all__})
        if name not in api.__all__:
            raise AttributeError(f"module 'epdsl' has no attribute {name!r}")
        return getattr(api, name)

    def __dir__() -> list[str]:
        api = importlib.import_module("epdsl.api")
        return [*globals(), *api.__all__]
