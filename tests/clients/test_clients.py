"""The clients and test suites of other servers pass against `zoo serve`; README.md explains what does not."""

import pytest

from tests.clients.run import checkout_of, run, servers, table
from tests.clients.suites import SUITES, TEST_SUITES

LEAST = 0.95  # of the cases of a project

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with servers(tmp_path_factory.mktemp("servers").resolve()) as running:
        yield running


@pytest.mark.parametrize("suite", [*SUITES, *TEST_SUITES], ids=lambda suite: suite.name)
def test_clients_of_other_servers_run_unchanged(suite, running, tmp_path):
    code = checkout_of(suite)
    if code is None:
        pytest.skip(f"needs a checkout of {suite.name}: {suite.variable}=DIR")
    results = run(suite, code, tmp_path, running)
    unexplained = [result for result in results if not result.is_passed and not result.because]
    assert not unexplained, table({suite.name: results})
    assert sum(result.is_passed for result in results) >= LEAST * len(results), table({suite.name: results})
