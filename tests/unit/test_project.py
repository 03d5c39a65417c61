"""What must stay true of the project as a whole: who imports whom, what is exported, what is written where."""

from __future__ import annotations

import ast
import importlib
import os
import re
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
PACKAGE = ROOT / "src" / "headgate"

# --- Imports point inwards -------------------------------------------------------------------------------------------

VALUES = {"calendars", "clock", "costs", "decision", "errors", "keys", "quota", "rules", "urls"}
INSIDE = VALUES | {
    "hooks",
    "quotas",
    "algorithms",
    "stores",
    "_asking",
    "_awaiting",
    "_concurrency",
    "_extras",
    "_fork",
    "_async",
    "_sync",
}
"""The core. `headgate` itself, the package of public names, comes next; what follows may import from it."""

MAY_IMPORT = {
    **dict.fromkeys(VALUES, VALUES),
    "algorithms": VALUES,
    "stores": VALUES | {"_extras", "_fork", "algorithms"},
    "_concurrency": set(),
    "_asking": VALUES | {"_awaiting", "quotas", "stores"},
    "_awaiting": VALUES | {"stores"},
    "_build": set(),
    "hosting": set(),
    "_extras": set(),
    "_fork": set(),
    "hooks": VALUES,
    "quotas": VALUES | {"_fork"},
    "_async": VALUES
    | {"algorithms", "stores", "_asking", "_awaiting", "_concurrency", "_fork", "hooks", "quotas"},
    "_sync": VALUES
    | {"algorithms", "stores", "_asking", "_awaiting", "_concurrency", "_fork", "hooks", "quotas"},
    "headgate": INSIDE | {"_build"},
    "circuit": {"_async", "_sync", "stores"},
    "http": INSIDE | {"headgate"},
    "observe": INSIDE | {"headgate"},
    "policy": INSIDE | {"headgate", "observe"},
    "replay": INSIDE | {"headgate", "http", "observe", "policy"},
    "testing": INSIDE | {"headgate"},
    "client": INSIDE | {"headgate"},
    "server": INSIDE | {"headgate", "circuit", "hosting", "http", "observe", "policy", "replay"},
    "apps": INSIDE | {"headgate", "circuit", "hosting", "http", "observe", "policy"},
    "demo": INSIDE
    | {"headgate", "hosting", "http", "observe", "policy", "client", "server", "apps", "testing"},
    "cli": INSIDE
    | {
        "headgate",
        "http",
        "observe",
        "policy",
        "replay",
        "client",
        "server",
        "apps",
        "testing",
        "demo",
        "_build",
    },
}
"""Which parts of headgate each part may import, besides itself."""

THIRD_PARTIES = {
    "stores.redis": {"redis"},
    "stores.kv.cloudflare": {"httpx"},
    "client": {"httpx"},
    "stores.kv.redis": {"redis"},
    "stores.postgres": {"asyncpg", "psycopg", "psycopg_pool"},
    "hosting": {"uvicorn"},
    "http.fastapi": {"fastapi", "starlette"},
    "http.flask": {"flask", "werkzeug"},
    "http.django": {"asgiref", "django"},
    "http.rest_framework": {"rest_framework"},
    "observe.prometheus": {"prometheus_client"},
    "replay.sources": {
        "compression",
        "zstandard",
    },  # the first is in the standard library from Python 3.14 on
    "testing": {"hypothesis", "pytest"},
    "testing.postgres_server": {"psycopg"},
    "server": {"msgspec", "prometheus_client", "uvicorn", "uvloop"},
    "demo": {"httpx", "structlog", "uvicorn", "uvloop"},
    "apps.common.databases": {"sqlalchemy"},
    "apps.common.health": {"fastapi"},
    "apps.common.postgres": {"psycopg"},
    "apps.mail": {
        "aiosmtplib",
        "fastapi",
        "psycopg",
        "pydantic",
        "pydantic_settings",
        "sqlalchemy",
    },
    "apps.telegram": {"fastapi", "httpx", "pydantic"},
    "apps.tiers": {
        "fastapi",
        "httpx",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "redis",
        "sqlalchemy",
        "starlette",
    },
    "apps.petitions": {
        "blake3",
        "fastapi",
        "prometheus_client",
        "psycopg",
        "psycopg_pool",
        "pydantic",
        "structlog",
    },
}
"""What may be imported from outside the standard library, and where; everything else makes do without."""


