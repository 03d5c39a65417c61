"""Checks of the whole project: imports, exports, packaging and documentation."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import headgate

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "headgate": ROOT / "src" / "headgate",
    "headgate_server": ROOT / "server" / "headgate_server",
    "headgate_services": ROOT / "services" / "headgate_services",
}
"""The import packages in order: each may import the packages before it."""

# --- Imports point inwards -------------------------------------------------------------------------------------------

VALUES = {
    "_checks",
    "_steps",
    "calendars",
    "clock",
    "costs",
    "decision",
    "errors",
    "keys",
    "migrations",
    "quota",
    "rules",
    "urls",
}
INSIDE = VALUES | {
    "hooks",
    "quotas",
    "algorithms",
    "stores",
    "usage",
    "_hit",
    "_concurrency",
    "_extras",
    "_fork",
    "_holding",
    "_limiting",
    "_fair_queue",
    "leases",
    "outage",
    "_async",
    "_sync",
}
"""The parts of the core. Above it is `headgate` itself, the package of public names; later parts may import from it."""

MAY_IMPORT = {
    **dict.fromkeys(VALUES, VALUES),
    "algorithms": VALUES,
    "usage": VALUES | {"algorithms"},
    "stores": VALUES | {"_concurrency", "_extras", "_fair_queue", "_fork", "algorithms"},
    "_concurrency": VALUES,
    "_hit": VALUES | {"quotas", "stores"},
    "build": set(),
    "_extras": set(),
    "_fork": set(),
    "_holding": VALUES | {"hooks", "stores"},
    "_limiting": VALUES | {"_fair_queue", "leases", "outage", "quotas", "stores"},
    "_fair_queue": {"_concurrency", "_fork", "algorithms"},
    "leases": VALUES | {"_concurrency", "_fork", "algorithms", "stores"},
    "outage": VALUES | {"_concurrency", "_fork", "algorithms", "stores"},
    "hooks": VALUES | {"_fork"},
    "quotas": VALUES | {"_fork"},
    "_async": INSIDE - {"_extras", "_sync"},
    "_sync": INSIDE - {"_extras", "_async"},
    "headgate": INSIDE | {"build"},
    "http": INSIDE | {"headgate"},
    "observe": INSIDE | {"headgate"},
    "llm": INSIDE | {"headgate", "http"},
    "policy": INSIDE | {"headgate", "observe"},
    "testing": INSIDE | {"headgate", "http"},
    "client": INSIDE | {"headgate"},
}
"""Which parts of the library each part may import, besides itself."""

NAMED_ALIKE = {
    "AsyncBudgetTransport": ["headgate.llm.httpx", "headgate.llm.httpx2"],
    "BudgetTransport": ["headgate.llm.httpx", "headgate.llm.httpx2"],
    "RateLimitMiddleware": ["headgate.http.asgi", "headgate.http.wsgi", "headgate_services.tiers.middleware"],
    "RateLimitResult": [
        "headgate_services.mail.rate_limiter",
        "headgate_services.petitions.application.ports.rate_limiter",
    ],
    "Usage": ["headgate.llm.usage", "headgate.stores.postgres.buckets"],
}
"""Names of several classes, because the contract of a service or a protocol prescribes the name."""

THIRD_PARTIES = {
    "headgate.stores.redis": {"hiredis", "redis"},
    "headgate.stores.kv.cloudflare": {"httpx"},
    "headgate.client": {"httpx"},
    "headgate.stores.kv.redis": {"redis"},
    "headgate.stores.postgres": {"asyncpg", "psycopg", "psycopg_pool"},
    "headgate_server.hosting": {"uvicorn"},
    "headgate.http.fastapi": {"fastapi", "starlette"},
    "headgate.http.aiohttp": {"aiohttp"},
    "headgate.http.flask": {"flask", "werkzeug"},
    "headgate.http.django": {"asgiref", "django"},
    "headgate.http.rest_framework": {"rest_framework"},
    "headgate.http.client.httpx": {"httpx"},
    "headgate.http.client.requests": {"requests"},
    "headgate.http.fastmcp": {"fastmcp", "mcp", "mcp_types"},
    "headgate.http.mcp": {"mcp"},
    "headgate.llm.httpx": {"httpx"},
    "headgate.llm.httpx2": {"httpx2"},
    "headgate.llm.langchain": {"langchain_core"},
    "headgate.llm.litellm": {"litellm"},
    "headgate.llm.pydantic_ai": {"pydantic_ai"},
    "headgate.observe.opentelemetry": {"opentelemetry"},
    "headgate.observe.prometheus": {"prometheus_client"},
    "headgate.testing": {"hypothesis", "pytest"},
    "headgate.testing.postgres_server": {"psycopg"},
    "headgate_server": {"msgspec", "prometheus_client", "uvicorn", "uvloop"},
    "headgate_server.envoy": {"google", "grpc", "yaml"},
    "headgate_server.http": {"httptools"},
    "headgate_services.demo": {"fastapi", "httpx", "structlog", "uvicorn"},
    "headgate_services.common.databases": {"sqlalchemy"},
    "headgate_services.common.environment": {"pydantic", "pydantic_settings"},
    "headgate_services.common.guards": {"fastapi"},
    "headgate_services.common.health": {"fastapi"},
    "headgate_services.common.metrics": {"prometheus_client"},
    "headgate_services.common.postgres": {"psycopg"},
    "headgate_services.common.settings": {"pydantic"},
    "headgate_services.common.text": {"pydantic"},
    "headgate_services.common.views": {"pydantic"},
    "headgate_services.mail": {
        "aiosmtplib",
        "fastapi",
        "httpx",
        "markdown_it",
        "prometheus_client",
        "psycopg",
        "pydantic",
        "pydantic_settings",
        "sqlalchemy",
    },
    "headgate_services.telegram": {"fastapi", "httpx", "pydantic", "pydantic_settings"},
    "headgate_services.tiers": {
        "fastapi",
        "httpx",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "redis",
        "sqlalchemy",
        "starlette",
    },
    "headgate_services.petitions": {
        "blake3",
        "fastapi",
        "prometheus_client",
        "psycopg",
        "psycopg_pool",
        "pydantic",
        "structlog",
    },
}
"""Allowed third-party imports of each part; all other parts import only the standard library."""


class Import(NamedTuple):
    """One import of one module, and its location."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path, folder: Path) -> str:
    """Return the dotted name of a module in a folder of packages."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path, package.parent): path
    for package in PACKAGES.values()
    for path in sorted(package.rglob("*.py"))
}


def imports_of(importer: str, tree: ast.AST) -> Iterator[Import]:
    """Yield every import, also those inside functions and for type checkers only.

    `from headgate.stores import memory` counts as an import of the module it names, not just of its package.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer}:{node.lineno} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(importer, full if full in SOURCES else str(node.module), node.lineno)


