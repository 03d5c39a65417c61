"""The store of docs/how-to/write-a-store.md passes the conformance kit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headgate.testing import StoreContract
from headgate.testing.contract.base import Contract
from headgate.testing.contract.replay import ReplayTests
from headgate.testing.contract.times import TimeTests

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-a-store.md"
BLOCK = re.compile(r'^```python title="dict_store.py"\n(?P<code>(?:.*\n)*?)```$', re.MULTILINE)

NAMES: dict[str, Any] = {}
exec("".join(match["code"] for match in BLOCK.finditer(PAGE.read_text("utf-8"))), NAMES)


class DictContract(Contract):
    effort = 0.2

    def dump(self) -> object:
        store: Any = self.store
        return dict(store.states)


class TestDictStore(DictContract, StoreContract):
    def make_store(self) -> Any:
        return NAMES["DictStore"]()


class TestDictStoreWithItsOwnClock(DictContract, ReplayTests, TimeTests):
    own_time = True

    def make_store(self) -> Any:
        return NAMES["DictStore"](self.clock)
