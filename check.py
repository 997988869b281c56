"""Every check of the project, for people and for CI alike: lint, format, types, tests.

python check.py                  all of them, with a selection of the tests' cases: minutes
python check.py --full           with every case (FULL=1), for the night; says how long each check took
python check.py --fix            ruff mends what it can
python check.py -- ARGS          pytest gets ARGS
python check.py --soak [STEPS]   instead, a long training that must not grow, of 100,000 steps by default: bench/soak.py
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDERS = ["src", "tests", "bench", "examples", "docs/reference.py", "check.py"]


def checks(fix: bool) -> list[list[str]]:
    """The commands before the tests, in order."""
    return [
        ["ruff", "check", *FOLDERS, *(["--fix"] if fix else [])],
        ["ruff", "format", *FOLDERS, *([] if fix else ["--check"])],
        ["mypy"],
    ]


def run_tests(arguments: list[str], environ: dict[str, str]) -> int:
    """All tests, in two parts side by side, since those of workers wait for much of their time; or what is named."""
    early = [str(path) for path in sorted(Path("tests/workers").glob("test_[a-r]*.py"))]
    parts = [arguments] if arguments else [early, ["tests", *(f"--ignore={path}" for path in early)]]
    with contextlib.ExitStack() as files:
        started = []
        for part in parts:
            print("$ pytest", *part, flush=True)
            output = files.enter_context(tempfile.TemporaryFile()) if started else None  # Shown after the first part's.
            command = [sys.executable, "-m", "pytest", *part]
            started.append((subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT), output))
        codes = []
        for process, output in started:
            codes.append(process.wait())
            if output is not None:
                output.seek(0)
                shutil.copyfileobj(output, sys.stdout.buffer)
                sys.stdout.flush()
    return max(codes, key=abs)


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
    for command in [*checks("--fix" in own), ["pytest"]]:
        begun = time.monotonic()
        if command == ["pytest"]:
            code = run_tests(pytest_arguments, environ)
        else:
            print("$", " ".join(command), flush=True)
            code = subprocess.run([sys.executable, "-m", *command], env=environ).returncode
        took.append(f"{command[0]} {time.monotonic() - begun:.0f} s")
        if code:
            return code
    print(f"All checks passed: {', '.join(took)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
