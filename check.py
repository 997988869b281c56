"""Every check of the project, for people and for CI alike: lint, format, types, tests.

python check.py                  all of them, with a selection of the tests' cases: minutes
python check.py --full           with every case (FULL=1), for the night; says how long each check took
python check.py --fix            ruff mends what it can
python check.py -- ARGS          pytest gets ARGS
python check.py --soak [STEPS]   instead, a long training that must not grow, of 100,000 steps by default: bench/soak.py
"""

import os
import subprocess
import sys
import time

FOLDERS = ["src", "tests", "bench", "examples", "docs/reference.py", "check.py"]


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
    if own[:1] == ["--soak"] and len(own) <= 2:
        steps = own[1:] and ["--steps", own[1]]
        return subprocess.run([sys.executable, "bench/soak.py", *steps]).returncode
    if set(own) - {"--fix", "--full"}:
        print(__doc__)
        return 2
    environ = {**os.environ, **({"FULL": "1"} if "--full" in own else {})}
    took = []
    for command in checks("--fix" in own, pytest_arguments):
        print("$", " ".join(command), flush=True)
        begun = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *command], env=environ).returncode
        took.append(f"{command[0]} {time.monotonic() - begun:.0f} s")
        if code:
            return code
    print(f"All checks passed: {', '.join(took)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