class Import(NamedTuple):
    """One import of one module, and where it stands."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"headgate.{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    """Return the dotted name inside headgate; the package itself is `headgate`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "headgate"


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(importer: str, tree: ast.AST) -> Iterator[Import]:
    """Yield every import, also those inside functions and for type checkers only.

    `from headgate.stores import memory` counts as an import of the module it names, not just of its package.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"headgate.{importer}:{node.lineno} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full.removeprefix("headgate.") in SOURCES
                yield Import(importer, full if is_module else str(node.module), node.lineno)


ALL_IMPORTS = [
    found
    for name, path in SOURCES.items()
    for found in imports_of(name, ast.parse(path.read_text(encoding="utf-8"), str(path)))
]


def part_of(module: str) -> str:
    """Return the part of headgate that a dotted name belongs to."""
    return module.removeprefix("headgate.").split(".")[0]


def test_every_part_has_its_place_in_the_import_order() -> None:
    assert {part_of(name) for name in SOURCES} <= set(MAY_IMPORT)


def test_every_folder_with_modules_is_a_package() -> None:
    """Coverage does not see what nobody imported in a folder without `__init__.py`."""
    assert {path.parent for path in SOURCES.values()} == {
        path.parent for path in PACKAGE.rglob("__init__.py")
    }


def test_imports_point_inwards() -> None:
    outward = [
        str(found)
        for found in ALL_IMPORTS
        if found.imported.split(".")[0] == "headgate"
        and part_of(found.imported) not in {part_of(found.importer), *MAY_IMPORT[part_of(found.importer)]}
    ]
    assert outward == []


def test_apps_do_not_import_each_other() -> None:
    crossing = [
        str(found)
        for found in ALL_IMPORTS
        if found.importer.startswith("apps.")
        and found.imported.startswith("headgate.apps.")
        and found.imported.split(".")[2] not in ("common", found.importer.split(".")[1])
    ]
    assert crossing == []


def test_only_one_module_configures_uvicorn() -> None:
    """Each of its defaults that is wrong for us is set there once; believing X-Forwarded-For is one of them."""
    users = {name for name, path in SOURCES.items() if "uvicorn.Config(" in path.read_text("utf-8")}
    runners = {name for name, path in SOURCES.items() if "uvicorn.run(" in path.read_text("utf-8")}
    assert (users, runners) == ({"hosting"}, {"hosting"})


def test_third_parties_are_imported_only_where_they_belong() -> None:
    astray = [
        str(found)
        for found in ALL_IMPORTS
        if (root := found.imported.split(".")[0]) != "headgate"
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


def test_apps_import_public_names_only() -> None:
    """Private attributes are ruff's business (SLF001); this is about modules and the names in them."""
    private = []
    for name, path in SOURCES.items():
        if part_of(name) == "apps":
            private += [f"headgate.{name}: {used}" for used in private_imports(name, path.read_text("utf-8"))]
    assert private == []


def private_imports(importer: str, source: str) -> list[str]:
    """Return the private names that an app imports from the rest of headgate; its own are its own business."""
    own = ".".join(["headgate", *importer.split(".")[:2], ""])
    return [
        name
        for name in imported_names(ast.parse(source))
        if name.startswith("headgate.") and not name.startswith(own) and "._" in name
    ]


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("from headgate._sync import limiter", ["headgate._sync.limiter"]),
        ("from headgate.quota import _Reader", ["headgate.quota._Reader"]),
        ("def f():\n    import headgate._async", ["headgate._async"]),
        ("from headgate.apps.tiers import _y", ["headgate.apps.tiers._y"]),
        ("from headgate.apps.mail._smtp import _send", []),
        ("from headgate import Limiter\nfrom threading import _shutdown", []),
    ],
)
def test_private_imports_are_found(source: str, private: list[str]) -> None:
    assert private_imports("apps.mail.routes", source) == private


