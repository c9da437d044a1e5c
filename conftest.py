"""A checkout's runs load the suite's pytest plugin; all options and hooks are in there."""

pytest_plugins = ["fa_verify.pytest_plugin.plugin"]
