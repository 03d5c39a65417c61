"""Live policies: the effects of a reload."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headgate import AsyncLimiter, ConfigError, RateLimited, fixed_window
from headgate.policy import AsyncLivePolicy, LivePolicy, PolicyError, parse_policy
from headgate.stores.request import Request
from headgate.testing import FakeClock
from tests.unit.flavours import done, entered
from tests.unit.policy.conftest import Author
from tests.unit.recorder import Recorder

Follow = Callable[..., Any]

LOGIN = """
[limiters.login]
rules = ["5/minute"]
"""


async def admitted(limiter: Any, times: int, key: Any = "ada", **arguments: Any) -> int:
    return sum([bool(await done(limiter.hit(key, **arguments))) for _ in range(times)])


# Limits


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{folder}/limits.db"])
@pytest.mark.parametrize("kind", ["sliding_window", "token_bucket", "fixed_window", "sliding_log"])
async def test_a_changed_limit_applies_at_once_to_existing_counts(
    follow: Follow, author: Author, tmp_path: Path, store: str, kind: str
) -> None:
    def write(quota: str) -> None:
        author.write(
            f'[limiters.login]\nrules = [{{ quota = "{quota}", kind = "{kind}" }}]\n'
            f'store = "{store.format(folder=tmp_path)}"'
        )

    write("5/minute")
    live = follow()
    limiter = live["login"]
    assert await admitted(limiter, 4) == 4
    write("3/minute")
    assert live.reload() is True
    refusal = await done(limiter.check("ada"))
    assert (refusal.allowed, refusal.limit, refusal.remaining) == (False, 3, 0)
    write("6/minute")
    assert live.reload() is True
    assert await admitted(limiter, 9) == 2


async def test_a_limiter_is_the_same_object_for_life(follow: Follow, author: Author) -> None:
    live = follow(LOGIN)
    limiter, hit = live["login"], live["login"].hit
    author.limit("1/minute")
    live.reload()
    assert live["login"] is limiter
    assert limiter.rules[0].quota.limit == limiter.policy.rules[0].quota.limit == 1
    assert [bool(await done(hit("ada"))) for _ in range(2)] == [True, False], (
        "also a bound method from before"
    )


async def test_reload_of_an_equal_policy_changes_nothing(follow: Follow, author: Author) -> None:
    told: list[str] = []
    live = follow(LOGIN)
    live.on_change(lambda: told.append("changed"))
    version = live["login"].current
    assert live.reload() is False
    author.write(LOGIN + "# with a remark\n")
    assert live.reload() is False
    assert live["login"].current is version
    assert told == []


async def test_listeners_are_called_after_the_change(follow: Follow, author: Author) -> None:
    live = follow(LOGIN)
    seen: list[int] = []

    def broken() -> None:
        raise RuntimeError("listener")

    live.on_change(broken)
    live.on_change(lambda: seen.append(live["login"].rules[0].quota.limit))
    author.limit("7/minute")
    assert live.reload() is True
    assert seen == [7]


async def test_an_unchanged_limiter_keeps_its_version(follow: Follow, author: Author) -> None:
    two = LOGIN + '[limiters.api]\nrules = ["{}"]\n'
    live = follow(two.format("1/minute"))
    login, api = (live[name].current for name in ("login", "api"))
    author.write(two.format("2/minute"))
    live.reload()
    assert live["login"].current is login
    assert live["api"].current is not api


async def test_a_live_policy_is_a_mapping(follow: Follow) -> None:
    live = follow(LOGIN + '[limiters.api]\nrules = ["1/s"]\n')
    assert list(live) == ["login", "api"]
    assert len(live) == 2
    assert "login" in live
    assert live.get("nobody") is None
    assert repr(live).endswith("LivePolicy: login, api>")


# Files that cannot be used


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[limiters.login]\nrules = ["3/fortnight"]', r"headgate\.toml:2:10: .*fortnight"),
        ("[limiters.login]\nrules = [", r"headgate\.toml:2:10: .*end of the file"),
        (
            '[limiters.login]\nrules = ["3/minute"]\nstore = "mongodb://x"',
            r"headgate\.toml:3:9: no store is known for",
        ),
        ('[limiters.login]\nrules = ["3/minute"]\nstore = "sqlite:///a\\u0000b"', "'login'.* write 'sqlite:"),
        ('[limiters.login]\nrules = ["3/minute"]\ndeadline = 2\nstore = "sqlite:///:memory:"', "deadline"),
        (
            '[limiters.a]\nrules = ["1/s"]\n[limiters.login]\nrules = ["1/s"]\nstore = "x://"',
            r"headgate\.toml:5:9: no store",
        ),
        (None, "No such file"),
    ],
)
async def test_an_invalid_file_keeps_the_old_policy_and_reports_the_error(
    follow: Follow, author: Author, text: str | None, why: str
) -> None:
    live = follow(LOGIN)
    before, policy = live["login"].current, live.policy
    if text is None:
        author.path.unlink()
    else:
        author.write(text)
    with pytest.raises(PolicyError, match=why) as caught:
        live.reload()
    assert live.last_error == str(caught.value)
    assert str(author.path) in live.last_error
    assert live.policy is policy
    assert list(live) == ["login"]
    assert live["login"].current is before
    assert await admitted(live["login"], 9) == 5
    author.write(LOGIN)
    assert live.reload() is False
    assert live.last_error is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mongodb://x", "no store is known for 'mongodb'"),
        ("redis:/ada:s3cret@host/0", "a store is a URL"),
        ("postgresql:ada:s3cret@host", "a store is a URL"),
    ],
)
async def test_an_invalid_store_url_is_an_error_with_its_position_and_without_credentials(
    follow: Follow, author: Author, url: str, message: str
) -> None:
    author.limit("5/minute", url)
    with pytest.raises(PolicyError, match=rf"headgate\.toml:3:9: {message}") as caught:
        follow()
    assert "s3cret" not in str(caught.value)


async def test_a_store_that_could_not_be_opened_is_retried(
    follow: Follow, author: Author, tmp_path: Path
) -> None:
    live = follow(LOGIN)
    author.limit("5/minute", f"sqlite:///{tmp_path}/later/limits.db")
    live.poll()
    assert "limits.db" in live.last_error
    (tmp_path / "later").mkdir()
    live.poll()
    assert live.last_error is None
    assert live["login"].policy.store.endswith("limits.db")


async def test_a_reload_during_a_reload_by_the_same_thread_is_an_error(
    follow: Follow, author: Author
) -> None:
    """As in a signal handler: waiting for its own thread would never end."""
    errors: list[str] = []
    opened: list[LivePolicy] = []

    class Environment(dict[str, str]):
        def keys(self) -> Any:
            for live in opened:
                try:
                    live.reload()
                except PolicyError as error:
                    errors.append(str(error))
            return super().keys()

    live = follow(LOGIN, environment=Environment(UNRELATED="x"))
    opened.append(live)
    author.limit("7/minute")
    assert live.reload() is True
    assert errors == [f"{author.path} is being reloaded by this thread already"]
    assert live.last_error is None
    opened.clear()
    assert live.reload() is False


def test_a_policy_without_a_file_cannot_be_reloaded() -> None:
    live = LivePolicy(parse_policy(LOGIN))
    assert live["login"].hit("ada")
    with pytest.raises(PolicyError, match="from_file"):
        live.reload()


async def test_environment_variables_also_apply_to_reloads(follow: Follow, author: Author) -> None:
    environment = {"HEADGATE_LIMITERS__LOGIN__RULES": '["2/minute"]'}
    live = follow(LOGIN, environment=environment)
    assert await admitted(live["login"], 9) == 2
    author.limit("9/minute")
    live.reload()
    assert live["login"].rules[0].quota.limit == 2
    environment.clear()
    live.reload()
    assert live["login"].rules[0].quota.limit == 9


# Limiters that come and go


async def test_a_removed_limiter_still_works_and_comes_back_as_the_same_object(
    follow: Follow, author: Author, caplog: pytest.LogCaptureFixture
) -> None:
    live = follow(LOGIN + '[limiters.api]\nrules = ["1/s"]\n')
    login = live["login"]
    assert await admitted(login, 2) == 2
    without_login = '[limiters.api]\nrules = ["1/s"]\n[limiters.new]\nrules = ["2/s"]'
    author.write(without_login)
    with pytest.raises(PolicyError, match=r"'login' would be removed; .* write allow_removal = true"):
        live.reload()
    assert list(live) == ["login", "api"]
    assert "'login' would be removed" in str(live.last_error)
    author.write("allow_removal = true\n" + without_login)
    assert live.reload() is True
    assert list(live) == ["api", "new"]
    with pytest.raises(KeyError, match="the policy has no limiter 'login'; it has 'api', 'new'"):
        live["login"]
    assert await admitted(login, 9) == 3, "unchanged"
    assert await admitted(live["new"], 9) == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in warnings if "'login'" in text and "no longer" in text] == warnings
    assert len(warnings) == 1
    author.write('allow_removal = true\n[limiters.login]\nrules = ["6/minute"]')
    live.reload()
    assert live["login"] is login, "the same object again"
    assert await admitted(login, 9) == 1


# Stores


async def test_limiters_with_one_url_share_a_store_across_reloads(
    follow: Follow, author: Author, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/limits.db"
    text = f'[limiters.a]\nrules = ["{{0}}"]\nstore = "{url}"\n[limiters.b]\nrules = ["{{0}}"]\nstore = "{url}"\n'
    live = follow(text.format("5/minute"))
    store = live["a"].store
    assert live["b"].store is store
    author.write(text.format("6/minute") + '[limiters.c]\nrules = ["1/s"]\n')
    live.reload()
    assert live["a"].store is live["b"].store is store
    assert live["c"].store is not store


async def test_a_limiter_can_move_to_another_store(follow: Follow, author: Author, tmp_path: Path) -> None:
    live = follow(LOGIN)
    limiter = live["login"]
    memory = limiter.store
    assert await admitted(limiter, 9) == 5
    author.limit("5/minute", f"sqlite:///{tmp_path}/limits.db")
    live.reload()
    assert limiter.store is not memory
    assert await admitted(limiter, 9) == 5, "nothing was counted there yet"
    author.limit("5/minute")
    live.reload()
    assert limiter.store is memory
    assert await admitted(limiter, 9) == 0


async def test_the_policy_closes_its_stores_and_a_limiter_does_not(
    follow: Follow, author: Author, tmp_path: Path
) -> None:
    author.limit("5/minute", f"sqlite:///{tmp_path}/limits.db")
    async with entered(follow()) as live:
        async with entered(live["login"]) as limiter:
            assert await done(limiter.hit("ada"))
        assert await done(live["login"].hit("ada"))
        store = live["login"].store
    assert store.is_closed


async def test_a_reload_during_close_leaves_no_earlier_store_open(
    follow: Follow, author: Author, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [f"sqlite:///{tmp_path}/{number}.db" for number in range(2)]
    author.write(
        "".join(
            f'[limiters.{name}]\nrules = ["5/minute"]\nstore = "{url}"\n'
            for name, url in zip("ab", files, strict=True)
        )
    )
    live = follow()
    first, second = live["a"].store, live["b"].store
    close = first.close

    def close_and_reload() -> None:
        author.write(
            f'allow_removal = true\n[limiters.c]\nrules = ["5/minute"]\nstore = "sqlite:///{tmp_path}/3.db"\n'
        )
        live.reload()
        close()

    monkeypatch.setattr(first, "close", close_and_reload)
    await done(live.aclose() if isinstance(live, AsyncLivePolicy) else live.close())
    assert first.is_closed
    assert second.is_closed
    assert not live["c"].store.is_closed
    live["c"].store.close()


@pytest.mark.parametrize("url", ["memory", "memory:", "Memory://"])
async def test_a_memory_store_has_the_clock_of_the_policy(
    follow: Follow, author: Author, clock: FakeClock, url: str
) -> None:
    author.limit("1/minute", url)
    limiter = follow()["login"]
    assert await admitted(limiter, 2) == 1
    clock.advance(3600)
    assert await admitted(limiter, 2) == 1


async def test_a_reload_during_an_outage_keeps_the_local_counts(
    follow: Follow, author: Author, tmp_path: Path
) -> None:
    text = f"""
        [limiters.login]
        rules = ["8/minute"]
        store = "sqlite:///{tmp_path}/limits.db"
        on_store_error = {{ local = 0.25 }}
        headers = "%s"
    """
    live = follow(text % "both")
    live["login"].store.close()
    assert await admitted(live["login"], 9) == 2
    author.write(text % "ietf")
    assert live.reload() is True
    assert await admitted(live["login"], 9) == 0


async def test_the_failure_policies_of_a_file_apply(follow: Follow, tmp_path: Path) -> None:
    text = f"""
        [store]
        url = "sqlite:///{tmp_path}/limits.db"
        [limiters.open]
        rules = ["1/minute"]
        [limiters.closed]
        rules = ["1/minute"]
        on_store_error = "closed"
        [limiters.local]
        rules = ["8/minute"]
        on_store_error = {{ local = 0.25 }}
    """
    live = follow(text)
    live["open"].store.close()
    found = {name: await admitted(live[name], 9) for name in live}
    assert found == {"open": 9, "closed": 0, "local": 2}
    assert not live["open"].health.available


# Tiers and overrides

TIERS = """
[limiters.api]
rules = [
  { quota = "1/hour", name = "user", scope = "user", tiers = { free = "2/hour", pro = "3/hour" } },
  { quota = "9/hour", name = "realm", scope = "realm" },
]
default_tier = "free"
[[limiters.api.overrides]]
key = { user = "42" }
rules = { user = "5/hour" }
"""


async def test_holds_records_and_resets_use_the_override(follow: Follow) -> None:
    limiter = follow(TIERS)["api"]
    key = {"user": "42", "realm": "north"}
    async with entered(limiter.hold(key, 5)) as hold:
        assert await done(hold.settle(2)) == 2
    await done(limiter.record(key, 2))
    assert await admitted(limiter, 9, key) == 1
    await done(limiter.reset(key))
    assert await admitted(limiter, 9, key) == 5


async def test_a_reload_removes_an_override(follow: Follow, author: Author) -> None:
    live = follow(TIERS)
    key = {"user": "42", "realm": "north"}
    assert await admitted(live["api"], 4, key) == 4
    author.write(TIERS.split("[[")[0])
    live.reload()
    refusal = await done(live["api"].check(key))
    assert (refusal.allowed, refusal.limit) == (False, 2)


# Holds, waiting, guards


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{folder}/limits.db"])
async def test_a_hold_is_settled_by_the_version_that_took_it(
    follow: Follow, author: Author, tmp_path: Path, store: str
) -> None:
    url = store.format(folder=tmp_path)
    author.limit("5/minute", url)
    live = follow()
    limiter = live["login"]
    hold = await done(limiter.hold("ada", 5))
    author.limit("6/minute", url)
    live.reload()
    assert await done(hold.release()) == 0
    assert await admitted(limiter, 9) == 6
    author.limit("4/minute", url)
    live.reload()
    other = await done(limiter.hold("bob", 3))
    author.write(f'[limiters.login]\nrules = ["9/hour"]\nstore = "{url}"')
    live.reload()
    assert await done(other.settle(4)) == 4, "more than was held, in the rule that took the hold"
    assert await admitted(limiter, 10, "bob") == 9, "the new rule started at zero"
    author.limit("5/minute", url)
    live.reload()
    assert await admitted(limiter, 9, "bob") == 1, "the old rule counted everything"


@pytest.mark.parametrize("quota", ["2/hour", "0/hour"])
async def test_a_waiting_caller_is_decided_by_the_newest_policy(
    follow: Follow, author: Author, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, quota: str
) -> None:
    author.limit("1/hour")
    live = follow()
    assert await done(live["login"].hit("ada"))

    def reload(seconds: float) -> None:
        """Change the limit instead of advancing the clock."""
        author.limit(quota)
        live.reload()

    monkeypatch.setattr(clock, "advance", reload)
    if quota == "2/hour":
        assert (await done(live["login"].wait("ada"))).limit == 2
    else:
        with pytest.raises(RateLimited) as caught:
            await done(live["login"].wait("ada"))
        assert caught.value.decision.limit == 0


async def test_waiting_callers_keep_their_order_across_a_reload(author: Author) -> None:
    clock = SlowClock()
    author.limit("1/minute")
    live = AsyncLivePolicy.from_file(author.path, clock=clock)
    limiter = live["login"]
    await limiter.hit("ada")
    order: list[str] = []

    async def wait(name: str) -> None:
        await limiter.wait("ada")
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(wait(name))
            await asyncio.sleep(0)
        await clock.sleeping.wait()
        author.limit("9/minute")
        live.reload()
        clock.go_on.set()
    assert order == ["a", "b", "c"]


class SlowClock(FakeClock):
    """A clock on which a task sleeps until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeping = asyncio.Event()
        self.go_on = asyncio.Event()

    async def asleep(self, seconds: float) -> None:
        self.sleeping.set()
        await self.go_on.wait()


