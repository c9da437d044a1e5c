"""The pytest plugin: options, profiles and summary of a run, a folder for each larger part.

``fuzz`` draws for minutes, ``gate`` compares with a baseline, ``report`` writes a page,
``findings`` records outcomes. Judgement is in ``properties``.
"""
