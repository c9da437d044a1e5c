"""The faults on record that compute what an entry of the dictionary of a diagnosis does."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["RECORDED"]

# Parts of the names of faults on record, by the names of entries.
RECORDED: Mapping[str, tuple[str, ...]] = {
    "diagonal hidden": ("the diagonal is not visible",),
    "window edge hidden": ("the far edge of the window",),
    "top left": ("positions are aligned to the top left",),
    "always causal": ("always causal",),
    "padded keys": ("padding keys of the tail tile",),
    "zero keys": ("padding keys of the tail tile",),
    "padded rows": ("rows past M take part",),
    "finite mask": ("the mask's value is",),
    "diagonal stage": ("the diagonal stage ends",),
    "uneven splits": ("do not divide evenly",),
    "dq overwritten": ("the last key tile overwrites dq",),
    "maximum starts late": ("the running maximum starts",),
    "unguarded rows": (
        "a row that has seen nothing",
        "-inf - -inf",
    ),
    "empty lse 0": ("the lse of an empty row is 0.0",),
    "empty lse inf": ("the lse of an empty row is float",),
    "acc not rescaled": ("acc is not rescaled",),
    "l not rescaled": ("l is not rescaled",),
    "light tiles skipped": ("bits below the maximum are skipped",),
    "small sums dropped": ("sums 24 bits below a new maximum",),
    "lse base 2": ("lse is a logarithm to base 2",),
    "lse read in base 2": ("lse is handed on as if",),
    "dq without scale": (
        "dq: the scale is omitted",
        "dq is not scaled",
    ),
    "dq scaled twice": ("dq: the scale is applied twice",),
    "dk without scale": ("dkdv: the scale is omitted",),
    "dk scaled twice": ("dkdv: the scale is applied twice",),
    "scale of padded head_dim": ("the default scale is that of the padded",),
    "delta of a tile": ("delta is the row sum of one tile",),
    "no dlse": ("dlse is left out",),
    "dots in TF32": ("is in TF32",),
    "one head of a group": ("the heads of a group overwrite",),
    "fifth head of a group": ("the fifth head of a group",),
    "slopes repeat": ("slopes repeat",),
    "heads of 4 bits": ("the index of a head has four bits",),
    "lengths of the fourth": ("entries beyond the fourth",),
    "keys counted as rows": ("the keys of a sequence begin",),
    "keys begin with queries": ("the keys of a sequence begin",),
    "hidden keys capped": ("what is hidden is capped",),
    "no slope of the softcap": ("the gradient of a capped score",),
    "softcap in base 2": ("capped scores are scaled to base 2",),
    "ALiBi negated": ("ALiBi has the other sign",),
    "ALiBi from the own index": ("ALiBi's distance is taken from",),
    "ALiBi one too far": ("ALiBi's distance is one too large",),
    "bias in base 2": ("the bias is in base 2",),
    "no sink": ("the sink is left out of the softmax sum",),
    "sink scaled": ("the sink is scaled by sm_scale",),
    "sink in base 2": ("the sink is in base 2 already",),
    "sink of the key head": ("the sink is that of the key/value head",),
    "padding times 0": (
        "the load of v has no mask",
        "the load of k has none",
    ),
    "read as contiguous": ("sinks: they are read as if they were contiguous",),
    "nothing without keys": ("no forward where there are no keys",),
    "nothing without rows": ("no dk and dv where there are no rows",),
    "heads past a multiple of 8": ("heads beyond a multiple of eight",),
}
