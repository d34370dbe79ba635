"""The state of a run in etcd, so that another coordinator takes over when the host of one is lost."""
