"""Runs test files and tells each test's outcome: python -P grade.py [pytest's arguments].

Descriptor 4 is a file that holds a word; it ends up with that word and the outcomes as JSON. The
word is taken out, and pytest imported, before the workspace is on the path: a pytest.py of the
workspace takes nobody's place, and who wants to forge outcomes must find the word in memory.
"""

import json
import os
import sys

import pytest

TOLD = 4
# Of the three phases of a test the worst one counts.
ORDER = ("passed", "skipped", "failed")


class Outcomes:
    def __init__(self):
        self.seen = {}
        self.file = os.fdopen(TOLD, "r+b", buffering=0)
        os.set_inheritable(TOLD, False)
        self.file.seek(0)
        self.word = self.file.read()
        self.file.truncate(0)

    def pytest_runtest_logreport(self, report):
        before = self.seen.get(report.nodeid, "passed")
        self.seen[report.nodeid] = max(before, report.outcome, key=ORDER.index)

    def pytest_sessionfinish(self):
        self.file.seek(0)
        self.file.write(self.word + json.dumps(self.seen).encode())


if __name__ == "__main__":
    outcomes = Outcomes()
    sys.path.insert(0, os.getcwd())
    sys.exit(pytest.main(sys.argv[1:], plugins=[outcomes]))
