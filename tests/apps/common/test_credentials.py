"""No password is ever printed: every program runs with awkward ones, and its whole output is searched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path

PASSWORDS = [
    "hunter2secret",
    "hunter2secret/x",
    "hunter2secret#x",
    "hunter2secret?x",
    "hunter2@secret",
    "@hunter2secret",
    "hunter2/@secret",
    "hunter2%zzsecret",
    "hunter2%40secret",
    "hunter2:secret",
    "hunter2 secret",
    "hunter2[secret",
    "hunter2]secret",
    "hunter2\\secret",
    "hunter2'secret",
    'hunter2"secret',
    "hunter2,secret",
    "hunter2secretß",
    "123/hunter2secret",
    "123?hunter2secret",
    "123@hunter2secret",
    "hunter2secret:x",
    "hunter2password=",
    "hunter2token:z",
]
"""Each has one of the words in it that must not be seen."""

SECRET = ("hunter2", "secret")

POSTGRES = ("postgresql://ada:{}@127.0.0.1:1/db", "postgresql://:{}@127.0.0.1:1/db?connect_timeout=2")
OTHER = ("mysql://ada:{}@127.0.0.1:1/db", "ada:{}@127.0.0.1:1/db", "//ada:{}@127.0.0.1:1/db")
REDIS = ("redis://ada:{}@127.0.0.1:1/0", "rediss://:{}@127.0.0.1:1/0", "redis://127.0.0.1:1/0?password={}")

PROGRAM = """
import json, os, sys
from importlib import import_module
for module, fixed, trials in json.loads(sys.stdin.read()):
    os.environ.update(fixed)
    main = import_module(module).main
    for variable, value in trials:
        before = os.environ.get(variable)
        os.environ[variable] = value
        try:
            main(host="256.256.256.256", port=0)  # nobody can listen there, so that every start ends
        except SystemExit:
            pass
        del os.environ[variable]
        os.environ.update({} if before is None else {variable: before})
        print("tried", flush=True)
    for variable in fixed:
        del os.environ[variable]
"""


def trials(**templates: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return every setting with every password, each in the next of its templates."""
    return [(variable, url) for variable, shapes in templates.items() for url in urls_of(shapes)]


def urls_of(templates: tuple[str, ...]) -> list[str]:
    """Return every password in one of the templates, in turn."""
    return [
        template.format(password) for template, password in zip(cycle(templates), PASSWORDS, strict=False)
    ]


SERVICES: list[tuple[str, dict[str, str], list[tuple[str, str]]]] = [
    (
        "headgate_services.mail",
        {"GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "5", "LOG_LEVEL": "DEBUG"},
        trials(DATABASE_URL=POSTGRES + OTHER, RATE_LIMIT_STORE=POSTGRES + REDIS + OTHER),
    ),
    (
        "headgate_services.tiers",
        {
            "SAJU_ENABLE_RATE_LIMITING": "true",
            "SAJU_ENABLE_ATOMIC_RATE_LIMITER": "true",
            "LOG_LEVEL": "DEBUG",
        },
        trials(DATABASE_URL=POSTGRES + OTHER, SAJU_REDIS_URL=REDIS + OTHER),
    ),
    (
        "headgate_services.telegram",
        {"TELEGRAM_BOT_TOKEN": "1:x", "TELEGRAM_WEBHOOK_SECRET": "y", "RATE_LIMIT_KV": "memory://"},
        trials(RATE_LIMIT_KV=REDIS + OTHER, AGENT_URL=("http://ada:{}@127.0.0.1:1/", "ada:{}@127.0.0.1:1")),
    ),
    (
        "headgate_services.petitions",
        {"PETITION_DATABASE_TIMEOUT": "0.1", "LOG_LEVEL": "DEBUG"},
        trials(DATABASE_URL=(*POSTGRES, *OTHER, "host=127.0.0.1 port=1 user=ada password={}")),
    ),
]
"""Every service, its usual settings, and the settings with passwords."""


def test_a_service_that_starts_shows_no_password(tmp_path: Path) -> None:
    said = output_of(PROGRAM, SERVICES, tmp_path)
    assert said.count("tried") == sum(len(tried) for _, _, tried in SERVICES)
    assert leaks(said) == []


def test_the_commands_show_no_password(tmp_path: Path) -> None:
    """`serve` finds its port taken, so it ends. `check` tries each password in every template."""
    templates = (*POSTGRES, *REDIS, *OTHER)
    every = [template.format(password) for template in templates for password in PASSWORDS]
    urls = {"check": every, **dict.fromkeys(("serve", "inspect", "migrate"), urls_of(templates))}
    said = output_of(COMMANDS, urls, tmp_path)
    assert said.count("tried") == sum(map(len, urls.values()))
    assert leaks(said) == []


def output_of(program: str, given: object, folder: Path) -> str:
    """Run a program with this input, and return everything that it printed."""
    names = {"DATABASE_URL", "HOST", "PORT", "LOG_LEVEL", "ENVIRONMENT"}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(given),
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return ran.stdout + ran.stderr


COMMANDS = """
import json, socket, sys
from functools import cache
from pathlib import Path
from headgate_server import cli
cli.make_parser = cache(cli.make_parser)  # takes most of the time of a command
taken = socket.create_server(("127.0.0.1", 0))
port = str(taken.getsockname()[1])
config = Path("headgate.toml")
for command, urls in json.loads(sys.stdin.read()).items():
    for url in urls:
        config.write_text(f'limiters.login.rules = ["5/minute"]\\nlimiters.login.store = {json.dumps(url)}\\n')
        arguments = {
            "check": ["check", "headgate.toml"],
            "serve": ["serve", "--config", "headgate.toml", "--host", "127.0.0.1", "--port", port],
            "inspect": ["inspect", "login", "ada", "--config", "headgate.toml"],
            "migrate": ["migrate", url],
        }[command]
        try:
            cli.main(arguments)
        except SystemExit:
            pass
        print("tried", flush=True)
"""


def leaks(text: str) -> list[str]:
    """Return the lines that have a piece of a password in them."""
    return [line for line in text.splitlines() if any(word in line.lower() for word in SECRET)]
