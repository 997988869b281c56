"""What `mkdocs build` takes from elsewhere: names and commands, changes, contributing, the playground, examples.

MkDocs calls the functions here by their names (`hooks:` in mkdocs.yml). They need lockstep to be importable.
"""

import argparse
import ast
import importlib
import inspect
import itertools
import os
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import lockstep
from lockstep.cli.main import COMMANDS, make_parser
from lockstep.play.page import page as playground

ROOT = Path(__file__).parents[1]
MADE = ("api.md", "commands.md", "changes.md", "contributing.md")
PLAYGROUND = "playground.html"
"""The page that `lockstep play` opens, as it is; play.md links to it."""
FIRST = ("model_does_not_fit.md", "hosts.md")
"""For "out of memory", and for "slurm"."""
WIDTH = 100
"""Of a command's help, in letters."""

WIRES = ("Full", "Half", "Int8", "Sign", "TopK", "LowRank", "After", "Auto")
"""Of the names of `lockstep.wire`, those for a model; the others are for wires of one's own."""

_ARGUMENT = re.compile(r"[a-z_]+(, [a-z_]+)*: ")
"""How the line of a docstring begins that describes arguments."""
_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made of something else, and the examples."""
    texts = api(), commands(), _moved(ROOT / "CHANGELOG.md"), _moved(ROOT / "CONTRIBUTING.md")
    for name, text in zip(MADE, texts, strict=True):
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, PLAYGROUND, content=playground()))
    for path in sorted((ROOT / "examples").rglob("*.*")):
        if path.suffix in (".py", ".ipynb", ".yaml"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have the search put the pages in `FIRST` before others with the same words; link to the site's own examples."""
    if page.file.src_uri in FIRST:
        page.meta.setdefault("search", {"boost": 4})
    return markdown.replace("](../examples/", "](examples/")


def on_post_build(config: MkDocsConfig) -> None:
    """Have the search work where pages are opened as files, which cannot read the index as JSON."""
    folder = Path(config.site_dir, "search")
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def _moved(path: Path) -> str:
    """A page from beside docs/, as a page in it."""
    return re.sub(r"\]\(docs/", "](", path.read_text(encoding="utf-8"))


# Names


def api() -> str:
    """What stands in `lockstep.__all__`, from its docstrings."""
    errors = [name for name in lockstep.__all__ if _is_error(getattr(lockstep, name))]
    lines = [
        "# Names",
        "",
        "What `import lockstep` gives: functions and classes, errors, encodings, results.",
        "",
    ]
    for name in [*(each for each in lockstep.__all__ if each not in errors), *errors]:
        lines += _named(f"lockstep.{name}", getattr(lockstep, name))
    for name in WIRES:
        lines += _named(f"lockstep.wire.{name}", getattr(lockstep.wire, name))
    for result in _results():
        lines += _named(result.__name__, result)
    return "\n".join(lines)


def _results() -> list[type]:
    """What functions and methods return that is a class of ours with another name than those above."""
    found: dict[str, type] = {}
    for value in (getattr(lockstep, name) for name in lockstep.__all__):
        functions = [getattr(value, name) for name, _ in _methods(value)] if inspect.isclass(value) else [value]
        for function in filter(inspect.isroutine, functions):
            returned = inspect.signature(function, eval_str=True).return_annotation
            for each in (returned, *typing.get_args(returned)):
                if inspect.isclass(each) and each.__module__.startswith("lockstep.") and inspect.getdoc(each):
                    found[each.__name__] = each
    return [found[name] for name in sorted(found.keys() - {*lockstep.__all__})]


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _named(name: str, value: Any) -> Iterator[str]:
    yield from [f"## {name}", ""]
    if not _is_error(value) and name.startswith("lockstep."):
        yield from _signature(name, value)
    yield from [_text(value), ""]
    if inspect.isclass(value) and not _is_error(value):
        for attribute, text in _attributes(value):
            yield f"- **`{attribute}`**: {text}"
        yield ""
        for method, function in _methods(value):
            yield from [f"### {value.__name__}.{method}", ""]
            if isinstance(function, property):
                yield from ["*A property.*", ""]
            else:
                yield from _signature(method, getattr(value, method))
            yield from [_text(function), ""]


def _methods(value: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that a page, the README or an example speaks of: others are for the engine itself."""
    sources = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    spoken_of = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for name, function in vars(value).items():
        is_described = inspect.isroutine(function) or isinstance(function, property | classmethod | staticmethod)
        if not name.startswith("_") and is_described and inspect.getdoc(function) and name != "forward":
            used = rf"`{name}\(|\b(?:model|trainer|world|watcher|loader|out|{value.__name__})\.{name}\b"
            if re.search(used, spoken_of):
                yield name, function


def _attributes(value: type) -> Iterator[tuple[str, str]]:
    """The fields of a class and of its ancestors of ours, with what stands beneath them."""
    for kind in reversed([each for each in value.__mro__ if each.__module__.startswith("lockstep.")]):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(said))):
                    if not (name := ast.unparse(field.target)).startswith("_"):
                        yield name, " ".join(said.split())


def _signature(name: str, value: Any) -> list[str]:
    """A call with all its arguments, one on a line where there are many."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return []
    words: list[str] = []
    has_star = False
    for each in parameters:
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not has_star:
            words.append("*")
        has_star |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(f"{stars}{each.name}" + ("" if each.default is each.empty else f"={each.default!r}"))
    call = f"{name}({', '.join(words)})"
    if len(call) > WIDTH:
        call = "\n".join([f"{name}(", *(f"    {word}," for word in words), ")"])
    return ["```python", call, "```", ""]


def _text(value: Any) -> str:
    """A docstring as Markdown: what describes arguments becomes a list, names of pages become links."""
    lines: list[str] = []
    in_list = False
    for line in (inspect.getdoc(value) or "").splitlines():
        if _ARGUMENT.match(line):
            names, _, rest = line.partition(": ")
            lines += [*([] if in_list else [""]), f"- **`{names}`**: {rest}"]
            in_list = True
        elif in_list and line.startswith("    "):
            lines.append("  " + line.strip())
        else:
            lines += ["", line] if in_list and line else [line]
            in_list = False
    return _PAGE.sub(lambda match: f"[{match[1].replace('_', ' ')}]({match[1]}.md)", "\n".join(lines))


# Commands


def commands() -> str:
    """What every command says for --help."""
    os.environ["COLUMNS"] = str(WIDTH)
    modules = [importlib.import_module(f"lockstep.cli.{name}") for name in COMMANDS]
    lines = ["# Commands", "", "What `lockstep COMMAND --help` says.", ""]
    for parser in _parsers(make_parser(modules)):
        lines += [f"## {parser.prog}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _parsers(each)