ALL_IMPORTS = [
    found
    for name, path in SOURCES.items()
    for found in imports_of(name, ast.parse(path.read_text(encoding="utf-8"), str(path)))
]


def package_of(module: str) -> str:
    """Return the package that a dotted name belongs to."""
    return module.split(".")[0]


def part_of(module: str) -> str:
    """Return the part of the library that a dotted name belongs to."""
    return module.removeprefix("headgate.").split(".")[0]


def test_every_part_is_listed_in_the_import_order() -> None:
    assert {part_of(name) for name in SOURCES if package_of(name) == "headgate"} <= set(MAY_IMPORT)


def test_every_folder_with_modules_is_a_package() -> None:
    """Coverage misses modules that were never imported in a folder without `__init__.py`."""
    assert {path.parent for path in SOURCES.values()} == {
        path.parent for package in PACKAGES.values() for path in package.rglob("__init__.py")
    }


def test_the_library_never_imports_the_server_nor_the_server_the_services() -> None:
    order = list(PACKAGES)
    outward = [
        str(found)
        for found in ALL_IMPORTS
        if (imported := package_of(found.imported)) in order
        and order.index(imported) > order.index(package_of(found.importer))
    ]
    assert outward == []


def test_imports_point_inwards() -> None:
    outward = [
        str(found)
        for found in ALL_IMPORTS
        if package_of(found.importer) == package_of(found.imported) == "headgate"
        and part_of(found.imported) not in {part_of(found.importer), *MAY_IMPORT[part_of(found.importer)]}
    ]
    assert outward == []


def test_services_do_not_import_each_other() -> None:
    services = [path.name for path in PACKAGES["headgate_services"].iterdir() if path.is_dir()]
    crossing = [
        str(found)
        for found in ALL_IMPORTS
        if (own := found.importer.split("."))[0] == "headgate_services"
        and own[1:2] != ["demo"]
        and (other := found.imported.split("."))[0] == "headgate_services"
        and other[1] in services
        and other[1] not in ("common", *own[1:2])
    ]
    assert crossing == []


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == NAMED_ALIKE


