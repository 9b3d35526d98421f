"""The tests of tests/sim over the stand-in for HIP, whose kernels the simulator runs. Takes what pytest takes:

    python tests/unit/standin/suite.py tests/sim/test_low_latency.py --device hip -m "not slow"

`--device hip` has two devices, and tests of two ranks run as two processes; `hip:0` has as many ranks as a test wants on one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from build import HERE, build

ROOT = HERE.parents[2]


def main(arguments: list[str]) -> int:
    # IPC handles of the stand-in are paths of at most 63 characters.
    with tempfile.TemporaryDirectory(prefix="epdsl-", dir="/tmp") as folder:
        paths = [str(path) for path in (HERE / "simulated", ROOT, ROOT / "runtime")]
        state = Path(folder, "state")
        state.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "LD_LIBRARY_PATH": str(build("hip", Path(folder))),
            "STANDIN_DIR": str(state),
        }
        return subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
