"""The store of docs/how-to/write-a-store.md passes the conformance kit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headgate.testing import StoreContract

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-a-store.md"
BLOCK = re.compile(r'^```python title="dict_store.py"\n(?P<code>(?:.*\n)*?)```$', re.MULTILINE)

NAMES: dict[str, Any] = {}
exec("".join(match["code"] for match in BLOCK.finditer(PAGE.read_text("utf-8"))), NAMES)


class TestDictStore(StoreContract):
    effort = 0.2

    def make_store(self) -> Any:
        return NAMES["DictStore"]()

    def dump(self) -> object:
        store: Any = self.store
        return dict(store.states)


class TestDictStoreWithItsOwnClock(TestDictStore):
    own_time = True

    def make_store(self) -> Any:
        return NAMES["DictStore"](self.clock)
