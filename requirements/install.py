"""pip install with its progress on screen; says nothing of what is installed already.

tox hides what its own install steps print, and three gigabytes take minutes.
Usage: python requirements/install.py PIP-ARGUMENT ...
"""

import subprocess
import sys


def main() -> int:
    command = [sys.executable, "-m", "pip", "install", *sys.argv[1:]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        if pip.stdout is None:
            raise OSError("pip was started without a pipe")
        for line in pip.stdout:
            if not line.startswith("Requirement already satisfied"):
                print(line, end="", flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
