"""The results of a run: the verdict, its statuses and waivers, and files.

``html`` is the page of --fa-report, ``recording`` the file of --fa-findings, ``sarif`` that of
--fa-sarif, and ``gate`` the comparison with --fa-baseline. ``pytest_plugin`` registers what a run
asks for.
"""
