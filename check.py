"""Every check of the project, for people and for CI alike: lint, format, types, tests.

python check.py             all of them
python check.py --fix       ruff mends what it can
python check.py -- ARGS     pytest gets ARGS
"""

import subprocess
import sys

FOLDERS = ["src", "tests", "bench", "check.py"]


def checks(fix: bool, pytest_arguments: list[str]) -> list[list[str]]:
    """The commands, in order."""
    return [
        ["ruff", "check", *FOLDERS, *(["--fix"] if fix else [])],
        ["ruff", "format", *FOLDERS, *([] if fix else ["--check"])],
        ["mypy"],
        ["pytest", *pytest_arguments],
    ]


def main(arguments: list[str]) -> int:
    """Run them until one fails; returns its exit code, or 0."""
    own, pytest_arguments = arguments, []
    if "--" in arguments:
        place = arguments.index("--")
        own, pytest_arguments = arguments[:place], arguments[place + 1 :]
    if set(own) - {"--fix"}:
        print(__doc__)
        return 2
    for command in checks("--fix" in own, pytest_arguments):
        print("$", " ".join(command), flush=True)
        code = subprocess.run([sys.executable, "-m", *command]).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
