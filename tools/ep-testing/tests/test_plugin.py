from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def test_a_test_that_hangs_fails_at_its_limit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import time
        import pytest

        @pytest.mark.time_limit(1)
        def test_hangs():
            time.sleep(60)

        @pytest.fixture
        def slow():
            time.sleep(60)

        @pytest.mark.time_limit(1)
        def test_fixture_hangs(slow):
            pass

        def test_next():
            pass
        """
    )
    result = pytester.runpytest_subprocess(timeout=60)
    result.assert_outcomes(failed=1, errors=1, passed=1)
    result.stdout.fnmatch_lines(["*took longer than its limit of 1 s*"])


def test_a_test_that_hangs_outside_python_ends_pytest_and_shows_where(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest("import ep_testing.plugin\nep_testing.plugin.MARGIN = 0.3")
    pytester.makepyfile(
        """
        import signal, time
        import pytest

        @pytest.mark.time_limit(0.3)
        def test_hangs():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(60)
        """
    )
    result = pytester.runpytest_subprocess(timeout=60)
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*Timeout*", "*test_hangs*"])


def test_a_limit_for_all_tests_is_an_ini_value(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ntime_limit = 0.2\n")
    pytester.makepyfile("import time\ndef test_hangs(): time.sleep(60)")
    pytester.runpytest_subprocess(timeout=60).assert_outcomes(failed=1)


@pytest.mark.parametrize(("args", "wanted"), [((), False), (("--all-layouts",), True)])
def test_all_layouts(pytester: pytest.Pytester, args: tuple[str, ...], wanted: bool) -> None:
    pytester.makepyfile(f"def test_it(all_layouts): assert all_layouts is {wanted}")
    pytester.runpytest_subprocess(*args, timeout=60).assert_outcomes(passed=1)


def test_ranks_are_new_in_each_module(pytester: pytest.Pytester) -> None:
    body = """
        import os, pathlib

        def test_it(ranks):
            pids = ranks.run(lambda rank: os.getpid(), world=1)
            assert pids == ranks.run(lambda rank: os.getpid(), world=1)
            with pathlib.Path("pids").open("a") as out:
                print(pids[0], file=out)
        """
    pytester.makepyfile(test_one=body, test_two=body)
    pytester.runpytest_subprocess(timeout=120).assert_outcomes(passed=2)
    first, second = (pytester.path / "pids").read_text().split()
    assert first != second
