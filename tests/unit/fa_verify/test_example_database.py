"""Hypothesis's example database: a key for each test, and a server that may go away."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase, InMemoryExampleDatabase

from fa_verify.properties.search.search import draws
from fa_verify.pytest_plugin.example_database import (
    example_database,
    of_one_test,
    without_passwords,
)

LOCAL = InMemoryExampleDatabase()
NEEDS = "needs redis://host:port"


def config_with(url: str | None, profile: str | None = "fuzz") -> SimpleNamespace:
    """A stub of a pytest.Config with options."""
    options = {"--fa-example-db": url, "--hypothesis-profile": profile}
    return SimpleNamespace(getoption=lambda name, default=None: options[name])


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def searched(database, name, *, fails, keeps=None) -> int:
    """The number of draws of a search that stops at the first number of at least 100."""
    drawn = []

    @hypothesis.given(st.integers(0, 10_000))
    def holds(number):
        drawn.append(number)
        assert not (fails and number >= 100)

    settings = hypothesis.settings(draws(200), derandomize=False, database=database)
    try:
        of_one_test(settings, name, keeps)(holds)()
    except AssertionError:
        return drawn.index(next(x for x in drawn if x >= 100)) + 1
    return len(drawn)


def test_a_test_tries_first_what_it_failed_on():
    database = InMemoryExampleDatabase()
    searched(database, "one", fails=True)
    assert searched(database, "one", fails=True) == 1


def test_each_test_has_a_key_of_its_own():
    database = InMemoryExampleDatabase()
    one, two = (
        of_one_test(hypothesis.settings(draws(1), derandomize=False, database=database), name)
        for name in ("one", "two")
    )
    one.database.save(b"key", b"value")
    one.database.move(b"key", b"other", b"value")
    one.database.save(b"key", b"second")
    assert [list(one.database.fetch(key)) for key in (b"key", b"other")] == [
        [b"second"],
        [b"value"],
    ]
    assert [list(two.database.fetch(key)) for key in (b"key", b"other")] == [[], []]


def test_examples_of_another_test_are_neither_tried_nor_deleted():
    database = InMemoryExampleDatabase()
    searched(database, "one", fails=True)
    searched(database, "two", fails=False)
    assert searched(database, "one", fails=True) == 1


@pytest.mark.parametrize(("keeps", "first"), [(True, True), (False, False)])
def test_a_known_failure_stays_although_it_counts_as_passing(keeps, first):
    database = InMemoryExampleDatabase()
    searched(database, "one", fails=True)
    searched(database, "one", fails=False, keeps=lambda: keeps)
    assert (searched(database, "one", fails=True) == 1) == first


def test_without_a_database_settings_stay_as_they_are():
    settings = draws(3)
    assert of_one_test(settings, "one") is settings


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", ""),
        ("localhost:6379", "localhost:6379"),
        ("http://me:secret@host:1/0?password=secret", "http://host:1/0"),
        ("redis://[::1", "redis://[::1"),
    ],
)
def test_a_url_that_is_none_is_refused(url, shown):
    pytest.importorskip("redis")  # the client reads the URL
    with pytest.raises(pytest.UsageError, match=NEEDS) as info:
        example_database(config_with(url), LOCAL)
    assert str(info.value).startswith(f"--fa-example-db={shown} cannot be used (")
    assert "secret" not in str(info.value)


@pytest.mark.parametrize("profile", [None, "gate", "dev"])
def test_a_profile_that_keeps_no_examples_is_refused(profile):
    says = f"--fa-example-db has no effect with the profile {profile or 'gate'}, which draws"
    with pytest.raises(pytest.UsageError, match=says):
        example_database(config_with("redis://localhost", profile), LOCAL)


def test_without_a_server_the_local_one_is_used():
    assert example_database(config_with(None, None), LOCAL) is LOCAL


def test_a_command_line_is_shown_without_passwords():
    given = "-n2 --fa-example-db=redis://me:p@ss@host:1/2 --fa-kernel=a@b.py:c --db=redis://host"
    want = "-n2 --fa-example-db=redis://host:1/2 --fa-kernel=a@b.py:c --db=redis://host"
    assert without_passwords(given) == want


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(pytest.UsageError, match=r"needs the package redis: pip install"):
        example_database(config_with("redis://localhost"), LOCAL)


@pytest.mark.redis
def test_a_server_that_does_not_answer_is_refused_without_its_password():
    url = f"redis://me:secret@127.0.0.1:{free_port()}"
    with pytest.raises(pytest.UsageError, match=r"^--fa-example-db=redis://127\.0\.0\.1:") as info:
        example_database(config_with(url), LOCAL)
    assert "secret" not in str(info.value)
    assert "(ConnectionError)" in str(info.value)


class Server:
    """A redis-server for one test that keeps nothing on disk."""

    def __init__(self, folder, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/1"
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, "redis-server does not start"
                assert time.monotonic() < end, "redis-server does not answer"
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.mark.redis
def test_failures_of_one_machine_are_tried_first_on_another(server):
    one, another = (on_machine(server.url) for _ in range(2))
    searched(one, "test", fails=True)
    assert searched(another, "test", fails=True) == 1
    close(one, another)


@pytest.mark.redis
def test_a_server_that_goes_away_takes_no_find_along(server):
    database = on_machine(server.url)
    searched(database, "test", fails=True)
    server.stop()
    # The folder has the example too, and a connection error does not fail the test.
    says = rf"redis://127\.0\.0\.1:{server.port}/1 stopped answering \(ConnectionError\); later"
    with pytest.warns(UserWarning, match=says):
        assert searched(database, "test", fails=True) == 1
    # From the first failure on the server is left alone.
    assert searched(database, "other", fails=False) >= 200


@pytest.mark.redis
def test_a_password_opens_the_server_and_a_wrong_one_is_not_told(tmp_path):
    server = Server(tmp_path, "--requirepass", "secret")
    try:
        close(on_machine(f"redis://:secret@127.0.0.1:{server.port}"))
        for wrong in (f"redis://:mistaken@127.0.0.1:{server.port}", server.url):
            with pytest.raises(pytest.UsageError, match="Authentication") as info:
                on_machine(wrong)
            assert "mistaken" not in str(info.value)
    finally:
        server.stop()


def on_machine(url: str) -> ExampleDatabase:
    """The database of a machine: a folder of its own and the shared server."""
    return example_database(config_with(url), InMemoryExampleDatabase())


def close(*databases: ExampleDatabase) -> None:
    for database in databases:
        database._wrapped[1].database.redis.close()
