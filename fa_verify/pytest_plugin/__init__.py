"""The pytest plugin: command-line options, Hypothesis profiles, workers, and the summary of a run.

``fuzz`` is --fa-minutes, and ``causes`` the search for causes of failures. The checks are in
``properties``, files and verdict in ``reporting``.
"""
