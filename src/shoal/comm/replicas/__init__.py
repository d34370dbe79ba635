"""How gradients travel between replicas: transport, overlap, link speed."""
