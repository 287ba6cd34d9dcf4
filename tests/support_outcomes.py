"""A pytest plugin (`-p support_outcomes --outcomes FILE`): a line of JSON for each test as soon as it has run."""

import json


def pytest_addoption(parser):
    parser.addoption("--outcomes", required=True)


class Writer:
    def __init__(self, path: str):
        self.path = path

    def pytest_runtest_logreport(self, report):
        """Lines of setup, call and teardown; that of teardown is a test's last."""
        skipped = report.outcome == "skipped" and isinstance(report.longrepr, tuple)
        text = report.longrepr[2] if skipped else report.longreprtext
        line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "text": text}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config):
    config.pluginmanager.register(Writer(config.getoption("--outcomes")))
