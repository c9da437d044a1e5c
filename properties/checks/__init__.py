"""The guarantees of a correct kernel, each a function from a trial to its findings.

``guarantees`` lists them. A check draws nothing and knows no kernel.
"""
