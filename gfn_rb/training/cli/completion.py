"""Completion of ``gfn-rb`` by the Tab key, in bash and zsh."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from typing import Any, get_type_hints

import tyro

from gfn_rb.training.rules import groups_of

# zsh runs functions of bash after bashcompinit. Where no word fits, files do.
_SCRIPT = """\
_gfn_rb() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command="${{COMP_WORDS[1]}}" words=""
  if [ "$COMP_CWORD" -lt 2 ]; then command=""; fi
  if [ "$command" = train ] && [ "$COMP_CWORD" -gt 2 ]; then command="train ${{COMP_WORDS[2]}}"; fi
  case "$command" in
{options}
  esac
  case "$command $last" in
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
if [ -n "${{ZSH_VERSION-}}" ]; then
  autoload -Uz compinit bashcompinit && compinit && bashcompinit
fi
complete -o default -F _gfn_rb gfn-rb
"""
_CHOICES = re.compile(r"\[?\{([\w.-]+(?:,[\w.-]+)+)\}")


def completion_script(
    commands: Mapping[str, Callable[..., Any]], environments: Mapping[str, type]
) -> str:
    """Return a script that completes commands, environments, options and choices.

    Args:
        commands: functions whose parameters are options; of ``train``, the environment decides.
        environments: configurations whose fields are options.
    """
    specs = _specs({**commands, **environments})
    options = {"": [*commands, "--help", "--version"], "train": [*environments]}
    values: dict[str, list[str]] = {}
    for name in (each for each in specs if each != "train"):
        command = f"train {name}" if name in environments else name
        options[command] = [flag for each in specs[name] for flag in each["flags"] if flag != "-h"]
        if name in environments:
            others = _of_all_kinds(environments[name])
            options[command] = [*dict.fromkeys([*options[command], *others, "--help-all"])]
        for each in specs[name]:
            if found := _CHOICES.match(each["description"]):
                values |= {f"{command} {flag}": found[1].split(",") for flag in each["flags"]}
    return _SCRIPT.format(options=_cases(options), values=_cases(values))


def _of_all_kinds(config: type) -> Iterator[str]:
    """Yield the options of groups that have several kinds, of which tyro knows the default one."""
    for name, hint in get_type_hints(config).items():
        groups = groups_of(hint)
        for group in groups if len(groups) > 1 else ():
            for each in fields(group):
                if each.name != "kind":
                    yield f"--{name}.{each.name}".replace("_", "-")


def _specs(kinds: Mapping[str, Callable[..., Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return what tyro would complete for each of several functions and dataclasses."""
    printed, words = io.StringIO(), ["--tyro-print-completion", "bash"]
    with redirect_stdout(printed), suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            dict(kinds), prog="gfn-rb", args=words, config=(tyro.conf.AvoidSubcommands,)
        )
    found = re.search(r"^COMPLETION_SPEC = (.*)$", printed.getvalue(), re.MULTILINE)
    assert found is not None, "tyro prints another script"
    return {
        name: each["options"] for name, each in ast.literal_eval(found[1])["subcommands"].items()
    }


def _cases(words: Mapping[str, Iterable[str]]) -> str:
    return "\n".join(f'    "{case}") words="{" ".join(each)}" ;;' for case, each in words.items())
