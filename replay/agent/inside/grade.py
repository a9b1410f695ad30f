"""Runs test files and writes each test's outcome: python -P grade.py OUT [pytest's arguments].

pytest is imported before the workspace is on the path, so that a file of that name in the
workspace cannot take its place.
"""

import json
import os
import sys

import pytest

# Of the three phases of a test the worst one counts.
ORDER = ("passed", "skipped", "failed")


class Outcomes:
    def __init__(self, path):
        self.path, self.seen = path, {}

    def pytest_runtest_logreport(self, report):
        before = self.seen.get(report.nodeid, "passed")
        self.seen[report.nodeid] = max(before, report.outcome, key=ORDER.index)

    def pytest_sessionfinish(self):
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(self.seen, file)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    sys.exit(pytest.main(sys.argv[2:], plugins=[Outcomes(sys.argv[1])]))
