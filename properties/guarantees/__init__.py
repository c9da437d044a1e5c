"""The checks of the guarantees, each a function from a trial to its findings.

``claims`` lists them. ``compare`` defines ratios and findings, in which NaN never passes, and
``agreement`` compares two runs. Checks draw no problems (see ``problems``) and import no kernel.
"""
