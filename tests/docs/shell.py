"""Checks the names in a page's commands against the code: commands, options, targets, scripts, extras, services."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import yaml
from typer.exceptions import TyperException

from kqueue.cli import app

ROOT = Path(__file__).parents[2]
#: External programs, and one of the page's reader. Only the syntax of their commands is checked, unless a function
#: below checks more.
OTHERS = frozenset(
    {
        *("alias", "cat", "cd", "cp", "curl", "docker", "echo", "export", "git", "head", "install", "mkdir", "mv"),
        *("createdb", "dropdb", "pg_dump", "pg_restore", "psql", "redis-cli", "valkey-cli", "nohup"),
        *("journalctl", "kubectl", "openssl", "printenv", "producer", "pytest", "sbatch", "sed", "vf-eval"),
    }
)
#: Words of the shell that precede a command.
KEYWORDS = frozenset({"do", "then", "{", "}", "done", "fi"})
HEREDOC = re.compile(r"<<'?(\w+)'?[^\n]*\n.*?^\1$", re.DOTALL | re.MULTILINE)
#: A comment, or a quoted text, in which no comment begins.
COMMENT = re.compile(r"""(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*")|(?:^|(?<=\s))#[^\n]*""", re.MULTILINE)
ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
#: Placeholder in a command that is shown rather than run.
ELLIPSIS = "..."


def commands(text: str) -> list[list[str]]:
    """Return the words of each command in a shell text, without redirections and assignments."""
    text = COMMENT.sub(lambda found: found["quoted"] or "", HEREDOC.sub("", text)).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.commenters = ""
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    redirected = False
    for word in lexer:
        if word and set(word) <= set("();|&\n"):
            found.append([])
        elif word and set(word) <= set("<>&"):
            redirected = True
        elif redirected:
            redirected = False
        elif found[-1] or not (word in KEYWORDS or ASSIGNMENT.fullmatch(word)):
            found[-1].append(word)
    return [words for words in found if words and words[0] != "for"]


def fault(words: list[str], *, whole: bool = True) -> str | None:
    """Return the fault of a command that names something unknown, or None.

    Args:
        words: the command.
        whole: whether its arguments are complete. Pages also name commands within a line without them.
    """
    program, *rest = words
    match Path(program).name:
        case "kqueue":
            return of_kqueue(rest, whole)
        case "nohup":
            return fault(rest, whole=whole)
        case "alias":
            return fault(shlex.split(rest[0].partition("=")[2]), whole=whole)
        case "make":
            return of_make(rest)
        case "python" | "python3":
            return of_python(rest)
        case "pip":
            return of_pip(rest)
        case "docker":
            return of_docker(rest)
        case "kubectl" if "--" in rest:
            return fault(rest[rest.index("--") + 1 :], whole=whole)
        case _ if program in OTHERS or program == ".":
            return None
    return f"{program} is no program that the tests know (tests/docs/shell.py)"


def of_kqueue(words: list[str], whole: bool) -> str | None:
    """Parse a command line of `kqueue` as it does, without running it."""
    whole = whole and ELLIPSIS not in words
    words = [word for word in words if word != ELLIPSIS]
    command = program()
    while True:
        context = command.context_class(command, info_name=command.name, **command.context_settings)
        try:
            given, left, _ = command.make_parser(context).parse_args(list(words))
        except TyperException as error:
            # Only the last option can lack its value, because a line names it so.
            if not whole and "requires an argument" in error.format_message():
                return None
            return error.format_message()
        if not hasattr(command, "commands") or not left:
            break
        if left[0].isupper():
            return None
        if (below := command.get_command(context, left[0])) is None:
            return f"there is no command {left[0]}"
        command, words = below, left[1:]
    if left and not context.allow_extra_args:
        return f"{' '.join(left)} is too much"
    lacks = [one.name for one in command.get_params(context) if one.required and not given.get(one.name)]
    return f"without {', '.join(lacks)}" if whole and lacks else None


@cache
def program() -> Any:
    """Return Click's command `kqueue`."""
    return typer.main.get_command(app)


@cache
def makefile() -> dict[str, str]:
    """Return the targets of the Makefile with their recipes."""
    return dict(re.findall(r"^([a-z-]+):[^\n]*\n((?:\t[^\n]*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def of_make(words: list[str]) -> str | None:
    """Check targets and variables against the Makefile and its scripts, and options in ARGS against the target's
    script.
    """
    targets = [word for word in words if not ASSIGNMENT.fullmatch(word) and not word.startswith("-")]
    if unknown := [target for target in targets if target not in makefile()]:
        return f"make has no target {unknown[0]}"
    settings = re.findall(r"\b[A-Z_]+\b", (ROOT / "Makefile").read_text())
    variables = dict(word.split("=", 1) for word in words if ASSIGNMENT.fullmatch(word))
    if unknown := [one for one in variables if one not in settings]:
        return f"the Makefile has no {unknown[0]}"
    scripts = [script for target in targets for script in re.findall(r"\S+\.py", makefile()[target])]
    return of_script(scripts[0], shlex.split(variables.get("ARGS", ""))) if scripts else None


def of_python(words: list[str]) -> str | None:
    """Check that a module or a script of the repository exists, and the script's options."""
    if words[:1] == ["-m"]:
        return None if importlib.util.find_spec(words[1]) else f"there is no module {words[1]}"
    # Scripts without a folder are the reader's.
    return of_script(words[0], words[1:]) if words and "/" in words[0] else None


def of_script(script: str, words: list[str]) -> str | None:
    """Check that the options of a script's command line are in its source."""
    if not (ROOT / script).is_file():
        return f"there is no {script}"
    text = (ROOT / script).read_text()
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [option for option in options if f'"{option}"' not in text]
    return f"{script} has no {unknown[0]}" if unknown else None


def of_pip(words: list[str]) -> str | None:
    """Check the extras of an installation against the project's."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [extra for word in words for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", word)))]
    unknown = [extra for extra in asked if extra not in extras]
    return f"there is no extra {unknown[0]}" if unknown else None


@cache
def stack() -> dict[str, Any]:
    """Return the services of the compose stack."""
    services: dict[str, Any] = yaml.load((ROOT / "docker-compose.yml").read_text(), Compose)["services"]
    return services


def of_docker(words: list[str]) -> str | None:
    """Check the services of `docker compose` and the commands that run in them."""
    takes_one = {"run", "exec"} & set(words)
    if words[:1] != ["compose"] or not takes_one:
        return None
    services = stack()
    place = next((number for number, word in enumerate(words) if word in services), None)
    if place is None:
        return "no service of docker-compose.yml is named"
    inside = [*services[words[place]].get("entrypoint", []), *words[place + 1 :]]
    return fault(inside) if inside else None


class Compose(yaml.SafeLoader):
    """Reads compose files with their tags for merging."""


def _plain(loader: yaml.SafeLoader, _tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node)
    return loader.construct_sequence(node) if isinstance(node, yaml.SequenceNode) else None


Compose.add_multi_constructor("!", _plain)