# --- What is exported ------------------------------------------------------------------------------------------------


def declares_all(name: str) -> bool:
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def test_the_package_exports_exactly_its_public_names() -> None:
    public = {
        name
        for name, value in vars(headgate).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, ModuleType)
    }
    assert set(headgate.__all__) == public | {"__version__"}


def test_the_package_and_the_project_have_one_version() -> None:
    assert headgate.__version__ == PYPROJECT["project"]["version"] == metadata.version("headgate")


@pytest.mark.parametrize("name", [name for name in SOURCES if declares_all(name)])
def test_all_is_true(name: str) -> None:
    """That it is sorted is ruff's business (RUF022)."""
    module = importlib.import_module("headgate" if name == "headgate" else f"headgate.{name}")
    assert len(module.__all__) == len(set(module.__all__))
    assert [export for export in module.__all__ if not hasattr(module, export)] == []


# --- What is shipped and written down --------------------------------------------------------------------------------

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PIN = re.compile(r"([A-Za-z0-9._-]+)==[A-Za-z0-9.]+")

# Brackets around single letters keep this pattern from finding itself.
MACHINE_TEXT = re.compile(
    r"(?<![\w.$}~-])/(?:work|root|tmp|opt|home/\w+|Users/\w+)/[\w.]"  # paths of one machine
    r"|pypi\.org/simple|pythonhosted\.org|npmjs\.org|artifactor[y]|\bjfrog\b"  # registries
    r"|(?:index-url|find-links)[ =]|@[ ]file:"
)


def project_files() -> Iterator[Path]:
    """Yield every file of the project, leaving out what .gitignore leaves out."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines())]
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not matches_any(name, ignored)]
        yield from (Path(folder, name) for name in names if not matches_any(name, ignored))


def matches_any(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def test_no_file_names_one_machine_or_registry() -> None:
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
    assert PYPROJECT["project"]["dependencies"] == []


def test_constraints_pin_everything_that_an_extra_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert None not in pins
    pinned = {normalised(pin.group(1)) for pin in pins if pin}
    extras = PYPROJECT["project"]["optional-dependencies"]
    asked = {normalised(re.split(r"[\[<>=]", wish)[0]) for wishes in extras.values() for wish in wishes}
    assert asked - pinned == {"headgate"}  # extras made of other extras name the project itself


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_the_typing_marker_is_shipped() -> None:
    assert resources.files(headgate).joinpath("py.typed").is_file()


# --- Every numbered requirement has a row in the service's page and a test --------------------------------------------

REQUIREMENTS = {"mail": ("N", 52), "telegram": ("T", 24), "tiers": ("S", 32), "petitions": ("A", 88)}
ROW = re.compile(r"^\|\s*[*`]*([A-Z]-\d\d)\b", re.MULTILINE)


def test_requirements_documentation_and_tests_agree() -> None:
    """Holds for a service from the day its page exists."""
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


def test_marked_requirements_are_found() -> None:
    source = """
pytestmark = pytest.mark.requirement("A-01")
class TestX:
    @pytest.mark.requirement("A-02", "A-03")
    @pytest.mark.requirement("A-04")
    async def test_y(self): ...
"""
    assert sorted(marked_requirements(source)) == ["A-01", "A-02", "A-03", "A-04"]


def test_requirement_rows_are_found() -> None:
    assert ROW.findall("| id | what |\n| --- | --- |\n| A-01 | x, see A-09 |\n| **A-02** | y |\n") == [
        "A-01",
        "A-02",
    ]