def test_only_one_module_configures_uvicorn() -> None:
    """All unsafe defaults, for example trusting X-Forwarded-For, are changed in one place."""
    users = {name for name, path in SOURCES.items() if "uvicorn.Config(" in path.read_text("utf-8")}
    runners = {name for name, path in SOURCES.items() if "uvicorn.run(" in path.read_text("utf-8")}
    assert (users, runners) == ({"headgate_server.hosting"}, set())


def test_third_party_packages_are_imported_only_where_allowed() -> None:
    astray = [
        str(found)
        for found in ALL_IMPORTS
        if (root := package_of(found.imported)) not in PACKAGES
        and root not in sys.stdlib_module_names
        and root not in third_parties_of(found.importer)
    ]
    assert astray == []


def third_parties_of(module: str) -> set[str]:
    return {
        name
        for home, names in THIRD_PARTIES.items()
        if module == home or module.startswith(f"{home}.")
        for name in names
    }


@pytest.mark.parametrize(
    ("package", "used"),
    [("headgate_server", ["headgate"]), ("headgate_services", ["headgate", "headgate_server"])],
)
def test_other_packages_import_only_listed_names(package: str, used: list[str]) -> None:
    """The server uses public names of the library, the services public names of both."""
    unlisted = [
        f"{name}: {found}"
        for name, path in SOURCES.items()
        if package_of(name) == package
        for found in unlisted_imports(path.read_text("utf-8"), used)
    ]
    assert unlisted == []


