"""`completion`: shell scripts for the completion of commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from headgate_server.cli.common import Commands

# Zsh reserves `words` (the completed line) and `path` (the folders of programs).
_BASH = """\
_headgate() {{
    local offered current typed word
    current="${{COMP_WORDS[COMP_CWORD]}}"
    typed=""
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
        case "$typed $word" in {paths}) typed="$typed $word" ;; esac
    done
    case "$typed" in
{cases}
        *) offered="" ;;
    esac
    COMPREPLY=($(compgen -W "$offered" -- "$current"))
}}
complete -o default -F _headgate headgate
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + _BASH
_FISH = """\
function __headgate_after
    set -l typed
    for word in (commandline -opc)[2..-1]
        contains -- "$typed $word" {paths}; and set typed "$typed $word"
    end
    test "$typed" = "$argv"
end
"""


def add(commands: Commands, parser: argparse.ArgumentParser) -> None:
    """Add the command that prints completion scripts for a parser."""
    command = commands.add(
        "completion",
        "print a shell completion script",
        lambda options: print(script(parser, options.shell), end=""),
        about="Add the output to the start-up file of your shell.",
        examples=[
            "headgate completion bash >>~/.bashrc",
            "headgate completion fish >~/.config/fish/completions/headgate.fish",
        ],
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion of a shell."""
    words = {"".join(f" {word}" for word in path): " ".join(each) for path, each in _words(parser, ())}
    # Options, their values, files and names are not part of a path of commands.
    paths = [f'"{path}"' for path in words if path]
    if shell == "fish":
        return _FISH.format(paths=" ".join(paths)) + "".join(
            f"complete -c headgate -n '__headgate_after \"{path}\"' -a '{each}'\n"
            for path, each in words.items()
        )
    cases = "\n".join(f'        "{path}") offered="{each}" ;;' for path, each in words.items())
    return (_ZSH if shell == "zsh" else _BASH).format(cases=cases, paths=" | ".join(paths))


def _words(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the words that may follow each command: its subcommands and options."""
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
