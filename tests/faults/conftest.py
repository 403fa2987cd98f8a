"""The bench on which faults are tried, and the counts of what was tried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults_cases import SEED, TALLY, Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("faults"))
    yield bench
    bench.server.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY:
        terminalreporter.section(f"faults tried (HVPFLOW_FAULT_SEED={SEED})")
        for kind, count in sorted(TALLY.items()):
            terminalreporter.line(f"{count:6d}  {kind}")
