"""One run on several hosts: a coordinator, an agent on each host, and the workers that the agents start.

coordinator   `shoal train --hosts a:8,b:8`; listens on one interface, decides, needs no torch
  store       a child with the store through which the workers find each other
  agent       `shoal agent --join HOST:PORT`, one a host, started by ssh or by a scheduler; needs no torch
    template  a child with torch and the checked job, ready to be forked
      runner  a fork for one generation: the `WorkerGroup` of this host
        workers
"""
