"""One problem through a subject and the oracle, and what watches over it.

Trials, guard bands, the watchdog, worker processes and the tally. Judgement is in ``checks``.
"""