async def test_a_guard_uses_the_newest_policy(follow: Follow, author: Author) -> None:
    author.limit("1/minute")
    live = follow()
    limiter = live["login"]
    if isinstance(live, AsyncLivePolicy):

        @limiter.guard("ada")
        async def work() -> str:
            return "done"
    else:

        @limiter.guard("ada")
        def work() -> str:
            return "done"

    assert await done(work()) == "done"
    with pytest.raises(RateLimited):
        await done(work())
    author.limit("2/minute")
    live.reload()
    assert await done(work()) == "done"


# Hooks and the log


async def test_hooks_are_called_for_limiters_and_decisions_of_every_version(
    follow: Follow, author: Author, tmp_path: Path
) -> None:
    hook = Recorder()
    live = follow(LOGIN, hooks=[hook])
    limiter = live["login"]
    assert hook.arguments("attached") == [(limiter, limiter.store)]
    await done(limiter.hit("ada"))
    author.limit("1/minute")
    live.reload()
    await done(limiter.hit("ada"))
    assert len(hook.arguments("attached")) == 1
    decided = [
        (call.limiter, call.operation, decision.allowed) for call, decision in hook.arguments("decided")
    ]
    assert decided == [
        ("login", "hit", True),
        ("login", "hit", False),
    ]
    async with entered(limiter.hold("bob")):
        author.limit("1/minute", f"sqlite:///{tmp_path}/limits.db")
        live.reload()
    assert [cost for _, cost in hook.arguments("settled")] == [1]
    assert hook.arguments("attached")[1:] == [(limiter, limiter.store)], (
        "attached again, because its store changed"
    )


