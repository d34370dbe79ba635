"""What a drill disturbs on this machine: processes, the network, a disk and memory."""
