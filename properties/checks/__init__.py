"""The checks of the guarantees, each a function from a trial to its findings.

``guarantees`` lists them. Checks draw no problems (see ``problems``) and import no kernel.
"""
