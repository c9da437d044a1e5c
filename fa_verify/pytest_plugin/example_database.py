"""Hypothesis's example database: one key per test, in a local folder and on a shared server."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
import pytest
from hypothesis.database import ExampleDatabase, MultiplexedDatabase

__all__ = ["example_database", "of_one_test", "without_passwords"]

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
    return MultiplexedDatabase(local, _on_server(url))


def without_passwords(text: str) -> str:
    """Return a text, such as a command line, without the user names and passwords of its URLs."""
    return re.sub(r"://[^\s/]*@", "://", text)


def _on_server(url: str) -> ExampleDatabase:
    """Hypothesis's database on a Redis server, which must answer a ping."""
    shown = without_passwords(url.partition("?")[0])
    try:
        import redis
        from hypothesis.extra.redis import RedisExampleDatabase
    except ImportError:
        raise pytest.UsageError(
            f"--fa-example-db={shown} needs the package redis: pip install 'fa-verify[redis]'"
        ) from None
    try:
        client = redis.Redis.from_url(url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS)
        client.ping()
    except (ValueError, redis.RedisError, OSError) as error:
        raise pytest.UsageError(
            f"--fa-example-db={shown} cannot be used ({type(error).__name__}); needs "
            "redis://host:port[/number], rediss:// or unix:// of a server that answers"
        ) from None
    return _UntilItFails(RedisExampleDatabase(client), shown)


class _UntilItFails(ExampleDatabase):
    """A database on a server. After the server's first failure, it acts as empty.

    A test would end in the exception of the client, and lose the failure that it has found.
    """

    def __init__(self, database: ExampleDatabase, name: str) -> None:
        super().__init__()
        self.database: ExampleDatabase | None = database
        self.name = name

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return self._ask(lambda database: list(database.fetch(key))) or []

    def save(self, key: bytes, value: bytes) -> None:
        self._ask(lambda database: database.save(key, value))

    def delete(self, key: bytes, value: bytes) -> None:
        self._ask(lambda database: database.delete(key, value))

    def _ask(self, act: Callable[[ExampleDatabase], Any]) -> Any:
        if self.database is None:
            return None
        try:
            return act(self.database)
        # The client raises its own exceptions and those of sockets. None comes from the kernel.
        except Exception as error:
            self.database = None
            warnings.warn(
                f"--fa-example-db: {self.name} stopped answering ({type(error).__name__}); later "
                "examples are kept in .hypothesis only",
                stacklevel=2,
            )
            return None


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
