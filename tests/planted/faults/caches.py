"""Faults of attention to a cache."""

from paged_attention import decode, paged

# The first key of every later page is read from the page before.
PageOfTheBoundary = paged("page of the boundary", one_query=True, masks=())
# The last key is lost where it fills its page.
LengthAtTheBoundary = paged("length", one_query=True, masks=())
# Keys past the 17th get no weight.
CacheKeysPast17 = paged("past 17", one_query=True, masks=())
# Heads past the eighth of a group are not stored.
CacheGroupPast8 = decode(stored=8)
# A window to the left is inclusive twice.
CacheWindow = paged("window", one_query=True, masks=("causal", "window"))
# The call writes the new keys, and does not attend to them.
AppendNotSeen = paged("append", cache=("paged", "append"), masks=())
