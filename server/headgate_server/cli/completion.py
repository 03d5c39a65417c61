"""`completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from headgate_server.cli.common import Commands

_BASH = """\
_headgate() {{
    local words current path word
    current="${{COMP_WORDS[COMP_CWORD]}}"
    path=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in -*) ;; *) path="$path $word" ;; esac
    done
    case "${{path# }}" in
{cases}
        *) words="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _headgate headgate
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + _BASH


def add(commands: Commands, parser: argparse.ArgumentParser) -> None:
    """Add the command that prints the completion of a shell, for all commands of a parser."""
    command = commands.add(
        "completion",
        "print what lets a shell complete this command",
        lambda options: print(script(parser, options.shell), end=""),
        about="Add the output to the start-up file of your shell, or source it.",
        examples=[
            "headgate completion bash >>~/.bashrc",
            "headgate completion fish >~/.config/fish/completions/headgate.fish",
        ],
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion of a shell."""
    words = dict(_words(parser, ()))
    if shell == "fish":
        return "".join(
            f"complete -c headgate -n '{_fish_condition(path)}' -a '{' '.join(each)}'\n"
            for path, each in words.items()
        )
    cases = "\n".join(
        f'        "{" ".join(path)}") words="{" ".join(each)}" ;;' for path, each in words.items()
    )
    return (_ZSH if shell == "zsh" else _BASH).format(cases=cases)


def _words(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield what may follow each command: the commands below it and its options."""
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                words.append(name)
                yield from _words(below, (*path, name))
        else:
            words += [option for option in action.option_strings if option.startswith("--")]
            words += map(str, action.choices or ()) if not action.option_strings else ()
    yield path, words


def _fish_condition(path: tuple[str, ...]) -> str:
    if not path:
        return "__fish_use_subcommand"
    return "; and ".join(f"__fish_seen_subcommand_from {part}" for part in path)
