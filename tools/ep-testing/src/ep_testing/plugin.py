"""The pytest plugin: the `ranks` fixture, `--all-layouts` and a time limit for each test."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from ep_testing.pool import RankPool, default_preload

MARGIN = 30.0  # seconds between a test's limit and the end of a pytest that cannot fail it
_stderr: int = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all-layouts` and the ini values `time_limit` and `ranks_preload`."""
    global _stderr
    _stderr = os.dup(2)  # pytest's capture has not begun yet
    parser.addoption(
        "--all-layouts",
        action="store_true",
        default=False,
        help="run the layout tests on every layout instead of a sample",
    )
    parser.addini("time_limit", "seconds that a test may take (default 300)", default="300")
    parser.addini("ranks_preload", "further modules that the rank server imports once", type="args")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line("markers", "time_limit(seconds): how long this test may take")


@pytest.fixture(scope="session")
def all_layouts(pytestconfig: pytest.Config) -> bool:
    """Whether `--all-layouts` was given."""
    return bool(pytestconfig.getoption("--all-layouts"))


@pytest.fixture(scope="module")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """Gloo ranks: `ranks.run(fn, *args, world=8, timeout=60)` calls `fn(rank, *args)` on each.

    They are forked anew for each test module, since every mesh leaves threads and sockets
    behind; the server they are forked from lives as long as pytest.
    """
    pool = RankPool([*default_preload(), *pytestconfig.getini("ranks_preload")])
    yield pool
    pool.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Limit a test's fixtures."""
    with _limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Limit a test."""
    with _limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Limit what a test's fixtures do at its end."""
    with _limit(item):
        return (yield)


@contextmanager
def _limit(item: pytest.Item) -> Iterator[None]:
    """Fail the test at its limit; end pytest with a traceback if it cannot even be failed.

    The alarm's handler runs in Python, so a test that is stuck in C never sees it: the fault
    handler's thread then ends the process a little later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    marker = item.get_closest_marker("time_limit")
    seconds = float(marker.args[0] if marker else item.config.getini("time_limit"))

    def fail(signum: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test took longer than its limit of {seconds:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + MARGIN, exit=True, file=_stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
