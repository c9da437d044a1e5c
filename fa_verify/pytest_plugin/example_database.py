"""Hypothesis's example database: one key per test, in a local folder and on a shared server."""

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
# Timeout of the server, in seconds.
SECONDS = 5.0


def example_database(config: pytest.Config, local: ExampleDatabase) -> ExampleDatabase:
    """Return the example database of the profile "fuzz": local, plus the server of --fa-example-db.

    Args:
        config: The pytest configuration.
        local: Local database. It holds all examples, with or without a server.

    Raises:
        pytest.UsageError: The server cannot be used, or the profile in use keeps no examples.
    """
    url = config.getoption("--fa-example-db")
    if url is None:
        return local
    profile = config.getoption("--hypothesis-profile") or "gate"
    if profile != "fuzz":
        raise pytest.UsageError(
            f"--fa-example-db has no effect with the profile {profile}, which draws the same "
            "problems in every run and keeps no examples; needs --fa-minutes or "
            "--hypothesis-profile=fuzz"
        )
    server = SharedDatabase(_on_server(url, ask=not hasattr(config, "workerinput")), shown(url))
    config.pluginmanager.register(server, "shared examples")
    return MultiplexedDatabase(local, server)


def shown(url: str) -> str:
    """Return a URL without user name, password and query."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return "(no URL)"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def without_passwords(text: str) -> str:
    """Return a text, such as a command line, without the user names and passwords of its URLs."""
    return re.sub(r"://[^\s/]*@", "://", text)


def _on_server(url: str, *, ask: bool) -> ExampleDatabase:
    """Connect to a Redis server, which must answer a ping if ``ask`` is True."""
    if shown(url).partition("://")[0] not in SCHEMES:
        raise pytest.UsageError(
            f"--fa-example-db is {shown(url)}; needs redis://host:port[/number], rediss:// or unix://"
        )
    try:
        import redis
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise pytest.UsageError(
            f"--fa-example-db={shown(url)} needs the package redis: pip install 'fa-verify[redis]'"
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
            f"--fa-example-db={shown(url)} cannot be used: {_without_secrets(error, url)}"
        ) from None
    return RedisExampleDatabase(client)


def _without_secrets(error: Exception, url: str) -> str:
    """Return an error's type and message; the type alone if the message repeats a secret."""
    said = f"{type(error).__name__}: {error}"
    parts = urllib.parse.urlsplit(url)
    secrets = {parts.netloc.rpartition("@")[0], parts.password, parts.query} - {"", None}
    return type(error).__name__ if any(secret in said for secret in secrets) else said


class SharedDatabase(ExampleDatabase):
    """Wraps a database that may fail, and reports its failure in one line of the summary.

    After its first failure the database is not used and acts as empty.

    Args:
        database: The wrapped database. It may raise any exception.
        name: Name of the database in the message about its failure.
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
        # The client raises its own exceptions and those of sockets. None comes from the kernel.
        except Exception as error:
            self.outage = f"{self.name} stopped answering ({type(error).__name__})"
            return None

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """Return all values of a key, or none after a failure."""
        return self._try(lambda: list(self.database.fetch(key))) or []

    def save(self, key: bytes, value: bytes) -> None:
        """Save a value, unless the database has failed."""
        self._try(lambda: self.database.save(key, value))

    def delete(self, key: bytes, value: bytes) -> None:
        """Delete a value, unless the database has failed."""
        self._try(lambda: self.database.delete(key, value))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the failure from a worker to the controller."""
        self.seen.add(self.outage)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["outage"] = self.outage

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Collect a worker's failure in the controller."""
        self.seen.add(getattr(node, "workeroutput", {}).get("outage", ""))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print one line, however many workers failed to reach the server."""
        outages = sorted(self.seen - {""})
        if outages:
            terminalreporter.write_line(
                f"--fa-example-db: {', '.join(outages)}; later examples were kept in .hypothesis "
                "only",
                yellow=True,
            )


class _OfOneTest(ExampleDatabase):
    """A database that appends a test's name to Hypothesis's keys.

    Hypothesis derives its key from the search function, which all tests share.

    Args:
        database: The database of all tests.
        name: Name of the test.
        keeps: Returns whether to keep the last example although it counts as passing.
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
    """Return settings whose database holds the examples of one test.

    Args:
        settings: Settings with the database of all tests.
        name: Name of the test, the same on every machine.
        keeps: Returns whether to keep the last example although it counts as passing.
    """
    if settings.database is None:
        return settings
    return hypothesis.settings(settings, database=_OfOneTest(settings.database, name, keeps))
