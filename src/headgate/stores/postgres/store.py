"""The PostgreSQL store: exact, shared by all processes that can reach the database, and kept over a restart.

One call of an SQL function decides all rules of a request, by the database's clock; see `sql/migrations`. This module puts
the parts together: the encoding (`codec`), the address (`endpoint`), the connections (`peer`), and the engine that all
network stores share (`stores/remote`).
"""

from __future__ import annotations

from headgate._checks import check_text
from headgate.clock import Clock, check_clock
from headgate.rules import Rule
from headgate.stores.base import Guarantees, check_deadline
from headgate.stores.postgres.codec import NoteCall, QueueCall
from headgate.stores.postgres.endpoint import PostgresEndpoint
from headgate.stores.postgres.migrations import migrate
from headgate.stores.postgres.operations import PostgresOperations
from headgate.stores.postgres.peer import PostgresPeer
from headgate.stores.postgres.subscription import PostgresSubscription
from headgate.stores.remote.listener import WakeListener
from headgate.stores.remote.store import RemoteStateStore
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine

DEFAULT_DEADLINE = 1.0
"""Seconds."""

_MAY_LOSE = "nothing if a client crashes; the last moments if the server crashes (synchronous_commit = off)"
_MAY_LOSE_DURABLE = "nothing"


class PostgresStore(RemoteStateStore):
    """Counts in a PostgreSQL (15 or later) database, in which `headgate migrate` or `store.migrate()` was run once.

    Args:
        url: `postgresql://user:password@host:port/database`, or any other connection string of libpq.
        namespace: Separates the states of several applications in one database.
        deadline: Seconds after which a call fails with `StoreUnavailable`.
        durable: Whether a call waits until its changes are on disk. Otherwise a call is several times faster, and a crash
            of the server (not of a client) may lose the counts of about the last half second.
        prepare: Whether to prepare statements once per connection. A pooler in transaction mode must support that
            (PgBouncer 1.21 or later does); `False` works with every pooler.
        clock: The clock to use instead of the database's.

    Threads, tasks, event loops and processes may share a store; after a fork, the child opens new connections.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "headgate",
        deadline: float = DEFAULT_DEADLINE,
        durable: bool = False,
        prepare: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.endpoint = PostgresEndpoint(url)
        self.namespace = check_text("namespace=", namespace, 0)
        self.deadline = check_deadline(deadline)
        self.durable = durable
        self.clock = check_clock(clock)
        peer = PostgresPeer(self.endpoint, durable, prepare)
        self._threads = ThreadEngine(peer, self.deadline)
        self._tasks = AsyncEngine(peer, self.deadline)
        self._wake_ups = WakeListener(self._subscribe)

    @property
    def guarantees(self) -> Guarantees:
        """The guarantees of this store."""
        return Guarantees(
            shared=True, durable=True, may_lose=_MAY_LOSE_DURABLE if self.durable else _MAY_LOSE
        )

    def migrate(self) -> list[str]:
        """Create or update Headgate's tables and functions; see `headgate.stores.postgres.migrate`."""
        return migrate(self.endpoint.conninfo)

    def _encoder(self, limiter: str, rules: tuple[Rule, ...]) -> PostgresOperations:
        return PostgresOperations(limiter, rules, self.namespace, self.clock)

    def _subscribe(self, process: str) -> PostgresSubscription:
        return PostgresSubscription(self.endpoint, process, self.deadline)

    def _queue_request(self, queue: bytes, ticket: str, priority: int, lasting_us: int) -> QueueCall:
        return QueueCall(queue, ticket, priority, lasting_us)

    def _note_request(
        self, key: bytes, text: bytes | None, lasting_us: int, replaced: bytes | None
    ) -> NoteCall:
        return NoteCall(key, text, lasting_us, replaced)