def unlisted_imports(source: str, packages: list[str]) -> list[str]:
    """Return the imported names of some packages that the `__all__` of their module does not list."""
    nodes = list(ast.walk(ast.parse(source)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return [module for module in modules if package_of(module) in packages and "._" in module] + [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and package_of(str(node.module)) in packages
        for alias in node.names
        if alias.name not in listed_names(str(node.module)) and not is_public_module(node.module, alias.name)
    ]


def is_public_module(package: str | None, name: str) -> bool:
    """Return whether a name is a module with an `__all__`, as in `from headgate import build`."""
    return f"{package}.{name}" in SOURCES and bool(listed_names(f"{package}.{name}"))


def listed_names(module: str) -> list[str]:
    """Return `__all__` of a module, without importing it; nothing if it has none."""
    for node in ast.parse(SOURCES[module].read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


@pytest.mark.parametrize(
    ("source", "unlisted"),
    [
        ("from headgate import Limiter", []),
        ("from headgate import limiter", ["headgate.limiter"]),
        (
            "from headgate.stores.postgres.endpoint import Endpoint",
            ["headgate.stores.postgres.endpoint.Endpoint"],
        ),
        ("def f():\n    from headgate.quota import Reader", ["headgate.quota.Reader"]),
        ("import headgate._sync.limiter", ["headgate._sync.limiter"]),
        ("from headgate import build", []),
        ("from headgate import _sync", ["headgate._sync"]),
        ("from headgate_services.mail import anything", []),
    ],
)
def test_unlisted_imports_are_found(source: str, unlisted: list[str]) -> None:
    assert unlisted_imports(source, ["headgate", "headgate_server"]) == unlisted


# --- Exports ---------------------------------------------------------------------------------------------------------


def test_the_package_exports_exactly_its_public_names() -> None:
    public = {
        name
        for name, value in vars(headgate).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, ModuleType)
    }
    assert set(headgate.__all__) == public | {"__version__"}


def test_all_packages_have_the_same_version() -> None:
    projects = {project["project"]["name"]: project["project"]["version"] for project in PYPROJECTS}
    assert projects == dict.fromkeys(projects, headgate.__version__)
    assert {name: metadata.version(name) for name in projects} == projects


ADAPTERS = {
    "headgate.http.fastmcp",
    "headgate.http.mcp",
    "headgate.llm.httpx2",
    "headgate.llm.langchain",
    "headgate.llm.litellm",
    "headgate.llm.pydantic_ai",
}
"""Modules whose packages `make setup` does not install; tools/test_adapters.sh tests them."""


@pytest.mark.parametrize("name", [name for name in SOURCES if listed_names(name) and name not in ADAPTERS])
def test_every_name_in_dunder_all_exists(name: str) -> None:
    """Ruff checks the sorting (RUF022)."""
    if (
        name == "headgate.http.rest_framework"
    ):  # it needs Django settings, which a process can configure only once
        program = f"import {name} as module; assert all(hasattr(module, name) for name in module.__all__)"
        settings = {**os.environ, "DJANGO_SETTINGS_MODULE": "django.conf.global_settings"}
        subprocess.run([sys.executable, "-c", program], env=settings, check=True)
        return
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert [export for export in module.__all__ if not hasattr(module, export)] == []


# --- Packaging and documentation -------------------------------------------------------------------------------------

PYPROJECTS = [
    tomllib.loads(ROOT.joinpath(folder, "pyproject.toml").read_text(encoding="utf-8"))
    for folder in ("", "server", "services")
]
PIN = re.compile(r"([A-Za-z0-9._-]+)==[A-Za-z0-9.]+")

# Brackets around single letters keep this pattern from finding itself.
MACHINE_TEXT = re.compile(
    r"(?<![\w.$}~-])/(?:work|root|tmp|opt|home/\w+|Users/\w+)/[\w.]"  # paths of one machine
    r"|pypi\.org/simple|pythonhosted\.org|npmjs\.org|artifactor[y]|\bjfrog\b"  # registries
    r"|(?:index-ur[l]|find-link[s])[ =]|@[ ]file:"
)


def project_files() -> Iterator[Path]:
    """Yield every file of the project, except those ignored by .gitignore."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines())]
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not matches_any(name, ignored)]
        yield from (Path(folder, name) for name in names if not matches_any(name, ignored))


def matches_any(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def test_no_file_contains_machine_paths_or_registries() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in project_files()
        for match in MACHINE_TEXT.finditer(path.read_text(encoding="utf-8", errors="ignore"))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("open('/" + "tmp/x.db')", True),
        ("see /" + "home/ada/notes", True),
        ("https://pypi." + "org/simple", True),
        ("--index" + "-url https://example.org", True),
        ("package @ " + "file:///x.whl", True),
        ("https://example.org/work/1", False),
        ("GET /v1/messages", False),
        ("$HOME/tmp/x", False),
    ],
)
def test_machine_text_is_recognised(text: str, found: bool) -> None:
    assert bool(MACHINE_TEXT.search(text)) is found


def test_the_core_depends_on_nothing() -> None:
    assert PYPROJECTS[0]["project"]["dependencies"] == []


def test_constraints_pin_every_dependency_of_the_extras() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert None not in pins
    pinned = {normalised(pin.group(1)) for pin in pins if pin}
    dependencies = [
        dependency
        for project in PYPROJECTS
        for group in (
            project["project"]["dependencies"],
            *project["project"]["optional-dependencies"].values(),
        )
        for dependency in group
    ]
    required = {normalised(re.split(r"[\[<>=]", dependency)[0]) for dependency in dependencies}
    assert required - pinned == {"headgate", "headgate-server", "headgate-services"}  # this project


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_the_typing_marker_is_shipped() -> None:
    assert all(resources.files(package).joinpath("py.typed").is_file() for package in PACKAGES)


# --- Every numbered requirement has a row on the service's page and a test --------------------------------------------

REQUIREMENTS = {"mail": ("N", 52), "telegram": ("T", 24), "tiers": ("S", 32), "petitions": ("A", 88)}
ROW = re.compile(r"^\|\s*[*`]*([A-Z]-\d\d)\b", re.MULTILINE)


def test_requirements_documentation_and_tests_agree() -> None:
    """Services without a page are not checked."""
    for service, (letter, count) in REQUIREMENTS.items():
        page = ROOT / "docs" / "services" / f"{service}.md"
        if page.exists():
            known = [f"{letter}-{number:02}" for number in range(1, count + 1)]
            tests = (ROOT / "tests" / "apps" / service).rglob("*.py")
            tested = {found for path in tests for found in marked_requirements(path.read_text("utf-8"))}
            assert sorted(ROW.findall(page.read_text("utf-8"))) == known, page
            assert sorted(tested) == known, f"tests of {service}"


def marked_requirements(source: str) -> Iterator[str]:
    """Yield the ids given to `pytest.mark.requirement` anywhere in a test file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.requirement":
            yield from (str(ast.literal_eval(argument)) for argument in node.args)
