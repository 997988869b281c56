"""The playground as one HTML file that needs no network, put together from `assets/`.

The JavaScript is split in modules for who reads it. Here they are joined, each after those that it imports: `import`
lines go, `export` goes, and top-level names are unique over all of them. The page's policy forbids every request, and
every script and style but its own.
"""

import base64
import csv
import hashlib
import importlib.resources
import json
import re

MODULES = (
    "float32",
    "sha256",
    "tree",
    "network",
    "reduction",
    "training",
    "settings",
    "player",
    "colours",
    "stage",
    "simulation",
    "machines",
    "panels",
    "lessons",
    "page",
)
"""Each after those that it imports."""

_VARIES = ("id", "gpus", "grad_accum", "global_batch", "memory_gb", "throughput_per_gpu")
"""Columns in which rows of one configuration may differ."""

_IMPORT = re.compile(r"^import \{[^}]*\} from \"\./(\w+)\.js\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const|function|class|async)", re.MULTILINE)


def page() -> str:
    """The whole page."""
    style, script = _asset("page.css"), joined()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            # Widths of bars and colours of workers are set by the script, as properties: that needs no permission.
            f"style-src '{_digest(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    text = _asset("page.html")
    for place, content in (
        ("policy", f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ("style", style),
        ("published", json.dumps(published()).replace("<", "\\u003c")),
        ("script", script),
    ):
        text = text.replace(f"<!--{place}-->", content)
    return text


def joined() -> str:
    """The script: all modules in one."""
    parts, known = [], set()
    for name in MODULES:
        source = _asset(f"{name}.js")
        missing = {found for found in _IMPORT.findall(source) if found not in known}
        assert not missing, f"{name}.js stands before what it imports: {', '.join(sorted(missing))}"
        known.add(name)
        parts.append(_EXPORT.sub("", _IMPORT.sub("", source)))
    return "\n".join(parts)


def published() -> list[dict[str, object]]:
    """Measured efficiencies that others have published: workers, efficiency, and a label for some.

    From the planner's table: rows of one configuration on several numbers of devices, against the smallest number. Most
    of these are small runs, so four well-known larger ones are added: Horovod's (Sergeev and Del Balso 2018, on 512
    GPUs: Inception-V3, ResNet-101, VGG-16) and Goyal et al. (2017, ResNet-50, from 8 to 256 GPUs).
    """
    text = importlib.resources.files("lockstep.plan").joinpath("data", "published.csv").read_text(encoding="utf-8")
    series: dict[tuple[str, ...], dict[int, float]] = {}
    for row in csv.DictReader(text.splitlines()):
        if row["throughput_per_gpu"]:
            alike = tuple(value for key, value in row.items() if key not in _VARIES)
            series.setdefault(alike, {})[int(row["gpus"])] = float(row["throughput_per_gpu"])
    found: list[dict[str, object]] = [
        {"workers": gpus, "efficiency": round(min(1.0, speed / speeds[min(speeds)]), 3), "label": ""}
        for speeds in series.values()
        for gpus, speed in sorted(speeds.items())
        if gpus > min(speeds)
    ]
    return [
        *found,
        {"workers": 512, "efficiency": 0.90, "label": ""},
        {"workers": 512, "efficiency": 0.90, "label": "ResNet-101"},
        {"workers": 512, "efficiency": 0.68, "label": "VGG-16"},
        {"workers": 256, "efficiency": 0.90, "label": ""},
    ]


def _asset(name: str) -> str:
    return importlib.resources.files("lockstep.play").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
