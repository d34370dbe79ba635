"""Communication of gradients between replicas: transport, overlap, link speed."""
