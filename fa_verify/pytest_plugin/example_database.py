"""Hypothesis's examples: one drawer a test, in a folder, and on a server that machines share."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
import pytest
from hypothesis.database import ExampleDatabase, MultiplexedDatabase

__all__ = [
    "SharedDatabase",
    "example_database",
    "of_one_test",
    "shown",
    "without_passwords",
]

SCHEMES = ("redis", "rediss", "unix")
# A server that does not answer in this time has gone away.
SECONDS = 5.0


def example_database(config: pytest.Config, local: ExampleDatabase) -> ExampleDatabase:
    """The database of the profile fuzz: a local one, and with --example-db a server too.

    Args:
        config: Pytest's.
        local: Holds everything, whether there is a server or not.

    Raises:
        pytest.UsageError: The server cannot be used, or the profile in force keeps no examples.
    """
    url = config.getoption("--example-db")
    if url is None:
        return local
    profile = config.getoption("--hypothesis-profile") or "gate"
    if profile != "fuzz":
        raise pytest.UsageError(
            f"--example-db has no effect in the profile {profile}, which draws the same in every "
            "run and keeps no examples; needs --minutes or --hypothesis-profile=fuzz"
        )
    server = SharedDatabase(_on_server(url, ask=not hasattr(config, "workerinput")), shown(url))
    config.pluginmanager.register(server, "shared examples")
    return MultiplexedDatabase(local, server)


def shown(url: str) -> str:
    """A URL without what is secret in it."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return "(no URL)"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def without_passwords(text: str) -> str:
    """A text, such as a command line, with what stands before the host of URLs left out."""
    return re.sub(r"://[^\s/]*@", "://", text)


def _on_server(url: str, *, ask: bool) -> ExampleDatabase:
    """The database of a Redis server, which is asked whether it is there."""
    if shown(url).partition("://")[0] not in SCHEMES:
        raise pytest.UsageError(
            f"--example-db is {shown(url)}; needs redis://host:port[/number], rediss:// or unix://"
        )
    try:
        import redis
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise pytest.UsageError(
            f"--example-db={shown(url)} needs the package redis: pip install 'fa-verify[redis]'"
        ) from None
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=SECONDS,
            socket_connect_timeout=SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        if ask:
            client.ping()
    except (ValueError, redis.RedisError, OSError) as error:
        raise pytest.UsageError(
            f"--example-db={shown(url)} cannot be used: {_without_secrets(error, url)}"
        ) from None
    return RedisExampleDatabase(client)


def _without_secrets(error: Exception, url: str) -> str:
    """The message of an error, or its type alone if the message repeats the password."""
    said = f"{type(error).__name__}: {error}"
    parts = urllib.parse.urlsplit(url)
    secrets = {parts.netloc.rpartition("@")[0], parts.password, parts.query} - {"", None}
    return type(error).__name__ if any(secret in said for secret in secrets) else said


class SharedDatabase(ExampleDatabase):
    """A database that may fail, and a pytest plugin that says so in one line of the summary.

    After its first failure the database is left alone, and holds nothing.

    Args:
        database: May raise any exception.
        name: Its name in the summary.
    """

    def __init__(self, database: ExampleDatabase, name: str) -> None:
        super().__init__()
        self.database = database
        self.name = name
        self.outage = ""
        self.seen: set[str] = set()

    def _try(self, act: Callable[[], Any]) -> Any:
        if self.outage:
            return None
        try:
            return act()
        # A server's client raises its own exceptions and those of sockets; none is the kernel's.
        except Exception as error:
            self.outage = f"{self.name} went away ({type(error).__name__})"
            return None

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """All values, or none."""
        return self._try(lambda: list(self.database.fetch(key))) or []

    def save(self, key: bytes, value: bytes) -> None:
        """Saves a value if it can."""
        self._try(lambda: self.database.save(key, value))

    def delete(self, key: bytes, value: bytes) -> None:
        """Deletes a value if it can."""
        self._try(lambda: self.database.delete(key, value))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker tells the controller."""
        self.seen.add(self.outage)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["outage"] = self.outage

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """The controller gathers what workers tell."""
        self.seen.add(getattr(node, "workeroutput", {}).get("outage", ""))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line, however many workers lost the server."""
        outages = sorted(self.seen - {""})
        if outages:
            terminalreporter.write_line(
                f"--example-db: {', '.join(outages)}; from then on examples were kept in "
                ".hypothesis alone",
                yellow=True,
            )


class _OfOneTest(ExampleDatabase):
    """A database under keys of a test's own: Hypothesis's are those of the one search they share.

    Args:
        database: Of all tests.
        name: The test.
        keeps: Whether the example that was tried last is to stay.
    """

    def __init__(
        self, database: ExampleDatabase, name: str, keeps: Callable[[], bool] | None
    ) -> None:
        super().__init__()
        self.database = database
        self.name = name.encode()
        self.keeps = keeps or (lambda: False)

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return self.database.fetch(key + self.name)

    def save(self, key: bytes, value: bytes) -> None:
        self.database.save(key + self.name, value)

    def delete(self, key: bytes, value: bytes) -> None:
        if not self.keeps():
            self.database.delete(key + self.name, value)

    def move(self, src: bytes, dest: bytes, value: bytes) -> None:
        self.database.move(src + self.name, dest + self.name, value)


def of_one_test(
    settings: hypothesis.settings, name: str, keeps: Callable[[], bool] | None = None
) -> hypothesis.settings:
    """Settings whose examples are those of one test.

    Args:
        settings: With the database of all tests.
        name: Of the test, the same on every machine.
        keeps: Whether the example that was tried last is to stay although it counts as passing.
    """
    if settings.database is None:
        return settings
    return hypothesis.settings(settings, database=_OfOneTest(settings.database, name, keeps))
