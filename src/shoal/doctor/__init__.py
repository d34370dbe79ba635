"""Check a machine, a plan, hosts or a run for the usual causes of failures, before they happen.

    finding            the result of one check: a level, the evidence, a fix to type
    bounded            run checks at the same time, each in a child process with a time limit
    host, checks/      the checks of this host: network, memory, files, cores, gpu, versions
    needs, dry_run     the checks against what a recipe needs
    hosts, peer, link  the checks between hosts
    live               the checks of a run: which rank the others wait for

Nothing here imports torch. Nothing is changed: a check may write one temporary file, and removes it.
"""