async def test_the_log_describes_the_changes(
    follow: Follow, author: Author, caplog: pytest.LogCaptureFixture
) -> None:
    live = follow(
        """
        [limiters.login]
        rules = ["5/minute", { quota = "9/hour", name = "old" }]
        store = "sqlite:///:memory:"
        [limiters.gone]
        rules = ["1/s"]
        """
    )
    author.write(
        """
        allow_removal = true
        [limiters.login]
        rules = ["7/minute", { quota = "2/day", name = "candidate", shadow = true }]
        store = "memory://"
        default_tier = "free"
        [limiters.new]
        rules = ["1/s"]
        [server]
        port = 9000
        top_keys = 3
        """
    )
    with caplog.at_level(logging.INFO, "headgate"):
        live.reload()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert lines == [
        (
            f"{author.path} is in force: login changed; new is new; gone is gone; "
            "server: port (after a restart), top_keys"
        )
    ]


# At the same time


def test_hits_in_threads_during_reloads_never_exceed_the_limit(
    author: Author, clock: FakeClock, hasty_threads: None
) -> None:
    author.limit("40/minute")
    live = LivePolicy.from_file(author.path, clock=clock)
    limiter, is_over = live["login"], threading.Event()

    def reload() -> None:
        """Alternate between a limiter with a shadow rule and one without."""
        for number in range(20):
            extra = ', { quota = "3/minute", name = "candidate", shadow = true }' if number % 2 else ""
            author.write(f'[limiters.login]\nrules = ["{40 - number % 3}/minute"{extra}]')
            live.reload()

    def hit() -> int:
        admitted = 0
        while not is_over.is_set():
            admitted += bool(limiter.hit("ada"))
        return admitted

    with ThreadPoolExecutor() as pool:
        hits = [pool.submit(hit) for _ in range(3)]
        try:
            reload()
        finally:
            is_over.set()
        total = sum(each.result() for each in hits)
    assert 38 <= total <= 40


