"""LoRA: small trained matrices beside the frozen weights of linear layers."""
