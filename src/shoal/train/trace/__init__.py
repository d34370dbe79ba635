"""Run a module without memory to count its parameters, products and activations."""