@pytest.mark.parametrize("policy", ["headgate.toml", Path("headgate.toml"), None, {}], ids=repr)
@pytest.mark.parametrize("kind", [LivePolicy, AsyncLivePolicy])
def test_the_constructor_refuses_anything_but_a_policy(kind: type[LivePolicy], policy: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(policy)
    advice = f"a Policy, as {kind.__name__}.from_file('headgate.toml') reads from a file"
    assert str(caught.value) == f"policy is {advice}, not {policy!r}"


async def test_lease_of_a_policy_follows_the_file(follow: Follow, author: Author, tmp_path: Path) -> None:
    text = f'[limiters.api]\nrules = ["1000/hour"]\nstore = "sqlite:///{tmp_path}/limits.db"\n'
    author.write(text + 'lease = "3m"\n')
    live = follow(clock=None)  # a lease is measured by the machine's clock
    decisions = [await done(live["api"].hit("alice")) for _ in range(50)]
    assert decisions[-1].leased
    assert "with a lease" in live["api"].guarantees.may_lose
    before = live["api"].gate
    author.write(text)
    live.reload()
    assert not (await done(live["api"].hit("alice"))).leased
    # A call that read the old version must not use a chunk longer than the new rules count it.
    assert not (await done(before.decide(Request("hit", "alice"))))[0].leased


async def test_closing_a_policy_returns_leases_also_of_parts(author: Author, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/limits.db"
    author.write(f'[limiters.api]\nrules = ["1000/hour"]\nstore = "{url}"\nlease = "3m"\n')
    async with AsyncLivePolicy.from_file(author.path) as live:
        part = live["api"].current.part(live["api"].rules)
        for limiter in (live["api"], part):
            assert [(await limiter.hit("alice")).leased for _ in range(50)][-1]
        assert not live["api"].current.part((fixed_window("10/second"),)).policy.lease
    async with AsyncLimiter("1000/hour", name="api", store=url) as exact:
        assert (await exact.check("alice", 0)).remaining == 900
